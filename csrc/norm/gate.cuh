// The gate of rms_norm_gated, and the groups of the last dimension that it normalises separately.
//
// With a = silu(gate) or sigmoid(gate), n = x * rstd and w = offset + weight: y = n * w * a (Extra::kGateLast)
// or, with n = x * a * rstd, y = n * w (Extra::kGateFirst).
#pragma once

#include <cstdint>

#include "device/fast_divide.h"
#include "device/sigmoid.cuh"
#include "device/vec.cuh"

namespace liger {

// The second tensor of the size of x that a kernel reads.
enum class Extra { kNone, kResidual, kGateLast, kGateFirst };

inline constexpr bool is_gate(Extra extra) {
  return extra == Extra::kGateLast || extra == Extra::kGateFirst;
}

struct Gate {
  // Of groups per row. `hidden` of the kernels is the size of a group: they treat each group of columns like
  // a tensor of its own.
  FastDivide groups;
  bool sigmoid;           // the activation is sigmoid instead of SiLU
  bool round_activation;  // "none": a and, before the norm, x * a are rounded to the dtype of x
  bool round_product;  // a weight of the dtype of x, not "gemma": n * w is rounded before the product with a
};

// The casting of the fast path: mode "llama" and a weight of the dtype of x. Its flags are compile-time
// constants.
template <bool kFastPath>
__device__ __forceinline__ Gate casting_of_path(Gate gate) {
  if constexpr (kFastPath) gate.round_activation = false, gate.round_product = true;
  return gate;
}

struct Activated {
  float value, derivative;
};

template <typename T>
__device__ __forceinline__ Activated activate(const Gate& options, float gate) {
  const float s = sigmoid<T>(gate), complement = 1.0f - s;
  const float silu = gate * s;
  Activated a = options.sigmoid ? Activated{s, s * complement} : Activated{silu, fmaf(silu, complement, s)};
  if (options.round_activation) a.value = round_to<T>(a.value);
  return a;
}

// The input of a norm after the gate.
template <typename T>
__device__ __forceinline__ float gated_input(const Gate& options, float x, float activation) {
  const float product = x * activation;
  return options.round_activation ? round_to<T>(product) : product;
}

template <typename T, int N>
__device__ __forceinline__ void gated_inputs(const Gate& options, const Vec<T, N>& x, const Vec<T, N>& gate,
                                             float (&out)[N]) {
  float gates[N];
  unpack(x, out);
  unpack(gate, gates);
#pragma unroll
  for (int i = 0; i < N; ++i) out[i] = gated_input<T>(options, out[i], activate<T>(options, gates[i]).value);
}

// y of a norm before the gate, from n * w.
template <typename T, int N>
__device__ __forceinline__ void gate_outputs(const Gate& options, const Vec<T, N>& gate, float (&y)[N]) {
  float gates[N];
  unpack(gate, gates);
#pragma unroll
  for (int i = 0; i < N; ++i)
    y[i] = (options.round_product ? round_to<T>(y[i]) : y[i]) * activate<T>(options, gates[i]).value;
}

// Backward of a norm before the gate: replaces the upstream gradient by that of n * w, and returns the
// gradient of the gate.
template <typename T, int N>
__device__ __forceinline__ Vec<T, N> grad_of_last_gate(const Gate& options, const float (&x)[N],
                                                       const Vec<T, N>& gate, const float (&w)[N], float rstd,
                                                       bool round_scaled, float (&g)[N]) {
  float grad_gate[N];
  unpack(gate, grad_gate);
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const Activated a = activate<T>(options, grad_gate[i]);
    const float scaled = x[i] * rstd;
    const float product = (round_scaled ? round_to<T>(scaled) : scaled) * w[i];
    grad_gate[i] = g[i] * (options.round_product ? round_to<T>(product) : product) * a.derivative;
    g[i] *= a.value;
  }
  return pack<T, N>(grad_gate);
}

// Backward of a norm after the gate, from the gradient of its input x * a: the gradients of x and of the gate.
template <typename T, int N>
__device__ __forceinline__ void grad_of_first_gate(const Gate& options, const Vec<T, N>& x,
                                                   const Vec<T, N>& gate, float (&grad_input)[N],
                                                   Vec<T, N>& grad_x, Vec<T, N>& grad_gate) {
  float xs[N], gates[N];
  unpack(x, xs);
  unpack(gate, gates);
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const Activated a = activate<T>(options, gates[i]);
    gates[i] = grad_input[i] * xs[i] * a.derivative;
    grad_input[i] *= a.value;
  }
  grad_x = pack<T, N>(grad_input);
  grad_gate = pack<T, N>(gates);
}

// The columns that a block works on: with a gate those of one group, otherwise all.
struct BlockColumns {
  int64_t first;           // column
  int group, groups;       // of this block, and per row
  unsigned block, blocks;  // the index of this block among those of its group, and their number

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
