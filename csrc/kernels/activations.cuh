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

// x * cdf(x), cdf that of the normal distribution. Its derivative is cdf(x) + x * pdf(x).
struct Gelu {
  static __device__ __forceinline__ float cdf(float x) {
    return fmaf(0.5f, erff(x * 0.70710678118654752f), 0.5f);
  }
  template <typename T>
  static __device__ __forceinline__ float value(float x) {
    return x * cdf(x);
  }
  template <typename T>
  static __device__ __forceinline__ Activated value_and_slope(float x) {
    const float c = cdf(x), pdf = 0.39894228040143268f * exponential<T>(-0.5f * x * x);
    return {x * c, fmaf(x, pdf, c)};
  }
};

// 0.5 * x * (1 + tanh(z)) with z = sqrt(2 / pi) * (x + 0.044715 * x^3), written as x * sigmoid(2 * z): exact
// also where 1 + tanh(z) would cancel.
struct GeluTanh {
  static constexpr float kLinear = 1.5957691216057308f;  // 2 * sqrt(2 / pi)
  static constexpr float kCubic = 0.044715f * kLinear;

  template <typename T>
  static __device__ __forceinline__ float value(float x) {
    return x * sigmoid<T>(x * fmaf(kCubic, x * x, kLinear));
  }
  template <typename T>
  static __device__ __forceinline__ Activated value_and_slope(float x) {
    // The derivative of the sigmoid is multiplied by x and by a square of x, and with it what 1 - s would
    // have lost. e is that of the negative side, so that it cannot overflow.
    const float square = x * x, twice_z = x * fmaf(kCubic, square, kLinear);
    const float e = exponential<T>(-fabsf(twice_z)), r = reciprocal<T>(1.0f + e);
    const float s = twice_z < 0.0f ? e * r : r;
    return {x * s, fmaf(x * (e * r * r), fmaf(3.0f * kCubic, square, kLinear), s)};
  }
};

}  // namespace liger
