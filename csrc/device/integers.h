// SPDX-License-Identifier: BSD-3-Clause

// constexpr integer arithmetic for host and device code.
#pragma once

#include <type_traits>

namespace liger {

template <typename T>
constexpr T ceil_div(T a, std::type_identity_t<T> b) {
  return (a + b - 1) / b;
}
template <typename T>
constexpr T round_up(T a, std::type_identity_t<T> b) {
  return ceil_div(a, b) * b;
}

}  // namespace liger
