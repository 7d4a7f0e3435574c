// SPDX-License-Identifier: BSD-3-Clause

// csrc/device/exp2.cuh on a CPU.
#pragma once

#include "machine.h"

namespace liger {

inline constexpr float kLog2e = 1.4426950408889634f;

inline float exp2_fast(float x) {
  return std::exp2(x);
}

}  // namespace liger
