// SPDX-License-Identifier: BSD-3-Clause

// The activation of gate and up.
#pragma once

#include "device/sigmoid.cuh"

namespace liger::experts {

// gate * sigmoid(gate * (linear + cubic * gate^2)) * (up + offset) of clamped gate and up: "silu",
// "gelu_tanh" and "gpt_oss" differ in the constants alone. Comparisons keep NaN, unlike minimum.
struct Gate {
  float linear, cubic, offset;
  float limit;  // infinity for none

  struct Result {
    float product;
    float grad_gate, grad_up;  // derivatives of the product
  };

  // Without the select, an infinite gate would be NaN if cubic is 0.
  template <int kPower>
  __device__ __forceinline__ float slope(float gate) const {
    return cubic == 0.0f ? linear : fmaf(kPower * cubic * gate, gate, linear);
  }

  template <typename T>
  __device__ __forceinline__ float product(float gate, float up) const {
    gate = gate > limit ? limit : gate;
    up = up > limit ? limit : up < -limit ? -limit : up;
    return gate * sigmoid<T>(gate * slope<1>(gate)) * (up + offset);
  }

  template <typename T>
  __device__ __forceinline__ Result backward(float gate, float up) const {
    const bool gate_passes = !(gate > limit), up_passes = !(fabsf(up) > limit);
    gate = gate_passes ? gate : limit;
    up = (up > limit ? limit : up < -limit ? -limit : up) + offset;
    const float z = gate * slope<1>(gate);
    // s * (1 - s) as e * r * r: 1 - s cancels, and the exponent is negative, so e cannot overflow.
    const float e = exponential<T>(-fabsf(z)), r = reciprocal<T>(1.0f + e), s = z < 0.0f ? e * r : r;
    const float value = gate * s, derivative = fmaf(gate * (e * r * r), slope<3>(gate), s);
    return {value * up, gate_passes ? derivative * up : 0.0f, up_passes ? value : 0.0f};
  }
};

}  // namespace liger::experts
