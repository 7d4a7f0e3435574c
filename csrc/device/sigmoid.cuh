// Exponential, reciprocal and sigmoid of a float.
//
// T is the dtype of the tensors. float32 uses the accurate functions of the CUDA math library. Half types use
// the fast intrinsics, whose error, a few units of 2^-22, is far below the rounding to a half type.
#pragma once

#include <cuda_runtime.h>

namespace liger {

template <typename T>
__device__ __forceinline__ float exponential(float x) {
  return sizeof(T) == 4 ? expf(x) : __expf(x);
}
template <typename T>
__device__ __forceinline__ float reciprocal(float x) {
  return sizeof(T) == 4 ? 1.0f / x : __fdividef(1.0f, x);
}
template <typename T>
__device__ __forceinline__ float sigmoid(float x) {
  return reciprocal<T>(1.0f + exponential<T>(-x));
}

}  // namespace liger
