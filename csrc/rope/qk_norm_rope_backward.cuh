// SPDX-License-Identifier: BSD-3-Clause

// Backward of rope/qk_norm_rope.cuh: it rotates the upstream gradient back, recomputes the norm from q and k,
// and sums the gradients of both weights.
//
// Blocks are persistent. A block works on either q or k, and accumulates the gradient of one weight in
// registers. Each thread copies its items of the next chunks of heads to its own slots in shared memory
// (cp.async), which needs no barrier, and loads their tables one step ahead.
#pragma once

#include "device/async.cuh"
#include "rope/qk_norm_rope.cuh"

namespace liger {

inline constexpr int kQkThreads = 256, kQkBlocksPerSm = 2, kQkStages = 2;

// All chunks of a tensor (batch, tokens, chunks): fewer than 2^31.
struct ChunkRows {
  FastDivide chunks, tokens;
  uint32_t total;

  __device__ __forceinline__ HeadPlace place(uint32_t row, int heads) const {
    const uint32_t all = chunks.quotient(row), batch = tokens.quotient(all);
    const int first_head = static_cast<int>(chunks.remainder(row, all)) * kRopeHeads;
    return {batch, tokens.remainder(all, batch), first_head, min(kRopeHeads, heads - first_head)};
  }
};

struct QkBackwardPlan {
  ChunkRows rows[2];  // for q and for k
  uint32_t q_blocks;
  int per_head, lanes_log2;
};

// A thread without an item, or without a second vector or head, repeats another copy, which needs no branch,
// and ignores it.
template <typename T, typename Table, bool Interleaved, bool kRoundScaled>
__global__ void __launch_bounds__(kQkThreads, kQkBlocksPerSm)
    qk_norm_rope_backward_kernel(const __grid_constant__ QkNormRopeBackward p,
                                 const __grid_constant__ QkBackwardPlan plan) {
  constexpr int N = kVec<T>, H = kRopeHeads, kHalf = N / 2;
  constexpr bool kPrefetchTables = sizeof(Table) == sizeof(T);  // wider tables take too many registers
  using Vector = Vec<T, N>;
  extern __shared__ __align__(16) unsigned char shared[];
  const int which = blockIdx.x < plan.q_blocks ? 0 : 1;
  const uint32_t block = which == 0 ? blockIdx.x : blockIdx.x - plan.q_blocks;
  const uint32_t blocks = which == 0 ? plan.q_blocks : gridDim.x - plan.q_blocks;
  const NormedHeads& tensor = p.tensors[which];
  const ChunkRows& rows = plan.rows[which];
  const int lanes = 1 << plan.lanes_log2, lane = static_cast<int>(threadIdx.x) & (lanes - 1);
  const uint32_t groups = kQkThreads >> plan.lanes_log2, group = threadIdx.x >> plan.lanes_log2;
  const uint32_t step = blocks * groups;
  const bool has_item = lane < plan.per_head;
  const ItemEntries<N, Interleaved> entries(p, min(lane, plan.per_head - 1));
  const int second = entries.has_second ? entries.second : entries.first;

  Vector* const own = reinterpret_cast<Vector*>(shared) + threadIdx.x;
  // stream: 0 is x, 1 is the upstream gradient.
  const auto slot = [&](int stage, int stream, int h, int i) -> Vector& {
    return own[(((stage * 2 + stream) * H + h) * 2 + i) * kQkThreads];
  };
  const auto load_stage = [&](int stage, uint32_t row) {
    if (row < rows.total) {
      const HeadPlace place = rows.place(row, tensor.heads);
      const T* x = static_cast<const T*>(tensor.x) + head_offset(tensor.x_strides, place);
      const T* g = static_cast<const T*>(tensor.grad_out) + head_offset(tensor.grad_out_strides, place);
#pragma unroll
      for (int h = 0; h < H; ++h) {
        const uint32_t head = min(h, place.heads - 1);
        const T* x_head = x + wide_product(tensor.x_strides.head, head);
        const T* g_head = g + wide_product(tensor.grad_out_strides.head, head);
        copy_async(&slot(stage, 0, h, 0), x_head + entries.first);
        copy_async(&slot(stage, 0, h, 1), x_head + second);
        copy_async(&slot(stage, 1, h, 0), g_head + entries.first);
        copy_async(&slot(stage, 1, h, 1), g_head + second);
      }
    }
    commit_async();
  };
  HeadPlace place;
  TableItem<Table, N> tables;
  // Clamps to the last row.
  const auto go_to = [&](uint32_t row) {
    place = rows.place(min(row, rows.total - 1), tensor.heads);
    if constexpr (kPrefetchTables) {
      if (entries.rotated) tables.load(p, place, entries);
    }
  };

  uint32_t base = block * groups;
#pragma unroll
  for (int stage = 0; stage < kQkStages; ++stage) load_stage(stage, base + group + stage * step);
  go_to(base + group);
  float w[2][N], weight_grad[2][N] = {};
  const HeadWeight weight = which == 0 ? p.q_weight : p.k_weight;
  load_parameter<T, N>(weight.data, weight.is_float, p.offset, 1.0f, entries.first, w[0]);
  load_parameter<T, N>(weight.data, weight.is_float, p.offset, 1.0f, second, w[1]);

  // All threads of the block run the same number of steps, because the shuffles need all lanes.
  for (int stage = 0; base < rows.total; stage = stage + 1 == kQkStages ? 0 : stage + 1) {
    wait_async(kQkStages - 1);
    float g[H][2][2][kHalf];  // by head, half of the vectors, vector
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int h = 0; h < H; ++h) {
#pragma unroll
        for (int i = 0; i < 2; ++i) unpack(part_of<kHalf>(slot(stage, 1, h, i), half), g[h][half][i]);
      }
      if (entries.rotated) {
        Rotation<kHalf, Interleaved, true> rotation;
        if constexpr (kPrefetchTables) {
          tables.unpack_part(half, rotation);
        } else {
          rotation.template load<Table>(p, place.batch, place.token, entries.template half<kHalf>(half));
        }
#pragma unroll
        for (int h = 0; h < H; ++h) rotation.apply(g[h][half]);
      }
    }

    float sums[2 * H];  // of the squares of x, and of grad * w * x
#pragma unroll
    for (int h = 0; h < H; ++h) {
      float squares[2] = {}, dots[2] = {};
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float x[N];
        unpack(slot(stage, 0, h, i), x);
#pragma unroll
        for (int k = 0; k < N; ++k) {
          squares[i] = fmaf(x[k], x[k], squares[i]);
          // With (g * w) * x the compiler would keep the products for the gradient of x, in 32 registers.
          dots[i] = fmaf(g[h][k / kHalf][i][k % kHalf], w[i][k] * x[k], dots[i]);
        }
      }
      sums[2 * h] = has_item ? squares[0] + (entries.has_second ? squares[1] : 0.0f) : 0.0f;
      sums[2 * h + 1] = has_item ? dots[0] + (entries.has_second ? dots[1] : 0.0f) : 0.0f;
    }
    sum_over_lanes(sums, plan.lanes_log2);

    T* const out = static_cast<T*>(tensor.out) + head_offset(tensor.out_strides, place);
    const bool active = has_item && base + group < rows.total;
#pragma unroll
    for (int h = 0; h < H; ++h) {
      if (!active || h >= place.heads) continue;
      const float rstd = reciprocal_rms<T>(p, sums[2 * h]);
      // The product is evaluated from left to right: rstd^3 alone may overflow.
      const float shift = sums[2 * h + 1] * p.inverse_head_dim * rstd * rstd * rstd;
      T* const head = out + wide_product(tensor.out_strides.head, h);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float x[N], scaled[N];
        unpack(load_again(&slot(stage, 0, h, i)), x);
#pragma unroll
        for (int k = 0; k < N; ++k) scaled[k] = x[k] * rstd;
        if constexpr (kRoundScaled) round_values<T>(scaled);
#pragma unroll
        for (int k = 0; k < N; ++k) {
          const float upstream = g[h][k / kHalf][i][k % kHalf];
          weight_grad[i][k] = fmaf(upstream, scaled[k], weight_grad[i][k]);
          x[k] = fmaf(-shift, x[k], rstd * (upstream * w[i][k]));
        }
        if (tensor.out && (i == 0 || entries.has_second)) {
          store(head + (i == 0 ? entries.first : entries.second), pack<T, N>(x));
        }
      }
    }
    load_stage(stage, base + group + kQkStages * step);
    base += step;
    go_to(base + group);
  }

#if __CUDA_ARCH__ >= 900
  cudaTriggerProgrammaticLaunchCompletion();
#endif
  if (!tensor.partial) return;
  // The ring's memory may be reused only after all copies are complete; the last copies are empty.
  wait_async(0);
  __syncthreads();
  float* const group_sums = reinterpret_cast<float*>(shared);
  if (has_item) {
    float* const to = group_sums + group * p.head_dim;
    store_floats<N>(to + entries.first, weight_grad[0]);
    if (entries.has_second) store_floats<N>(to + entries.second, weight_grad[1]);
  }
  __syncthreads();
  for (int column = threadIdx.x; column < p.head_dim; column += kQkThreads) {
    float sum = 0.0f;
    for (uint32_t other = 0; other < groups; ++other) sum += group_sums[other * p.head_dim + column];
    tensor.partial[int64_t{block} * p.head_dim + column] = sum;
  }
}

// Bytes of the ring, which also holds the sums of the groups: kQkThreads items of 2 N floats at most.
inline constexpr int kQkShared = kQkStages * 2 * kRopeHeads * 2 * 16 * kQkThreads;

}  // namespace liger
