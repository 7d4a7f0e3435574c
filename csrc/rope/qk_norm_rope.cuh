// SPDX-License-Identifier: BSD-3-Clause

// RMSNorm of each head of q and k, then the rotary embedding, in one launch.
//
// This kernel and the kernel of rope/qk_norm_rope_backward.cuh require N = kVec<T> (rope/rotation.cuh) and
// heads of up to 32 items; the kernels of rope/qk_norm_rope_generic.cuh have no requirement. 2^lanes_log2
// threads, at most a warp, process a head, with one item each, and shuffles reduce over a head. A thread has
// the same item of kRopeHeads heads of a token, for which it loads the tables and the weight once.
#pragma once

#include "device/fast_divide.h"
#include "device/vec.cuh"
#include "norm/parameters.cuh"
#include "rope/qk_norm_rope_params.cuh"
#include "rope/rope.cuh"

namespace liger {

// Minimum number of resident blocks per SM of the forward.
inline constexpr int kQkForwardBlocks = 3;

// The chunks of kRopeHeads heads of one token: first the chunks of q, then the chunks of k.
struct HeadChunks {
  int q_chunks, per_head, lanes_log2;
  FastDivide chunks;
  int64_t first_token, tokens;  // of this launch

  HeadChunks(const Rope& p, int n)
      : q_chunks((p.q.heads + kRopeHeads - 1) / kRopeHeads),
        per_head(items_per_head(p, n)),
        lanes_log2(lanes_of(per_head)),
        chunks(q_chunks + (p.k.heads + kRopeHeads - 1) / kRopeHeads) {}
  int64_t per_token() const { return int64_t{chunks.divisor} << lanes_log2; }
};

// All loads of a thread precede its first use of a loaded value, except operands that would take too many
// registers: tables wider than T, and weights that are not of a half type. A thread without an item, or
// without a second vector or head, repeats another load: a branch around a load would wait for the load.
template <typename T, typename Table, bool Interleaved, Rounding kRounding>
__global__ void __launch_bounds__(kRopeThreads, kQkForwardBlocks)
    qk_norm_rope_kernel(const __grid_constant__ QkNormRope p, const __grid_constant__ HeadChunks items) {
  constexpr int N = kVec<T>, kHalf = N / 2, H = kRopeHeads;
  constexpr bool kLoadTables = sizeof(Table) == sizeof(T);
  constexpr bool kHalfWeight = kRounding == Rounding::kOutputHalf || kRounding == Rounding::kScaledHalf;
  constexpr bool kRoundScaled = kRounding == Rounding::kScaled || kRounding == Rounding::kScaledHalf;
  const int lanes = 1 << items.lanes_log2, lane = static_cast<int>(threadIdx.x) & (lanes - 1);
  const uint32_t row = (blockIdx.x * kRopeThreads + threadIdx.x) >> items.lanes_log2;
  const uint32_t local_token = items.chunks.quotient(row), tokens = static_cast<uint32_t>(items.tokens);
  const int chunk = static_cast<int>(items.chunks.remainder(row, local_token));
  const bool has_item = lane < items.per_head, active = local_token < tokens && has_item;

  const bool is_q = chunk < items.q_chunks;
  HeadPlace place;
  place.batch = static_cast<uint32_t>(p.first_batch) + blockIdx.y;
  place.token = static_cast<uint32_t>(items.first_token) + min(local_token, tokens - 1);
  place.first_head = (is_q ? chunk : chunk - items.q_chunks) * H;
  place.heads = min(H, (is_q ? p.q.heads : p.k.heads) - place.first_head);
  const ItemEntries<N, Interleaved> entries(p, min(lane, items.per_head - 1));
  const HeadWeight weight = is_q ? p.q_weight : p.k_weight;

  Vec<T, N> x[H][2], half_weight[kHalfWeight ? 2 : 1];
  TableItem<Table, N> tables;
  const int second = entries.has_second ? entries.second : entries.first;
  {
    const RopeStrides strides = is_q ? p.q.in_strides : p.k.in_strides;
    const T* in = static_cast<const T*>(is_q ? p.q.in : p.k.in) + head_offset(strides, place);
#pragma unroll
    for (int h = 0; h < H; ++h) {
      const T* head = in + wide_product(strides.head, min(h, place.heads - 1));
      x[h][0] = load<T, N>(head + entries.first);
      x[h][1] = load<T, N>(head + second);
    }
  }
  if constexpr (kLoadTables) {
    if (entries.rotated) tables.load(p, place, entries);
  }
  if constexpr (kHalfWeight) {
    const T* w = static_cast<const T*>(weight.data);
    half_weight[0] = load<T, N>(w + entries.first);
    half_weight[1] = load<T, N>(w + second);
  }

  float squares[H];
#pragma unroll
  for (int h = 0; h < H; ++h) {
    float sums[2] = {};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float value[N];
      unpack(x[h][i], value);
#pragma unroll
      for (int k = 0; k < N; ++k) sums[i] = fmaf(value[k], value[k], sums[i]);
    }
    squares[h] = has_item ? sums[0] + (entries.has_second ? sums[1] : 0.0f) : 0.0f;
  }
  sum_over_lanes(squares, items.lanes_log2);
  if (!active) return;

  float rstd[H];
#pragma unroll
  for (int h = 0; h < H; ++h) rstd[h] = reciprocal_rms<T>(p, squares[h]);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const ItemEntries<kHalf, Interleaved> part = entries.template half<kHalf>(half);
    float value[H][2][kHalf];
    if constexpr (kRounding == Rounding::kScaledHalf) {
#pragma unroll
      for (int h = 0; h < H; ++h) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          unpack(part_of<kHalf>(x[h][i], half), value[h][i]);
#pragma unroll
          for (int k = 0; k < kHalf; ++k) value[h][i][k] *= rstd[h];
          unpack(multiply(pack<T, kHalf>(value[h][i]), part_of<kHalf>(half_weight[i], half)), value[h][i]);
        }
      }
    } else {
      float w[2][kHalf] = {};
      if constexpr (kHalfWeight) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          unpack(part_of<kHalf>(half_weight[i], half), w[i]);
#pragma unroll
          for (int k = 0; k < kHalf; ++k) w[i][k] += p.offset;
        }
      } else {
        load_parameter<T, kHalf>(weight.data, weight.is_float, p.offset, 1.0f, part.first, w[0]);
        if (part.has_second)
          load_parameter<T, kHalf>(weight.data, weight.is_float, p.offset, 1.0f, part.second, w[1]);
      }
#pragma unroll
      for (int h = 0; h < H; ++h) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          unpack(part_of<kHalf>(x[h][i], half), value[h][i]);
          normalise<T, kRoundScaled>(value[h][i], rstd[h], w[i]);
        }
      }
    }
    if (entries.rotated) {
      Rotation<kHalf, Interleaved, false> rotation;
      if constexpr (kLoadTables) {
        tables.unpack_part(half, rotation);
      } else {
        rotation.template load<Table>(p, place.batch, place.token, part);
      }
#pragma unroll
      for (int h = 0; h < H; ++h) rotation.apply(value[h]);
    }
#pragma unroll
    for (int h = 0; h < H; ++h) {
#pragma unroll
      for (int i = 0; i < 2; ++i) part_of<kHalf>(x[h][i], half) = pack<T, kHalf>(value[h][i]);
    }
  }
  const RopeStrides strides = is_q ? p.q.out_strides : p.k.out_strides;
  T* const out = static_cast<T*>(is_q ? p.q.out : p.k.out) + head_offset(strides, place);
#pragma unroll
  for (int h = 0; h < H; ++h) {
    if (h >= place.heads) continue;
    T* const head = out + wide_product(strides.head, h);
    store(head + entries.first, x[h][0]);
    if (entries.has_second) store(head + entries.second, x[h][1]);
  }
}

}  // namespace liger
