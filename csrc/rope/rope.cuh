// SPDX-License-Identifier: BSD-3-Clause

// Rotary position embedding of q and k in one launch, forward and backward, out of place or in place. The
// rotated halves are never materialised: a thread holds both entries of a pair in registers.
//
// A work item is two vectors of N entries, with both entries of N pairs, in kRopeHeads heads of one token:
// cos and sin are loaded and converted once for these heads. Entries beyond the rotary dimension are copied
// by further items. Grid: (items of the tokens, batch), one item per thread.
//
// rope/rotation.cuh has the requirements on N.
#pragma once

#include <algorithm>

#include "device/fast_divide.h"
#include "rope/rotation.cuh"

namespace liger {

inline constexpr int kRopeThreads = 256;
inline constexpr int kRopeHeads = 2;  // per thread: more registers would reduce the occupancy

// The work items of one token: per_head items for each chunk of kRopeHeads heads. The first `pairs` items of
// a head rotate, the others copy. The chunks of q come before the chunks of k.
struct RopeItems {
  int pairs, q_chunks;
  FastDivide per_head, chunks;  // divide by the items per head, and by the chunks of q and k
  int64_t first_token, tokens;  // of this launch

  RopeItems(const Rope& p, int n)
      : pairs(p.rotary / (2 * n)),
        q_chunks((p.q.heads + kRopeHeads - 1) / kRopeHeads),
        per_head(pairs + (p.head_dim - p.rotary + 2 * n - 1) / (2 * n)),
        chunks(q_chunks + (p.k.heads + kRopeHeads - 1) / kRopeHeads) {}
  int64_t per_token() const { return int64_t{per_head.divisor} * chunks.divisor; }
};

template <typename T, typename Table, int N, bool Interleaved, bool Backward>
__global__ void __launch_bounds__(kRopeThreads, 4)
    rope_kernel(const __grid_constant__ Rope p, const __grid_constant__ RopeItems items) {
  const int64_t batch = p.first_batch + blockIdx.y;
  const uint32_t item = blockIdx.x * kRopeThreads + threadIdx.x;
  const uint32_t row = items.per_head.quotient(item);
  const int index = static_cast<int>(items.per_head.remainder(item, row));
  const uint32_t local_token = items.chunks.quotient(row);
  const int chunk = static_cast<int>(items.chunks.remainder(row, local_token));
  if (local_token >= items.tokens) return;
  const int64_t token = items.first_token + local_token;

  const bool is_q = chunk < items.q_chunks;
  const int first_head = (is_q ? chunk : chunk - items.q_chunks) * kRopeHeads;
  const int heads = min(kRopeHeads, (is_q ? p.q.heads : p.k.heads) - first_head);
  const ItemEntries<N, Interleaved> entries(p, index);

  Vec<T, N> x[kRopeHeads][2];
  {
    const RopeStrides strides = is_q ? p.q.in_strides : p.k.in_strides;
    const int64_t entry = N > 1 ? 1 : strides.entry;
    const T* in = static_cast<const T*>(is_q ? p.q.in : p.k.in) + batch * strides.batch +
                  token * strides.token + first_head * strides.head;
#pragma unroll
    for (int h = 0; h < kRopeHeads; ++h) {
      if (h >= heads) continue;
      x[h][0] = load<T, N>(in + h * strides.head + entries.first * entry);
      if (entries.has_second) x[h][1] = load<T, N>(in + h * strides.head + entries.second * entry);
    }
  }
  if (entries.rotated) {
    Rotation<N, Interleaved, Backward> rotation;
    rotation.template load<Table>(p, batch, token, entries);
#pragma unroll
    for (int h = 0; h < kRopeHeads; ++h) {
      float value[2][N];
      unpack(x[h][0], value[0]);
      unpack(x[h][1], value[1]);
      rotation.apply(value);
      x[h][0] = pack<T, N>(value[0]);
      x[h][1] = pack<T, N>(value[1]);
    }
  }
  const RopeStrides strides = is_q ? p.q.out_strides : p.k.out_strides;
  const int64_t entry = N > 1 ? 1 : strides.entry;
  T* out = static_cast<T*>(is_q ? p.q.out : p.k.out) + batch * strides.batch + token * strides.token +
           first_head * strides.head;
#pragma unroll
  for (int h = 0; h < kRopeHeads; ++h) {
    if (h >= heads) continue;
    store(out + h * strides.head + entries.first * entry, x[h][0]);
    if (entries.has_second) store(out + h * strides.head + entries.second * entry, x[h][1]);
  }
}

template <typename T, typename Table, int N, bool Interleaved>
void launch_rope_direction(const Rope& p, const RopeItems& items, dim3 grid, cudaStream_t stream) {
  if (p.backward) {
    rope_kernel<T, Table, N, Interleaved, true><<<grid, kRopeThreads, 0, stream>>>(p, items);
  } else {
    rope_kernel<T, Table, N, Interleaved, false><<<grid, kRopeThreads, 0, stream>>>(p, items);
  }
}

// Calls launch(p, items, grid) once, or several times if a batch entry has about 2^31 items or more (the
// limit of FastDivide) or the batch is larger than 65535 (the limit of gridDim.y).
template <typename Params, typename Items, typename Launch>
void launch_in_parts(Params p, Items items, const Launch& launch) {
  constexpr int64_t kMaxItems = (int64_t{1} << 31) - kRopeThreads, kMaxBatch = 65535;
  const int64_t tokens_per_launch = std::max<int64_t>(1, kMaxItems / items.per_token());
  const int64_t batch = p.batch;
  for (int64_t done = 0; done < batch; done += kMaxBatch) {
    p.batch = std::min(kMaxBatch, batch - done);
    for (items.first_token = 0; items.first_token < p.tokens; items.first_token += tokens_per_launch) {
      items.tokens = std::min(tokens_per_launch, p.tokens - items.first_token);
      const int64_t blocks = (items.tokens * items.per_token() + kRopeThreads - 1) / kRopeThreads;
      const dim3 grid(static_cast<unsigned>(blocks), static_cast<unsigned>(p.batch));
      launch(p, items, grid);
    }
    p.first_batch += kMaxBatch;
  }
}

template <typename T, typename Table, int N>
void launch_rope(const Rope& p, bool interleaved, cudaStream_t stream) {
  launch_in_parts(p, RopeItems(p, N), [&](const Rope& part, const RopeItems& items, dim3 grid) {
    if (interleaved) {
      launch_rope_direction<T, Table, N, true>(part, items, grid, stream);
    } else {
      launch_rope_direction<T, Table, N, false>(part, items, grid, stream);
    }
  });
}

}  // namespace liger
