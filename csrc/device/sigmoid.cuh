// SPDX-License-Identifier: BSD-3-Clause

// Exponential, reciprocal and sigmoid of a float.
//
// T is the dtype of the tensors. float32 uses the accurate functions of the CUDA math library. Half types use
// single instructions of the special function unit, which flush subnormal numbers to 0. Their error, a few
// units of 2^-22, is far below the rounding to a half type.
#pragma once

#include <cuda_runtime.h>

#include "device/exp2.cuh"

namespace liger {

__device__ __forceinline__ float reciprocal_fast(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

template <typename T>
__device__ __forceinline__ float exponential(float x) {
  return sizeof(T) == 4 ? expf(x) : exp2_fast(x * kLog2e);
}
template <typename T>
__device__ __forceinline__ float reciprocal(float x) {
  return sizeof(T) == 4 ? 1.0f / x : reciprocal_fast(x);
}
template <typename T>
__device__ __forceinline__ float sigmoid(float x) {
  return reciprocal<T>(1.0f + exponential<T>(-x));
}

}  // namespace liger
