// Activations of gated products, as functors: the value, and the value with the derivative.
//
// T is the dtype of the tensors. float32 gets functions as exact as the C library's. Half types get the fast
// ones: their error, a few units of 2^-22, is far below their rounding.
#pragma once

#include <cuda_runtime.h>

namespace liger {

struct Activated {
  float value, slope;
};

template <typename T>
__device__ __forceinline__ float sigmoid(float x) {
  if constexpr (sizeof(T) == 4) {
    return 1.0f / (1.0f + expf(-x));
  } else {
    return __fdividef(1.0f, 1.0f + __expf(-x));
  }
}

struct Silu {
  template <typename T>
  static __device__ __forceinline__ float value(float x) {
    return x * sigmoid<T>(x);
  }
  template <typename T>
  static __device__ __forceinline__ Activated value_and_slope(float x) {
    const float s = sigmoid<T>(x), silu = x * s;
    return {silu, fmaf(silu, 1.0f - s, s)};
  }
};

}  // namespace liger
