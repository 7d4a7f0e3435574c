// SPDX-License-Identifier: BSD-3-Clause

// Fast base-2 exponential.
#pragma once

#include <cuda_runtime.h>

namespace liger {

inline constexpr float kLog2e = 1.4426950408889634f;

// One instruction. Subnormal inputs and results are flushed to 0.
__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace liger
