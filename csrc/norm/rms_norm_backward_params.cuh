// SPDX-License-Identifier: BSD-3-Clause

// Parameters of the RMSNorm backward, and its formulas for the columns of a thread.
#pragma once

#include <type_traits>

#include "device/rows.cuh"
#include "norm/backward_plan.cuh"
#include "norm/parameter_grads.cuh"
#include "norm/rms_norm.cuh"

namespace liger {

template <typename RowOffsets>
struct RmsNormBackwardParams {
  // extra: grad_residual, which is added to grad_x, or the gate. extra and weight may be null.
  const void *grad_y, *extra, *x, *weight;
  const float* rstd;
  void* grad_x;             // null: not needed
  ParameterGrads<1> grads;  // of the weight
  RowOffsets grad_y_rows, extra_rows, x_rows, grad_x_rows;
  int64_t rows, hidden;
  float offset;
  bool float_weight, round_scaled;
};
using RmsNormBackward = RmsNormBackwardParams<Rows>;

template <typename RowOffsets>
struct GatedRmsNormBackwardParams : RmsNormBackwardParams<RowOffsets> {
  void* grad_gate;  // null: not needed
  RowOffsets grad_gate_rows;
  Gate gate;
};
using GatedRmsNormBackward = GatedRmsNormBackwardParams<Rows>;

// As in the forward, the fast path has fewer kernel parameters, and its flags are compile-time constants.
using FastRmsNormBackward = RmsNormBackwardParams<OneStride>;

inline bool has_fast_path(const RmsNormBackward& p) {
  return p.weight && !p.float_weight && p.round_scaled &&
         !(p.grad_y_rows.nested || p.extra_rows.nested || p.x_rows.nested || p.grad_x_rows.nested);
}
inline FastRmsNormBackward fast_params(const RmsNormBackward& p) {
  return {p.grad_y,
          p.extra,
          p.x,
          p.weight,
          p.rstd,
          p.grad_x,
          p.grads,
          {p.grad_y_rows.stride},
          {p.extra_rows.stride},
          {p.x_rows.stride},
          {p.grad_x_rows.stride},
          p.rows,
          p.hidden,
          p.offset,
          p.float_weight,
          p.round_scaled};
}
inline bool has_fast_path(const GatedRmsNormBackward& p) {
  return has_fast_path(static_cast<const RmsNormBackward&>(p)) && !p.gate.round_activation &&
         !p.grad_gate_rows.nested;
}
inline GatedRmsNormBackwardParams<OneStride> fast_params(const GatedRmsNormBackward& p) {
  return {
      fast_params(static_cast<const RmsNormBackward&>(p)), p.grad_gate, {p.grad_gate_rows.stride}, p.gate};
}

template <Extra kExtra>
using RmsNormBackwardOf = std::conditional_t<is_gate(kExtra), GatedRmsNormBackward, RmsNormBackward>;
template <Extra kExtra>
using FastRmsNormBackwardOf =
    std::conditional_t<is_gate(kExtra), GatedRmsNormBackwardParams<OneStride>, FastRmsNormBackward>;

// Adds the contribution of one row to grad_weight.
template <typename T, int N>
__device__ __forceinline__ void accumulate_weight_grad(const float (&x)[N], const float (&g)[N], float rstd,
                                                       bool round_scaled, float (&sum)[N]) {
  float scaled[N];
#pragma unroll
  for (int i = 0; i < N; ++i) scaled[i] = x[i] * rstd;
  if (round_scaled) round_values<T>(scaled);
#pragma unroll
  for (int i = 0; i < N; ++i) sum[i] = fmaf(g[i], scaled[i], sum[i]);
}

// grad_x = rstd * (g * w) - x * shift with shift = rstd^2 * c, in g. The caller multiplies shift from left to
// right: rstd^3 alone may overflow.
template <int N>
__device__ __forceinline__ void grad_of_norm(const float (&x)[N], float (&g)[N], const float (&w)[N],
                                             float rstd, float shift) {
#pragma unroll
  for (int i = 0; i < N; ++i) g[i] = fmaf(-shift, x[i], rstd * (g[i] * w[i]));
}

// The same for vectors, plus grad_residual if there is one.
template <typename T, int N>
__device__ __forceinline__ Vec<T, N> grad_vector(const Vec<T, N>& x, const Vec<T, N>& g, const float (&w)[N],
                                                 const Vec<T, N>& residual, bool has_residual, float rstd,
                                                 float shift) {
  float xs[N], gs[N];
  unpack(x, xs);
  unpack(g, gs);
  grad_of_norm(xs, gs, w, rstd, shift);
  if (has_residual) {
    unpack(residual, xs);
#pragma unroll
    for (int i = 0; i < N; ++i) gs[i] += xs[i];
  }
  return pack<T, N>(gs);
}

}  // namespace liger
