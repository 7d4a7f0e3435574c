// SPDX-License-Identifier: BSD-3-Clause

// RMSNorm backward of rows that do not fit in the registers of a block: one block per row, and per group with
// a gate, for grad_x and grad_gate, and a separate kernel for grad_weight. norm/rms_norm_backward.cuh has the
// formulas and includes this file.
#pragma once

#include "device/reduce.cuh"
#include "norm/rms_norm_backward_params.cuh"

namespace liger {

// The input of the norm and the upstream gradient of its output n * w, for N columns. The gate is loaded if
// there is one.
template <typename T, int N, Extra kExtra>
__device__ __forceinline__ void load_norm_gradient(const RmsNormBackwardOf<kExtra>& p, const T* x, const T* g,
                                                   const T* gate, float (&xs)[N], float (&gs)[N]) {
  unpack(load<T, N>(g), gs);
  const Vec<T, N> loaded = load<T, N>(x);
  if constexpr (kExtra == Extra::kGateFirst) {
    gated_inputs(p.gate, loaded, load<T, N>(gate), xs);
  } else {
    unpack(loaded, xs);
  }
  if constexpr (kExtra == Extra::kGateLast) {
    float gates[N];
    unpack(load<T, N>(gate), gates);
#pragma unroll
    for (int i = 0; i < N; ++i) gs[i] *= activate<T>(p.gate, gates[i]).value;
  }
}

// A row is read twice, the second time mostly from L2.
template <typename T, int N, Extra kExtra>
__global__ void __launch_bounds__(kMaxRowThreads)
    rms_norm_backward_wide_kernel(const RmsNormBackwardOf<kExtra> p) {
  __shared__ float scratch[32];
  const BlockColumns columns = columns_of_block<kExtra>(p);
  const int64_t row = columns.block;
  const T* x = static_cast<const T*>(p.x) + columns.first + p.x_rows.offset(row);
  const T* g = static_cast<const T*>(p.grad_y) + columns.first + p.grad_y_rows.offset(row);
  const T* extra = static_cast<const T*>(p.extra) + columns.first + p.extra_rows.offset(row);
  T* grad_x = static_cast<T*>(p.grad_x) + columns.first + p.grad_x_rows.offset(row);
  const int64_t begin = int64_t{threadIdx.x} * N, step = int64_t{blockDim.x} * N;
  const float rstd = p.rstd[columns.statistic(row)];
  float dot = 0.0f;
#pragma unroll 2
  for (int64_t column = begin; column < p.hidden; column += step) {
    float w[N], xs[N], gs[N];
    load_weight<T, N>(p.weight, p.float_weight, p.offset, columns.first + column, w);
    load_norm_gradient<T, N, kExtra>(p, x + column, g + column, extra + column, xs, gs);
#pragma unroll
    for (int i = 0; i < N; ++i) dot = fmaf(gs[i] * w[i], xs[i], dot);
  }
  dot = block_reduce<Sum>(dot, scratch);
  const float shift = dot / static_cast<float>(p.hidden) * rstd * rstd * rstd;
#pragma unroll 2
  for (int64_t column = begin; column < p.hidden; column += step) {
    float w[N];
    load_weight<T, N>(p.weight, p.float_weight, p.offset, columns.first + column, w);
    const Vec<T, N> loaded = load<T, N>(x + column);
    if constexpr (is_gate(kExtra)) {
      const Vec<T, N> gate = load<T, N>(extra + column);
      T* grad_gate = static_cast<T*>(p.grad_gate) + columns.first + p.grad_gate_rows.offset(row);
      float xs[N], gs[N];
      unpack(load<T, N>(g + column), gs);
      Vec<T, N> of_x, of_gate;
      if constexpr (kExtra == Extra::kGateLast) {
        unpack(loaded, xs);
        of_gate = grad_of_last_gate(p.gate, xs, gate, w, rstd, p.round_scaled, gs);
        grad_of_norm(xs, gs, w, rstd, shift);
        of_x = pack<T, N>(gs);
      } else {
        float s[N];
        sigmoids(gate, s);
        gated_inputs(p.gate, loaded, gate, s, xs);
        grad_of_norm(xs, gs, w, rstd, shift);
        grad_of_first_gate(p.gate, loaded, gate, s, gs, of_x, of_gate);
      }
      if (p.grad_x) store_whole(grad_x + column, of_x);
      if (p.grad_gate) store_whole(grad_gate + column, of_gate);
    } else {
      Vec<T, N> residual{};
      if (p.extra) residual = load<T, N>(extra + column);
      store_whole(grad_x + column,
                  grad_vector(loaded, load<T, N>(g + column), w, residual, p.extra != nullptr, rstd, shift));
    }
  }
}

// Partial sums of grad_weight. Grid: (columns / (256 * N), partial sums): a thread sums N columns of every
// gridDim.y-th row.
template <typename T, int N, Extra kExtra>
__global__ void __launch_bounds__(256) rms_norm_weight_grad_kernel(const RmsNormBackwardOf<kExtra> p) {
  const int64_t column = (int64_t{blockIdx.x} * blockDim.x + threadIdx.x) * N;
  int64_t total = p.hidden, group = 0, groups = 1;
  if constexpr (is_gate(kExtra)) {
    groups = p.gate.groups.divisor;
    total *= groups;
    group = column / p.hidden;
  }
  if (column >= total) return;
  float sum[N] = {};
#pragma unroll 4
  for (int64_t row = blockIdx.y; row < p.rows; row += gridDim.y) {
    float xs[N], gs[N];
    load_norm_gradient<T, N, kExtra>(p, static_cast<const T*>(p.x) + p.x_rows.offset(row) + column,
                                     static_cast<const T*>(p.grad_y) + p.grad_y_rows.offset(row) + column,
                                     static_cast<const T*>(p.extra) + p.extra_rows.offset(row) + column, xs,
                                     gs);
    accumulate_weight_grad<T, N>(xs, gs, p.rstd[row * groups + group], p.round_scaled, sum);
  }
  p.grads.template store<T>(0, blockIdx.y * p.grads.stride + column, sum);
}

template <typename T, int N, Extra kExtra>
void launch_rms_norm_backward_wide(const RmsNormBackwardOf<kExtra>& p, int partials, cudaStream_t stream) {
  bool need_row_gradients = p.grad_x != nullptr;
  int64_t columns = p.hidden;
  if constexpr (is_gate(kExtra)) {
    need_row_gradients = need_row_gradients || p.grad_gate != nullptr;
    columns *= p.gate.groups.divisor;
  }
  if (need_row_gradients) {
    rms_norm_backward_wide_kernel<T, N, kExtra>
        <<<blocks_of_groups<kExtra>(p, p.rows), kMaxRowThreads, 0, stream>>>(p);
  }
  if (p.grads.data[0]) {
    const dim3 grid(static_cast<unsigned>((columns + 256 * N - 1) / (256 * N)), partials);
    rms_norm_weight_grad_kernel<T, N, kExtra><<<grid, 256, 0, stream>>>(p);
  }
}

}  // namespace liger
