// SPDX-License-Identifier: BSD-3-Clause

// bfloat16 on a CPU.
#pragma once

#include "machine.h"

namespace liger::lm_head {

template <typename T>
float low_of(uint32_t pair) {
  const uint32_t bits = pair << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
template <typename T>
float high_of(uint32_t pair) {
  return low_of<T>(pair >> 16);
}
inline uint32_t rounded(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  if (value != value) return 0x7fc0;
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
template <typename T>
uint32_t pack_pair(float low, float high) {
  return rounded(high) << 16 | rounded(low);
}

}  // namespace liger::lm_head
