// How the steps of a chunk select their kernels: values of a call become compile-time constants.
#pragma once

#include <cstddef>
#include <iterator>
#include <type_traits>

#include "linear_ce/sm90/tile.h"

namespace liger::linear_ce {

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

// Calls f with tile_columns(hidden) as a compile-time constant.
template <size_t kAt = 0, typename F>
void with_tile_columns(int64_t hidden, const F& f) {
  constexpr int kColumns = sm90::kTileWidths[kAt];
  if constexpr (kAt + 1 < std::size(sm90::kTileWidths)) {
    if (sm90::tile_columns(hidden) != kColumns) return with_tile_columns<kAt + 1>(hidden, f);
  }
  f(std::integral_constant<int, kColumns>{});
}

// Calls f(kPartialTiles, kTileColumns) with the constants of the kernels of both gradients.
template <typename F>
void with_gradient_tiles(int64_t hidden, int64_t vocab, const F& f) {
  if (sm90::has_partial_tiles(hidden, vocab)) {
    with_tile_columns(hidden, [&](auto columns) { f(std::true_type{}, columns); });
  } else {
    f(std::false_type{}, std::integral_constant<int, sm90::kTileN>{});
  }
}

}  // namespace liger::linear_ce
