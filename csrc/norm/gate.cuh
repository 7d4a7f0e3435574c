// SPDX-License-Identifier: BSD-3-Clause

// The gate of rms_norm_gated, and the groups of the last dimension that it normalises separately.
//
// With a = silu(gate) or sigmoid(gate), n = x * rstd and w = offset + weight: y = n * w * a
// (Extra::kGateLast) or, with n = x * a * rstd, y = n * w (Extra::kGateFirst).
#pragma once

#include <cstdint>

#include "device/fast_divide.h"
#include "device/sigmoid.cuh"
#include "device/vec.cuh"

namespace liger {

// A second tensor of the size of x for the kernel to read.
enum class Extra { kNone, kResidual, kGateLast, kGateFirst };

inline constexpr bool is_gate(Extra extra) {
  return extra == Extra::kGateLast || extra == Extra::kGateFirst;
}

struct Gate {
  // Divides by the number of groups per row. `hidden` of the kernels is the size of a group: they treat each
  // group of columns as a separate tensor.
  FastDivide groups;
  bool sigmoid;           // the activation is sigmoid instead of SiLU
  bool round_activation;  // "none": a and, before the norm, x * a are rounded to the dtype of x
  bool round_product;  // a weight of the dtype of x, not "gemma": n * w is rounded before the product with a
};

// The casting of the fast path: mode "llama" and a weight of the dtype of x. All flags are compile-time
// constants.
template <bool kFastPath>
__device__ __forceinline__ Gate casting_of_path(Gate gate) {
  if constexpr (kFastPath) gate.round_activation = false, gate.round_product = true;
  return gate;
}

struct Activated {
  float value, derivative;
};

// s: the sigmoid of the gate.
template <typename T>
__device__ __forceinline__ Activated activate(const Gate& options, float gate, float s) {
  const float complement = 1.0f - s, silu = gate * s;
  Activated a = options.sigmoid ? Activated{s, s * complement} : Activated{silu, fmaf(silu, complement, s)};
  if (options.round_activation) a.value = round_to<T>(a.value);
  return a;
}
template <typename T>
__device__ __forceinline__ Activated activate(const Gate& options, float gate) {
  return activate<T>(options, gate, sigmoid<T>(gate));
}

template <typename T, int N>
__device__ __forceinline__ void sigmoids(const Vec<T, N>& gate, float (&out)[N]) {
  unpack(gate, out);
#pragma unroll
  for (int i = 0; i < N; ++i) out[i] = sigmoid<T>(out[i]);
}

// The inputs of a norm after the gate, from the sigmoids of the gate.
template <typename T, int N>
__device__ __forceinline__ void gated_inputs(const Gate& options, const Vec<T, N>& x, const Vec<T, N>& gate,
                                             const float (&s)[N], float (&out)[N]) {
  float gates[N];
  unpack(x, out);
  unpack(gate, gates);
#pragma unroll
  for (int i = 0; i < N; ++i) out[i] *= activate<T>(options, gates[i], s[i]).value;
  if (options.round_activation) round_values<T>(out);
}
template <typename T, int N>
__device__ __forceinline__ void gated_inputs(const Gate& options, const Vec<T, N>& x, const Vec<T, N>& gate,
                                             float (&out)[N]) {
  float s[N];
  sigmoids(gate, s);
  gated_inputs(options, x, gate, s, out);
}

// Computes y from n * w, for a norm before the gate.
template <typename T, int N>
__device__ __forceinline__ void gate_outputs(const Gate& options, const Vec<T, N>& gate, float (&y)[N]) {
  float gates[N];
  unpack(gate, gates);
  if (options.round_product) round_values<T>(y);
#pragma unroll
  for (int i = 0; i < N; ++i) y[i] *= activate<T>(options, gates[i]).value;
}

// Backward of a norm before the gate: replaces the upstream gradient by the gradient of n * w, and returns
// the gradient of the gate.
template <typename T, int N>
__device__ __forceinline__ Vec<T, N> grad_of_last_gate(const Gate& options, const float (&x)[N],
                                                       const Vec<T, N>& gate, const float (&w)[N], float rstd,
                                                       bool round_scaled, float (&g)[N]) {
  float products[N], grad_gate[N];
#pragma unroll
  for (int i = 0; i < N; ++i) products[i] = x[i] * rstd;
  if (round_scaled) round_values<T>(products);
#pragma unroll
  for (int i = 0; i < N; ++i) products[i] *= w[i];
  if (options.round_product) round_values<T>(products);
  unpack(gate, grad_gate);
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const Activated a = activate<T>(options, grad_gate[i]);
    grad_gate[i] = g[i] * products[i] * a.derivative;
    g[i] *= a.value;
  }
  return pack<T, N>(grad_gate);
}

// Backward of a norm after the gate, from the gradient of its input x * a and the sigmoids of the gate: the
// gradients of x and of the gate.
template <typename T, int N>
__device__ __forceinline__ void grad_of_first_gate(const Gate& options, const Vec<T, N>& x,
                                                   const Vec<T, N>& gate, const float (&s)[N],
                                                   float (&grad_input)[N], Vec<T, N>& grad_x,
                                                   Vec<T, N>& grad_gate) {
  float xs[N], gates[N];
  unpack(x, xs);
  unpack(gate, gates);
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const Activated a = activate<T>(options, gates[i], s[i]);
    gates[i] = grad_input[i] * xs[i] * a.derivative;
    grad_input[i] *= a.value;
  }
  grad_x = pack<T, N>(grad_input);
  grad_gate = pack<T, N>(gates);
}

// The columns of a block: with a gate the columns of one group, otherwise all columns.
struct BlockColumns {
  int64_t first;           // column
  int group, groups;       // the group of this block, the number of groups per row
  unsigned block, blocks;  // the index of this block in its group, the number of blocks of the group

  // Index of a row statistic of shape (rows, groups).
  __device__ __forceinline__ int64_t statistic(int64_t row) const { return row * groups + group; }
};

template <Extra kExtra, typename Params>
__device__ __forceinline__ BlockColumns columns_of_block(const Params& p) {
  if constexpr (is_gate(kExtra)) {
    const FastDivide& groups = p.gate.groups;
    const uint32_t block = groups.quotient(blockIdx.x), group = groups.remainder(blockIdx.x, block);
    return {int64_t{group} * p.hidden, static_cast<int>(group), static_cast<int>(groups.divisor), block,
            groups.quotient(gridDim.x)};
  } else {
    return {0, 0, 1, blockIdx.x, gridDim.x};
  }
}

}  // namespace liger
