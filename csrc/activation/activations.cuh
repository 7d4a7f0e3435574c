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

// cdf(-|x|) of the normal distribution for half types, and exp(-x^2 / 2), which its density shares: t * P(t)
// * exp(-x^2 / 2) with t = 1 / (1 + p * |x|). The coefficients are those of scripts/fit_normal_cdf.py, the
// constant first: relative error below 8e-7 and, with the arithmetic in float, below 3e-6 for |x| <= 9 (and
// 6e-6 as long as the result is a normal float, |x| <= 12.9; beyond, it is 0). So one exponential and one
// reciprocal, as SiLU.
struct NormalTail {
  static constexpr float kSteepness = 0.36f;
  float cdf, exponential;

  __device__ __forceinline__ explicit NormalTail(float x) {
    constexpr float kHalfLog2e = 0.72134752044448170f;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(exponential) : "f"(x * x * -kHalfLog2e));
    float t;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(t) : "f"(fmaf(kSteepness, fabsf(x), 1.0f)));
    const float c[] = {0.143717437f, 0.141710631f,  0.140057747f, 0.0256226914f,
                       0.18229955f,  -0.180753289f, 0.0473450943f};
    float sum = c[6];
#pragma unroll
    for (int i = 5; i >= 0; --i) sum = fmaf(sum, t, c[i]);
    cdf = sum * t * exponential;
  }
};

// x * cdf(x), cdf that of the normal distribution. Its derivative is cdf(x) + x * pdf(x).
struct Gelu {
  template <typename T>
  static __device__ __forceinline__ float value(float x) {
    return value_and_slope<T>(x).value;
  }
  template <typename T>
  static __device__ __forceinline__ Activated value_and_slope(float x) {
    float cdf, exponential;
    if constexpr (sizeof(T) == 4) {
      cdf = fmaf(0.5f, erff(x * 0.70710678118654752f), 0.5f);
      exponential = expf(-0.5f * x * x);
    } else {
      const NormalTail tail(x);
      cdf = x < 0.0f ? tail.cdf : 1.0f - tail.cdf;
      exponential = tail.exponential;
    }
    return {x * cdf, fmaf(x, 0.39894228040143268f * exponential, cdf)};
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
