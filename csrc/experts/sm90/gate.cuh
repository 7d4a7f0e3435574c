// SPDX-License-Identifier: BSD-3-Clause

// The activation of gate and up.
#pragma once

#include "device/sigmoid.cuh"
#include "experts/sm90/ptx.cuh"

namespace liger::experts {

// gate * sigmoid(gate * (linear + cubic * gate^2)) * (up + offset) of clamped gate and up: "silu",
// "gelu_tanh" and "gpt_oss" differ in the constants alone. NaN stays NaN.
struct Gate {
  float linear, cubic, offset;
  float limit;  // infinity for none

  struct Result {
    float product;
    float grad_gate, grad_up;  // derivatives of the product
  };

  // silu without a limit has instructions of its own (kIsSilu), half as many.
  bool is_silu() const { return linear == 1.0f && cubic == 0.0f && offset == 0.0f && limit > kLargest; }

  template <typename T, bool kIsSilu>
  __device__ __forceinline__ float product(float gate, float up) const {
    if constexpr (kIsSilu) return gate * sigmoid<T>(gate) * up;
    gate = min_or_nan(gate, limit);
    return gate * sigmoid<T>(gate * slope(square(gate), 1.0f)) * moved(up);
  }

  template <typename T, bool kIsSilu>
  __device__ __forceinline__ Result backward(float gate, float up) const {
    bool gate_passes = true, up_passes = true;
    float z = gate, slope_of_z = 1.0f;
    if constexpr (!kIsSilu) {
      gate_passes = !(gate > limit), up_passes = !(fabsf(up) > limit);
      gate = min_or_nan(gate, limit);
      up = moved(up);
      z = gate * slope(square(gate), 1.0f), slope_of_z = slope(square(gate), 3.0f);
    }
    // 1 - s is off by 2^-22 at most, which is far below the rounding of a half type to a derivative near 1.
    const float s = sigmoid<T>(z), value = gate * s;
    const float derivative = fmaf(value * (1.0f - s), slope_of_z, s);
    return {value * up, gate_passes ? derivative * up : 0.0f, up_passes ? value : 0.0f};
  }

 private:
  static constexpr float kLargest = 3.4028235e38f;

  // Finite, since an infinite square times a cubic of 0 would be NaN.
  static __device__ __forceinline__ float square(float gate) { return fminf(gate * gate, kLargest); }
  __device__ __forceinline__ float slope(float square, float power) const {
    return fmaf(power * cubic, square, linear);
  }
  __device__ __forceinline__ float moved(float up) const {
    return offset - min_or_nan(-min_or_nan(up, limit), limit);
  }
};

}  // namespace liger::experts
