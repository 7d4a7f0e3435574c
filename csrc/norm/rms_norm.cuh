// SPDX-License-Identifier: BSD-3-Clause

// RMSNorm forward, with an optional fused residual addition: h = x + residual, rstd = rsqrt(mean(h^2) + eps),
// y = h * rstd * (offset + weight). It writes y, h (new_residual) and rstd. Optional gate: see norm/gate.cuh.
// A row stays in registers between its reduction and its output, so each element is read once and written
// once; rows that do not fit are read twice (rms_norm_wide_kernel).
//
// Grid: one block per row, per several rows (of up to a warp each), or, with a gate, per group of columns.
// With N = kVec<T> every row and the weight are aligned to 16 bytes and `hidden` is a multiple of N; N = 1
// has no requirement.
#pragma once

#include <string>
#include <type_traits>

#include "device/reduce.cuh"
#include "device/rows.cuh"
#include "device/vec.cuh"
#include "norm/forward_plan.cuh"
#include "norm/gate.cuh"
#include "norm/parameters.cuh"

namespace liger {

struct Casting {
  bool round_rstd;    // "none": rstd is rounded to the dtype of x
  bool round_scaled;  // "none", "llama": x * rstd is rounded to the dtype of x before the multiplication by w
};

inline Casting casting_of(const std::string& mode) {
  return {mode == "none", mode != "gemma"};
}

template <typename RowOffsets>
struct RmsNormParams {
  const void *x, *extra, *weight;  // extra: the residual or the gate; it and weight may be null
  void *y, *new_residual;
  float* rstd;
  RowOffsets x_rows, extra_rows, y_rows, new_residual_rows;
  int64_t rows, hidden;
  float eps, offset;
  bool float_weight;
  Casting casting;
};
using RmsNorm = RmsNormParams<Rows>;

template <typename RowOffsets>
struct GatedRmsNormParams : RmsNormParams<RowOffsets> {
  Gate gate;
};
using GatedRmsNorm = GatedRmsNormParams<Rows>;

// The fast path has fewer kernel parameters: reading more of them before the first load of a row takes 1 % of
// the time.
using FastRmsNorm = RmsNormParams<OneStride>;

inline bool has_fast_path(const RmsNorm& p) {
  return p.weight && !p.float_weight && p.casting.round_scaled && !p.casting.round_rstd &&
         !(p.x_rows.nested || p.extra_rows.nested || p.y_rows.nested || p.new_residual_rows.nested);
}
inline FastRmsNorm fast_params(const RmsNorm& p) {
  return {p.x,
          p.extra,
          p.weight,
          p.y,
          p.new_residual,
          p.rstd,
          {p.x_rows.stride},
          {p.extra_rows.stride},
          {p.y_rows.stride},
          {p.new_residual_rows.stride},
          p.rows,
          p.hidden,
          p.eps,
          p.offset,
          p.float_weight,
          p.casting};
}
inline GatedRmsNormParams<OneStride> fast_params(const GatedRmsNorm& p) {
  return {fast_params(static_cast<const RmsNorm&>(p)), p.gate};
}

template <Extra kExtra>
using RmsNormOf = std::conditional_t<is_gate(kExtra), GatedRmsNorm, RmsNorm>;
template <Extra kExtra>
using FastRmsNormOf = std::conditional_t<is_gate(kExtra), GatedRmsNormParams<OneStride>, FastRmsNorm>;

// offset + weight for N columns; 1 without a weight.
template <typename T, int N>
__device__ __forceinline__ void load_weight(const void* weight, bool is_float, float offset, int64_t column,
                                            float (&out)[N]) {
  load_parameter<T, N>(weight, is_float, offset, 1.0f, column, out);
}

template <typename T, int N>
__device__ __forceinline__ void scale(float (&value)[N], const float (&w)[N], float rstd, bool round_scaled) {
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const float scaled = value[i] * rstd;
    value[i] = (round_scaled ? round_to<T>(scaled) : scaled) * w[i];
  }
}

// x + residual, rounded to T: rstd belongs to new_residual as it is stored.
template <typename T, int N>
__device__ __forceinline__ Vec<T, N> add_vectors(const Vec<T, N>& x, const Vec<T, N>& y) {
  float a[N], b[N];
  unpack(x, a);
  unpack(y, b);
#pragma unroll
  for (int i = 0; i < N; ++i) a[i] += b[i];
  return pack<T, N>(a);
}

template <int N>
__device__ __forceinline__ float sum_squares(const float (&value)[N]) {
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < N; ++i) sum = fmaf(value[i], value[i], sum);
  return sum;
}

template <typename T, typename Params>
__device__ __forceinline__ float reciprocal_rms(const Params& p, float sum, bool exact = false) {
  const float rstd = rsqrtf(sum / static_cast<float>(p.hidden) + p.eps);
  return !exact && p.casting.round_rstd ? round_to<T>(rstd) : rstd;
}

// Maximum block size. With a gate, eight vectors of each of two tensors need 128 registers.
template <int N, int V, Extra kExtra>
inline constexpr int kRowThreads = is_gate(kExtra) && V == 8 && N > 1 ? 512 : kForwardThreads<V>;

// Minimum number of resident blocks per SM. A gate without the fast path would spill, so it has one block
// less.
template <int V, Extra kExtra, bool kFastPath>
inline constexpr int kForwardBlocks = (V == 2   ? (kExtra == Extra::kNone ? 4 : 3)
                                       : V == 4 ? 2
                                                : 1) -
                                      (is_gate(kExtra) && !kFastPath && V <= 4 ? 1 : 0);

// Blocks are not persistent: the loads of one block overlap the arithmetic and stores of others on the SM,
// which measured faster than persistent blocks with a shared-memory ring of rows.
//
// Grouped: several rows per block, with 2^lanes_log2 threads each; otherwise one row per block.
// kFastPath: at compile time, one stride per tensor, a weight of the dtype of x and casting mode "llama". The
// general case reads these from the parameters, which delays the first load of each row.
template <typename T, int N, int V, Extra kExtra, bool Grouped, bool kFastPath>
__global__ void __launch_bounds__(kRowThreads<N, V, kExtra>, kForwardBlocks<V, kExtra, kFastPath>)
    rms_norm_kernel(const std::conditional_t<kFastPath, FastRmsNormOf<kExtra>, RmsNormOf<kExtra>> p,
                    int lanes_log2) {
  using Vector = Vec<T, N>;
  constexpr bool kPrefetchWeight = V <= 4;  // eight vectors leave no registers for it
  constexpr bool kGateFirst = kExtra == Extra::kGateFirst;
  __shared__ float scratch[32];
  const BlockColumns columns = columns_of_block<kExtra>(p);
  const int lanes = Grouped ? 1 << lanes_log2 : blockDim.x;
  const int lane = Grouped ? threadIdx.x & (lanes - 1) : threadIdx.x;
  const int vectors = static_cast<int>(p.hidden / N);
  const int64_t row = Grouped
                          ? int64_t{columns.block} * (blockDim.x >> lanes_log2) + (threadIdx.x >> lanes_log2)
                          : columns.block;
  const bool active = !Grouped || row < p.rows;
  const bool prefetch_weight = kPrefetchWeight && (kFastPath || (p.weight != nullptr && !p.float_weight));
  const bool round_scaled = kFastPath || p.casting.round_scaled;
  const auto in_row = [&](int j) { return active && lane + j * lanes < vectors; };

  Vector x[V], extra[kExtra != Extra::kNone ? V : 1], w[kPrefetchWeight ? V : 1];
  if (active) {
    const T* from = static_cast<const T*>(p.x) + columns.first + p.x_rows.offset(row);
#pragma unroll
    for (int j = 0; j < V; ++j) {
      if (in_row(j)) x[j] = load<T, N>(from + (lane + j * lanes) * N);
    }
    if constexpr (kExtra != Extra::kNone) {
      from = static_cast<const T*>(p.extra) + columns.first + p.extra_rows.offset(row);
#pragma unroll
      for (int j = 0; j < V; ++j) {
        if (in_row(j)) extra[j] = load<T, N>(from + (lane + j * lanes) * N);
      }
    }
    if (prefetch_weight) {
      from = static_cast<const T*>(p.weight) + columns.first;
#pragma unroll
      for (int j = 0; j < V; ++j) {
        if (in_row(j)) w[kPrefetchWeight ? j : 0] = load<T, N>(from + (lane + j * lanes) * N);
      }
    }
  }

  float sum = 0.0f;
  float products[kGateFirst ? V : 1][N];  // x * a, unrounded: too expensive to compute twice
#pragma unroll
  for (int j = 0; j < V; ++j) {
    if (!in_row(j)) continue;
    if constexpr (kGateFirst) {
      gated_inputs(casting_of_path<kFastPath>(p.gate), x[j], extra[j], products[j]);
      sum += sum_squares(products[j]);
    } else {
      if constexpr (kExtra == Extra::kResidual) {
        x[j] = add_vectors(x[j], extra[j]);
        T* to = static_cast<T*>(p.new_residual) + p.new_residual_rows.offset(row);
        store(to + (lane + j * lanes) * N, x[j]);
      }
      float value[N];
      unpack(x[j], value);
      sum += sum_squares(value);
    }
  }
  if constexpr (Grouped) {
    for (int offset = lanes / 2; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
  } else {
    sum = block_reduce<Sum>(sum, scratch);
  }

  if (!active) return;
  const float rstd = reciprocal_rms<T>(p, sum, kFastPath);
  if (lane == 0) p.rstd[columns.statistic(row)] = rstd;
  T* y = static_cast<T*>(p.y) + columns.first + p.y_rows.offset(row);
#pragma unroll
  for (int j = 0; j < V; ++j) {
    if (!in_row(j)) continue;
    float factor[N], value[N];
    if (prefetch_weight) {
      unpack(w[kPrefetchWeight ? j : 0], factor);
#pragma unroll
      for (int i = 0; i < N; ++i) factor[i] += p.offset;
    } else {
      load_weight<T, N>(p.weight, p.float_weight, p.offset, columns.first + (lane + j * lanes) * N, factor);
    }
    if constexpr (kGateFirst) {
#pragma unroll
      for (int i = 0; i < N; ++i) value[i] = products[j][i];
    } else {
      unpack(x[j], value);
    }
    scale<T>(value, factor, rstd, round_scaled);
    if constexpr (kExtra == Extra::kGateLast)
      gate_outputs(casting_of_path<kFastPath>(p.gate), extra[j], value);
    store(y + (lane + j * lanes) * N, pack<T, N>(value));
  }
}

// A block has one row that does not fit in its registers: the row is read twice, the second time mostly from
// L2.
inline constexpr int kWideThreads = 512;

template <typename T, int N, Extra kExtra>
__global__ void __launch_bounds__(kWideThreads) rms_norm_wide_kernel(const RmsNormOf<kExtra> p) {
  __shared__ float scratch[32];
  const BlockColumns columns = columns_of_block<kExtra>(p);
  const int64_t row = columns.block;
  const T* x = static_cast<const T*>(p.x) + columns.first + p.x_rows.offset(row);
  const T* extra = static_cast<const T*>(p.extra) + columns.first + p.extra_rows.offset(row);
  T* new_residual = static_cast<T*>(p.new_residual) + p.new_residual_rows.offset(row);
  T* y = static_cast<T*>(p.y) + columns.first + p.y_rows.offset(row);
  const int64_t begin = int64_t{threadIdx.x} * N, step = int64_t{blockDim.x} * N;
  float sum = 0.0f;
#pragma unroll 4
  for (int64_t column = begin; column < p.hidden; column += step) {
    Vec<T, N> loaded = load<T, N>(x + column);
    float value[N];
    if constexpr (kExtra == Extra::kGateFirst) {
      gated_inputs(p.gate, loaded, load<T, N>(extra + column), value);
    } else {
      if constexpr (kExtra == Extra::kResidual) {
        loaded = add_vectors(loaded, load<T, N>(extra + column));
        store_whole(new_residual + column, loaded);
      }
      unpack(loaded, value);
    }
    sum += sum_squares(value);
  }
  const float rstd = reciprocal_rms<T>(p, block_reduce<Sum>(sum, scratch));
  if (threadIdx.x == 0) p.rstd[columns.statistic(row)] = rstd;
  const T* stored = kExtra == Extra::kResidual ? new_residual : x;
#pragma unroll 4
  for (int64_t column = begin; column < p.hidden; column += step) {
    float w[N], value[N];
    load_weight<T, N>(p.weight, p.float_weight, p.offset, columns.first + column, w);
    const Vec<T, N> loaded = load<T, N>(stored + column);
    if constexpr (kExtra == Extra::kGateFirst) {
      gated_inputs(p.gate, loaded, load<T, N>(extra + column), value);
    } else {
      unpack(loaded, value);
    }
    scale<T>(value, w, rstd, p.casting.round_scaled);
    if constexpr (kExtra == Extra::kGateLast) gate_outputs(p.gate, load<T, N>(extra + column), value);
    store_whole(y + column, pack<T, N>(value));
  }
}

// With a gate the grid repeats the blocks for each group.
template <Extra kExtra, typename Params>
unsigned blocks_of_groups(const Params& p, int64_t blocks) {
  if constexpr (is_gate(kExtra)) blocks *= p.gate.groups.divisor;
  return static_cast<unsigned>(blocks);
}

template <typename T, int N, int V, Extra kExtra, bool Grouped>
void launch_rms_norm_tile(const RmsNormOf<kExtra>& p, const ForwardPlan& plan, cudaStream_t stream) {
  const dim3 grid(blocks_of_groups<kExtra>(p, plan.blocks));
  if (has_fast_path(p)) {
    const auto kernel = rms_norm_kernel<T, N, V, kExtra, Grouped, true>;
    kernel<<<grid, plan.threads, 0, stream>>>(fast_params(p), plan.lanes_log2);
  } else {
    const auto kernel = rms_norm_kernel<T, N, V, kExtra, Grouped, false>;
    kernel<<<grid, plan.threads, 0, stream>>>(p, plan.lanes_log2);
  }
}

// vectorised: every row of every tensor, and the weight, is aligned to 16 bytes, and hidden is a multiple of
// kVec<T>.
template <typename T, Extra kExtra>
void launch_rms_norm(const RmsNormOf<kExtra>& p, bool vectorised, cudaStream_t stream) {
  constexpr int64_t kMaxVectorsWidth2 = 512;
  const ForwardPlan plan =
      plan_norm_forward(p.rows, vectorised ? p.hidden / kVec<T> : p.hidden, vectorised, kMaxVectorsWidth2,
                        vectorised ? kRowThreads<kVec<T>, 8, kExtra> : kRowThreads<1, 8, kExtra>);
  if (plan.width == 0) {
    const auto kernel =
        vectorised ? rms_norm_wide_kernel<T, kVec<T>, kExtra> : rms_norm_wide_kernel<T, 1, kExtra>;
    kernel<<<blocks_of_groups<kExtra>(p, p.rows), kWideThreads, 0, stream>>>(p);
  } else if (!vectorised) {
    plan.grouped ? launch_rms_norm_tile<T, 1, 8, kExtra, true>(p, plan, stream)
                 : launch_rms_norm_tile<T, 1, 8, kExtra, false>(p, plan, stream);
  } else if (plan.width == 2) {
    plan.grouped ? launch_rms_norm_tile<T, kVec<T>, 2, kExtra, true>(p, plan, stream)
                 : launch_rms_norm_tile<T, kVec<T>, 2, kExtra, false>(p, plan, stream);
  } else if (plan.width == 4) {
    launch_rms_norm_tile<T, kVec<T>, 4, kExtra, false>(p, plan, stream);
  } else {
    launch_rms_norm_tile<T, kVec<T>, 8, kExtra, false>(p, plan, stream);
  }
}

}  // namespace liger
