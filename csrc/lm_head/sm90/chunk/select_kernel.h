// SPDX-License-Identifier: BSD-3-Clause

// Kernel selection for the steps of a chunk: values of a call become compile-time constants.
#pragma once

#include <cstddef>
#include <iterator>
#include <type_traits>

#include "lm_head/sm90/sizes.h"

namespace liger::lm_head {

// Calls f with each flag as a compile-time constant.
template <typename F>
void with_flags(const F& f) {
  f();
}
template <typename F, typename... Flags>
void with_flags(const F& f, bool flag, Flags... flags) {
  const auto with = [&](auto constant) {
    with_flags([&](auto... others) { f(constant, others...); }, flags...);
  };
  flag ? with(std::true_type{}) : with(std::false_type{});
}

// Calls f with tile_columns(hidden, kWidths) as a compile-time constant.
template <const auto& kWidths, size_t kAt = 0, typename F>
void with_tile_columns(int64_t hidden, const F& f) {
  constexpr int kColumns = kWidths[kAt];
  if constexpr (kAt + 1 < std::size(kWidths)) {
    if (sm90::tile_columns(hidden, kWidths) != kColumns)
      return with_tile_columns<kWidths, kAt + 1>(hidden, f);
  }
  f(std::integral_constant<int, kColumns>{});
}

// Calls f(kPartialTiles, kTileColumns) with the constants of the kernel of a gradient that has these widths.
template <const auto& kWidths, typename F>
void with_gradient_tiles(int64_t hidden, int64_t vocab, const F& f) {
  if (sm90::has_partial_tiles(hidden, vocab)) {
    with_tile_columns<kWidths>(hidden, [&](auto columns) { f(std::true_type{}, columns); });
  } else {
    f(std::false_type{}, std::integral_constant<int, sm90::kTileN>{});
  }
}

}  // namespace liger::lm_head
