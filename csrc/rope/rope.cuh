// Rotary position embedding of q and k in one launch, forward and backward, out of place or in place. The
// rotated halves are never materialised: a thread holds both entries of a pair in registers.
//
// A work item is two vectors of N entries, with both entries of N pairs, in kRopeHeads heads of one token:
// cos and sin are loaded and converted once for these heads. Entries beyond the rotary dimension are copied
// by further items. Grid: (items of the tokens, batch), one item per thread.
//
// With N = kVec<T> every row of every tensor is dense and aligned to 16 bytes, head_dim is a multiple of N,
// and the rotary dimension is a multiple of 2 * N; N = 1 has no requirement.
#pragma once

#include "device/fast_divide.h"
#include "device/vec.cuh"

namespace liger {

// The strides of a tensor (batch, heads, tokens, head_dim), in elements.
struct RopeStrides {
  int64_t batch, head, token, entry;
};

struct RopeTensor {
  const void* in;
  void* out;
  RopeStrides in_strides, out_strides;
  int heads;
};

// cos or sin: (batch or 1, tokens, rotary), in the dtype of q or float32.
struct RopeTable {
  const void* data;
  int64_t batch, token, entry;  // strides
};

struct Rope {
  RopeTensor q, k;
  RopeTable cos, sin;
  int64_t batch, tokens;
  int64_t first_batch;   // of this launch
  int head_dim, rotary;  // rotary: the leading entries of a head that are rotated
  bool backward;
};

inline constexpr int kRopeThreads = 256;
inline constexpr int kRopeHeads = 2;  // per thread: more registers would reduce the occupancy

template <typename Table, int N>
__device__ __forceinline__ void load_table(const RopeTable& table, int64_t batch, int64_t token, int entry,
                                           float (&out)[N]) {
  const int64_t at = batch * table.batch + token * table.token + entry * (N > 1 ? 1 : table.entry);
  load_floats<N>(static_cast<const Table*>(table.data) + at, out);
}

// The work items of one token: per_head items for each chunk of kRopeHeads heads. The first `pairs` items of
// a head rotate, the others copy. The chunks of q come before those of k.
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
  const bool rotated = index < items.pairs;
  int entry1, entry2;
  if (!rotated) {
    entry1 = p.rotary + (index - items.pairs) * 2 * N;
    entry2 = entry1 + N;
  } else if (Interleaved) {
    entry1 = index * 2 * N;
    entry2 = entry1 + N;
  } else {
    entry1 = index * N;
    entry2 = p.rotary / 2 + entry1;
  }
  const bool second = entry2 < p.head_dim;  // false only for the last of an odd number of copied vectors

  Vec<T, N> x[kRopeHeads][2];
  {
    const RopeStrides strides = is_q ? p.q.in_strides : p.k.in_strides;
    const int64_t entry = N > 1 ? 1 : strides.entry;
    const T* in = static_cast<const T*>(is_q ? p.q.in : p.k.in) + batch * strides.batch +
                  token * strides.token + first_head * strides.head;
#pragma unroll
    for (int h = 0; h < kRopeHeads; ++h) {
      if (h >= heads) continue;
      x[h][0] = load<T, N>(in + h * strides.head + entry1 * entry);
      if (second) x[h][1] = load<T, N>(in + h * strides.head + entry2 * entry);
    }
  }
  if (rotated) {
    // Entry i of the 2N becomes x_i * c_i + x_j * s_i, where j is its partner, with the signs of the sines
    // folded into s. The backward is the transpose, which has the sine of the partner with the opposite sign.
    float c[2][N], s[2][N];
    load_table<Table, N>(p.cos, batch, token, entry1, c[0]);
    load_table<Table, N>(p.cos, batch, token, entry2, c[1]);
    load_table<Table, N>(p.sin, batch, token, entry1, s[0]);
    load_table<Table, N>(p.sin, batch, token, entry2, s[1]);
    constexpr bool kAdjacent = Interleaved && N > 1;  // both entries of a pair are in one vector
    const auto first_of = [](int pair) { return kAdjacent ? 2 * pair : pair; };
    const auto second_of = [](int pair) { return kAdjacent ? 2 * pair + 1 : pair + N; };
#pragma unroll
    for (int pair = 0; pair < N; ++pair) {
      float& s1 = s[first_of(pair) / N][first_of(pair) % N];
      float& s2 = s[second_of(pair) / N][second_of(pair) % N];
      const float sin1 = s1, sin2 = s2;
      s1 = Backward ? sin2 : -sin1;
      s2 = Backward ? -sin1 : sin2;
    }
#pragma unroll
    for (int h = 0; h < kRopeHeads; ++h) {
      float value[2][N];
      unpack(x[h][0], value[0]);
      unpack(x[h][1], value[1]);
#pragma unroll
      for (int pair = 0; pair < N; ++pair) {
        const int i = first_of(pair), j = second_of(pair);
        const float x1 = value[i / N][i % N], x2 = value[j / N][j % N];
        value[i / N][i % N] = x1 * c[i / N][i % N] + x2 * s[i / N][i % N];
        value[j / N][j % N] = x2 * c[j / N][j % N] + x1 * s[j / N][j % N];
      }
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
    store(out + h * strides.head + entry1 * entry, x[h][0]);
    if (second) store(out + h * strides.head + entry2 * entry, x[h][1]);
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

// One launch, unless a batch entry has about 2^31 items or more, or the batch is larger than 65535: the
// limits of FastDivide and of gridDim.y.
template <typename T, typename Table, int N>
void launch_rope(Rope p, bool interleaved, cudaStream_t stream) {
  constexpr int64_t kMaxItems = (int64_t{1} << 31) - kRopeThreads, kMaxBatch = 65535;
  RopeItems items(p, N);
  const int64_t tokens_per_launch = std::max<int64_t>(1, kMaxItems / items.per_token());
  const int64_t batch = p.batch;
  for (int64_t done = 0; done < batch; done += kMaxBatch) {
    p.batch = std::min(kMaxBatch, batch - done);
    for (items.first_token = 0; items.first_token < p.tokens; items.first_token += tokens_per_launch) {
      items.tokens = std::min(tokens_per_launch, p.tokens - items.first_token);
      const int64_t blocks = (items.tokens * items.per_token() + kRopeThreads - 1) / kRopeThreads;
      const dim3 grid(static_cast<unsigned>(blocks), static_cast<unsigned>(p.batch));
      if (interleaved) {
        launch_rope_direction<T, Table, N, true>(p, items, grid, stream);
      } else {
        launch_rope_direction<T, Table, N, false>(p, items, grid, stream);
      }
    }
    p.first_batch += kMaxBatch;
  }
}

}  // namespace liger
