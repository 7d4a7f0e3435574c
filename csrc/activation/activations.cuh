// SPDX-License-Identifier: BSD-3-Clause

// Activations of gated products as functors: value(x), and value_and_derivative(x) for the backward.
//
// T is the dtype of the tensors, as in device/sigmoid.cuh.
#pragma once

#include <cuda_runtime.h>

#include "device/sigmoid.cuh"

namespace liger {

struct ValueAndDerivative {
  float value, derivative;
};

struct Silu {
  template <typename T>
  static __device__ __forceinline__ float value(float x) {
    return x * sigmoid<T>(x);
  }
  template <typename T>
  static __device__ __forceinline__ ValueAndDerivative value_and_derivative(float x) {
    const float s = sigmoid<T>(x), silu = x * s;
    return {silu, fmaf(silu, 1.0f - s, s)};
  }
};

// For half types: cdf(-|x|) of the normal distribution as t * P(t) * exp(-x^2 / 2) with t = 1 / (1 + p *
// |x|), and the factor exp(-x^2 / 2), which the density also needs. The cost is one exponential and one
// reciprocal, as for SiLU. scripts/fit_normal_cdf.py computes the coefficients of P, the constant first.
// The relative error of the formula is below 8e-7; evaluated in float it is below 3e-6 for |x| <= 9, and
// below 6e-6 as long as the result is a normal float, |x| <= 12.9. Beyond that the result is 0.
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

// GELU: x * cdf(x) with the cdf of the normal distribution. Its derivative is cdf(x) + x * pdf(x).
struct Gelu {
  template <typename T>
  static __device__ __forceinline__ float value(float x) {
    return value_and_derivative<T>(x).value;
  }
  template <typename T>
  static __device__ __forceinline__ ValueAndDerivative value_and_derivative(float x) {
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

// GELU with approximate = "tanh": 0.5 * x * (1 + tanh(z)) with z = sqrt(2 / pi) * (x + 0.044715 * x^3). It is
// computed as x * sigmoid(2 * z), because 1 + tanh(z) cancels for negative z.
struct GeluTanh {
  static constexpr float kLinear = 1.5957691216057308f;  // 2 * sqrt(2 / pi)
  static constexpr float kCubic = 0.044715f * kLinear;

  template <typename T>
  static __device__ __forceinline__ float value(float x) {
    return x * sigmoid<T>(x * fmaf(kCubic, x * x, kLinear));
  }
  template <typename T>
  static __device__ __forceinline__ ValueAndDerivative value_and_derivative(float x) {
    // The derivative of the sigmoid, s * (1 - s), is computed as e * r * r: it is multiplied by up to x^3,
    // which would amplify the cancellation in 1 - s. The exponent is negative, so e cannot overflow.
    const float square = x * x, twice_z = x * fmaf(kCubic, square, kLinear);
    const float e = exponential<T>(-fabsf(twice_z)), r = reciprocal<T>(1.0f + e);
    const float s = twice_z < 0.0f ? e * r : r;
    return {x * s, fmaf(x * (e * r * r), fmaf(3.0f * kCubic, square, kLinear), s)};
  }
};

}  // namespace liger
