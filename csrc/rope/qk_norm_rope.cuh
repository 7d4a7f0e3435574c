// RMSNorm of each head of q and k, then the rotary embedding, in one launch. The backward rotates the upstream
// gradient back, recomputes the norm from q and k, and sums the gradients of both weights.
//
// These kernels have N = kVec<T> (rope/rotation.cuh) and heads of up to 32 items; those of
// rope/qk_norm_rope_generic.cuh have no requirement. 2^lanes_log2 threads, at most a warp, process a head, with one
// item each; so its reductions are shuffles. A thread has the same item of kRopeHeads heads of a token, for which
// it loads the tables and the weight once.
#pragma once

#include "device/fast_divide.h"
#include "device/vec.cuh"
#include "norm/parameters.cuh"
#include "rope/qk_norm_rope_params.cuh"
#include "rope/rope.cuh"

namespace liger {

// Minimum number of resident blocks per SM. Tables of a half type are loaded before the reduction, which takes 75
// registers.
template <typename Table>
inline constexpr int kQkForwardBlocks = sizeof(Table) == 2 ? 3 : 4;

// The chunks of kRopeHeads heads of one token, those of q before those of k.
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

// One half of a vector.
template <typename T, int N>
__device__ __forceinline__ Vec<T, N / 2>& half_of(Vec<T, N>& x, int half) {
  return reinterpret_cast<Vec<T, N / 2>*>(&x)[half];
}

// The output is computed in two halves of each vector, because the tables and the weight of whole vectors take more
// registers than the occupancy allows.
template <typename T, typename Table, bool Interleaved, Rounding kRounding>
__global__ void __launch_bounds__(kRopeThreads, kQkForwardBlocks<Table>)
    qk_norm_rope_kernel(const __grid_constant__ QkNormRope p, const __grid_constant__ HeadChunks items) {
  constexpr int N = kVec<T>, kHalf = N / 2;
  constexpr bool kPrefetchTables = sizeof(Table) == 2, kHalfWeight = kRounding == Rounding::kScaledHalf;
  const int64_t batch = p.first_batch + blockIdx.y;
  const int lanes = 1 << items.lanes_log2, lane = static_cast<int>(threadIdx.x) & (lanes - 1);
  const uint32_t row = (blockIdx.x * kRopeThreads + threadIdx.x) >> items.lanes_log2;
  const uint32_t local_token = items.chunks.quotient(row);
  const int chunk = static_cast<int>(items.chunks.remainder(row, local_token));
  const int64_t token = items.first_token + local_token;
  // Threads without an item take part in the shuffles.
  const bool active = local_token < items.tokens && lane < items.per_head;

  const bool is_q = chunk < items.q_chunks;
  const int first_head = (is_q ? chunk : chunk - items.q_chunks) * kRopeHeads;
  const int heads = active ? min(kRopeHeads, (is_q ? p.q.heads : p.k.heads) - first_head) : 0;
  const ItemEntries<N, Interleaved> entries(p, lane);

  Vec<T, N> x[kRopeHeads][2];
  Vec<Table, N> cos[kPrefetchTables ? 2 : 1], sin[kPrefetchTables ? 2 : 1];
  Vec<T, N> half_weight[kHalfWeight ? 2 : 1];
  const HeadWeight weight = is_q ? p.q_weight : p.k_weight;
  {
    const RopeStrides strides = is_q ? p.q.in_strides : p.k.in_strides;
    const T* in = static_cast<const T*>(is_q ? p.q.in : p.k.in) + batch * strides.batch +
                  token * strides.token + first_head * strides.head;
#pragma unroll
    for (int h = 0; h < kRopeHeads; ++h) {
      if (h >= heads) continue;
      x[h][0] = load<T, N>(in + h * strides.head + entries.first);
      x[h][1] = entries.has_second ? load<T, N>(in + h * strides.head + entries.second) : Vec<T, N>{};
    }
    if constexpr (kPrefetchTables) {
      if (active && entries.rotated) {
        const Table* c = static_cast<const Table*>(p.cos.data) + batch * p.cos.batch + token * p.cos.token;
        const Table* s = static_cast<const Table*>(p.sin.data) + batch * p.sin.batch + token * p.sin.token;
        cos[0] = load<Table, N>(c + entries.first), cos[1] = load<Table, N>(c + entries.second);
        sin[0] = load<Table, N>(s + entries.first), sin[1] = load<Table, N>(s + entries.second);
      }
    }
    if constexpr (kHalfWeight) {
      if (active) {
        const T* w = static_cast<const T*>(weight.data);
        half_weight[0] = load<T, N>(w + entries.first);
        half_weight[1] = entries.has_second ? load<T, N>(w + entries.second) : Vec<T, N>{};
      }
    }
  }

  float squares[kRopeHeads];
#pragma unroll
  for (int h = 0; h < kRopeHeads; ++h) {
    squares[h] = 0.0f;
    if (h >= heads) continue;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float value[N];
      unpack(x[h][i], value);
#pragma unroll
      for (int k = 0; k < N; ++k) squares[h] = fmaf(value[k], value[k], squares[h]);
    }
  }
  sum_over_lanes(squares, lanes);
  if (!active) return;

  float rstd[kRopeHeads];
#pragma unroll
  for (int h = 0; h < kRopeHeads; ++h) rstd[h] = reciprocal_rms<T>(p, squares[h]);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    ItemEntries<kHalf, Interleaved> part = entries.template half<kHalf>(half);
    float w[kHalfWeight ? 1 : 2][kHalf];
    if constexpr (!kHalfWeight) {
      load_parameter<T, kHalf>(weight.data, weight.is_float, p.offset, 1.0f, part.first, w[0]);
      if (part.has_second)
        load_parameter<T, kHalf>(weight.data, weight.is_float, p.offset, 1.0f, part.second, w[1]);
    }
    Rotation<kHalf, Interleaved, false> rotation;
    if (part.rotated) {
      if constexpr (kPrefetchTables) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          unpack(half_of(cos[i], half), rotation.c[i]);
          unpack(half_of(sin[i], half), rotation.s[i]);
        }
        rotation.fold_signs();
      } else {
        rotation.template load<Table>(p, batch, token, part);
      }
    }
#pragma unroll
    for (int h = 0; h < kRopeHeads; ++h) {
      if (h >= heads) continue;
      float value[2][kHalf];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        unpack(half_of(x[h][i], half), value[i]);
        if constexpr (kHalfWeight) {
#pragma unroll
          for (int k = 0; k < kHalf; ++k) value[i][k] *= rstd[h];
          unpack(multiply(pack<T, kHalf>(value[i]), half_of(half_weight[i], half)), value[i]);
        } else {
#pragma unroll
          for (int k = 0; k < kHalf; ++k)
            value[i][k] = normalised<T, kRounding == Rounding::kScaled>(value[i][k], rstd[h], w[i][k]);
        }
      }
      if (part.rotated) rotation.apply(value);
#pragma unroll
      for (int i = 0; i < 2; ++i) half_of(x[h][i], half) = pack<T, kHalf>(value[i]);
    }
  }
  const RopeStrides strides = is_q ? p.q.out_strides : p.k.out_strides;
  T* out = static_cast<T*>(is_q ? p.q.out : p.k.out) + batch * strides.batch + token * strides.token +
           first_head * strides.head;
#pragma unroll
  for (int h = 0; h < kRopeHeads; ++h) {
    if (h >= heads) continue;
    store(out + h * strides.head + entries.first, x[h][0]);
    if (entries.has_second) store(out + h * strides.head + entries.second, x[h][1]);
  }
}

// The backward has persistent blocks, each of which works on q or on k: it keeps the sum of the gradient of one
// weight in registers. Each thread copies its items of the next chunks of heads to its own slots in shared memory
// (cp.async), which needs no barrier.
inline constexpr int kQkThreads = 256, kQkBlocksPerSm = 2, kQkStages = 2;

// All chunks of a tensor (batch, tokens, chunks): fewer than 2^31.
struct ChunkRows {
  FastDivide chunks, tokens;
  uint32_t total;
};

struct QkBackwardPlan {
  ChunkRows rows[2];  // of q and of k
  uint32_t q_blocks;
  int per_head, lanes_log2;
};

template <typename T, typename Table, bool Interleaved, bool kRoundScaled>
__global__ void __launch_bounds__(kQkThreads, kQkBlocksPerSm)
    qk_norm_rope_backward_kernel(const __grid_constant__ QkNormRopeBackward p,
                                 const __grid_constant__ QkBackwardPlan plan) {
  constexpr int N = kVec<T>, H = kRopeHeads;
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
  const ItemEntries<N, Interleaved> entries(p, lane);

  struct Place {
    int64_t batch, token;
    int first_head, heads;
  };
  const auto place_of = [&](uint32_t row) {
    const uint32_t all = rows.chunks.quotient(row), batch = rows.tokens.quotient(all);
    const int first_head = static_cast<int>(rows.chunks.remainder(row, all)) * H;
    return Place{batch, rows.tokens.remainder(all, batch), first_head, min(H, tensor.heads - first_head)};
  };
  const auto address = [](auto* data, const RopeStrides& strides, const Place& place) {
    return data + place.batch * strides.batch + place.token * strides.token + place.first_head * strides.head;
  };
  Vector* const own = reinterpret_cast<Vector*>(shared) + threadIdx.x;
  // stream: 0 is x, 1 is the upstream gradient.
  const auto slot = [&](int stage, int stream, int h, int i) -> Vector& {
    return own[(((stage * 2 + stream) * H + h) * 2 + i) * kQkThreads];
  };
  const auto load_stage = [&](int stage, uint32_t row) {
    if (has_item && row < rows.total) {
      const Place place = place_of(row);
      const T* x = address(static_cast<const T*>(tensor.x), tensor.x_strides, place);
      const T* g = address(static_cast<const T*>(tensor.grad_out), tensor.grad_out_strides, place);
#pragma unroll
      for (int h = 0; h < H; ++h) {
        if (h >= place.heads) continue;
        copy_async(&slot(stage, 0, h, 0), x + h * tensor.x_strides.head + entries.first);
        copy_async(&slot(stage, 1, h, 0), g + h * tensor.grad_out_strides.head + entries.first);
        if (entries.has_second) {
          copy_async(&slot(stage, 0, h, 1), x + h * tensor.x_strides.head + entries.second);
          copy_async(&slot(stage, 1, h, 1), g + h * tensor.grad_out_strides.head + entries.second);
        }
      }
    }
    commit_async();
  };

  float w[2][N] = {}, weight_grad[2][N] = {};
  if (has_item) {
    const HeadWeight weight = which == 0 ? p.q_weight : p.k_weight;
    load_parameter<T, N>(weight.data, weight.is_float, p.offset, 1.0f, entries.first, w[0]);
    if (entries.has_second)
      load_parameter<T, N>(weight.data, weight.is_float, p.offset, 1.0f, entries.second, w[1]);
  }
  uint32_t base = block * groups;
#pragma unroll
  for (int stage = 0; stage < kQkStages; ++stage) load_stage(stage, base + group + stage * step);

  int stage = 0;
  // The number of steps is uniform over the block, for the shuffles.
  for (; base < rows.total; base += step, stage = stage + 1 == kQkStages ? 0 : stage + 1) {
    const uint32_t row = base + group;
    const bool active = has_item && row < rows.total;
    const Place place = active ? place_of(row) : Place{};
    Rotation<N, Interleaved, true> rotation;
    if (active && entries.rotated) rotation.template load<Table>(p, place.batch, place.token, entries);
    wait_async(kQkStages - 1);

    float g[H][2][N], squares[H], dots[H];
#pragma unroll
    for (int h = 0; h < H; ++h) {
      squares[h] = dots[h] = 0.0f;
      if (h >= place.heads) continue;
      unpack(slot(stage, 1, h, 0), g[h][0]);
      if (entries.has_second) unpack(slot(stage, 1, h, 1), g[h][1]);
      if (entries.rotated) rotation.apply(g[h]);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (i == 1 && !entries.has_second) continue;
        float x[N];
        unpack(slot(stage, 0, h, i), x);
#pragma unroll
        for (int k = 0; k < N; ++k) {
          squares[h] = fmaf(x[k], x[k], squares[h]);
          dots[h] = fmaf(g[h][i][k] * w[i][k], x[k], dots[h]);
        }
      }
    }
    sum_over_lanes(squares, lanes);
    sum_over_lanes(dots, lanes);
    T* const out = address(static_cast<T*>(tensor.out), tensor.out_strides, place);
#pragma unroll
    for (int h = 0; h < H; ++h) {
      if (h >= place.heads) continue;
      const float rstd = reciprocal_rms<T>(p, squares[h]);
      // From left to right: rstd^3 alone may overflow.
      const float shift = dots[h] / static_cast<float>(p.head_dim) * rstd * rstd * rstd;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (i == 1 && !entries.has_second) continue;
        float x[N];
        unpack(slot(stage, 0, h, i), x);
#pragma unroll
        for (int k = 0; k < N; ++k) {
          const float upstream = g[h][i][k], scaled = x[k] * rstd;
          weight_grad[i][k] = fmaf(upstream, kRoundScaled ? round_to<T>(scaled) : scaled, weight_grad[i][k]);
          x[k] = fmaf(-shift, x[k], rstd * (upstream * w[i][k]));
        }
        if (tensor.out) {
          store(out + h * tensor.out_strides.head + (i == 0 ? entries.first : entries.second), pack<T, N>(x));
        }
      }
    }
    load_stage(stage, row + kQkStages * step);
  }

#if __CUDA_ARCH__ >= 900
  cudaTriggerProgrammaticLaunchCompletion();
#endif
  if (!tensor.partial) return;
  // The ring's memory may be reused only after the copies, of which the last are empty, are complete.
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
