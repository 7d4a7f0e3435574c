// Rotary position embedding of q and k in one launch, forward and backward.
//
// A thread takes the two vectors that hold both members of its pairs, in several heads of one token: the
// cosines and sines are read and converted once for all of them. Entries beyond the rotary ones are copied by
// the same kernel.
#pragma once

#include "common/vec.cuh"

namespace liger {

// Of a tensor (batch, heads, tokens, head_dim), in elements.
struct RopeStrides {
  int64_t batch, head, token, entry;
};

struct RopeTensor {
  const void* in;
  void* out;
  RopeStrides in_strides, out_strides;
  int heads;
};

enum class TableType { kHalf, kBFloat16, kFloat };

// cos or sin: (batch or 1, tokens, rotary).
struct RopeTable {
  const void* data;
  int64_t batch, token, entry;  // strides
};

struct Rope {
  RopeTensor q, k;
  RopeTable cos, sin;
  TableType table_type;
  int64_t batch, tokens;
  int head_dim, rotary;
  bool backward;
};

inline constexpr int kRopeThreads = 256;
inline constexpr int kRopeHeads = 4;  // per thread

template <int N>
__device__ __forceinline__ void load_table(const RopeTable& table, TableType type, int64_t batch,
                                           int64_t token, int entry, float (&out)[N]) {
  const int64_t at = batch * table.batch + token * table.token + entry * (N > 1 ? 1 : table.entry);
  switch (type) {
    case TableType::kHalf:
      load_floats<N>(static_cast<const __half*>(table.data) + at, out);
      break;
    case TableType::kBFloat16:
      load_floats<N>(static_cast<const __nv_bfloat16*>(table.data) + at, out);
      break;
    default:
      load_floats<N>(static_cast<const float*>(table.data) + at, out);
  }
}

// How the work of one token is cut: items of two vectors in kRopeHeads heads.
struct RopeItems {
  int pairs, per_head, q_chunks, chunks;
  __host__ __device__ RopeItems(const Rope& p, int n)
      : pairs(p.rotary / (2 * n)),
        per_head(pairs + (p.head_dim - p.rotary + 2 * n - 1) / (2 * n)),
        q_chunks((p.q.heads + kRopeHeads - 1) / kRopeHeads),
        chunks(q_chunks + (p.k.heads + kRopeHeads - 1) / kRopeHeads) {}
  __host__ __device__ int per_token() const { return per_head * chunks; }
  __host__ __device__ int64_t blocks(int64_t tokens) const {
    return (tokens * per_token() + kRopeThreads - 1) / kRopeThreads;
  }
};

template <typename T, int N, bool Interleaved>
__global__ void __launch_bounds__(kRopeThreads, 3) rope_kernel(const __grid_constant__ Rope p) {
  const RopeItems items(p, N);
  const int64_t blocks = items.blocks(p.tokens);  // of one batch entry
  const int64_t batch = blockIdx.x / blocks, first = (blockIdx.x - batch * blocks) * kRopeThreads;
  const int64_t first_token = first / items.per_token();
  const int item = static_cast<int>(first - first_token * items.per_token()) + threadIdx.x;
  const int part = item % items.per_head, chunk = item / items.per_head % items.chunks;
  const int64_t token = first_token + item / items.per_token();
  if (token >= p.tokens) return;

  const bool is_q = chunk < items.q_chunks;
  const int first_head = (is_q ? chunk : chunk - items.q_chunks) * kRopeHeads;
  const int heads = min(kRopeHeads, (is_q ? p.q.heads : p.k.heads) - first_head);
  const bool rotated = part < items.pairs;
  int entry1, entry2;
  if (!rotated) {
    entry1 = p.rotary + (part - items.pairs) * 2 * N;
    entry2 = entry1 + N;
  } else if (Interleaved) {
    entry1 = part * 2 * N;
    entry2 = entry1 + N;
  } else {
    entry1 = part * N;
    entry2 = p.rotary / 2 + entry1;
  }
  const bool second = entry2 < p.head_dim;  // false only at the end of an odd number of copied vectors

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
    // Entry i of the 2N becomes x_i * c_i + (its partner) * s_i; the transposed map takes the partner's sine.
    float c[2][N], s[2][N];
    load_table<N>(p.cos, p.table_type, batch, token, entry1, c[0]);
    load_table<N>(p.cos, p.table_type, batch, token, entry2, c[1]);
    load_table<N>(p.sin, p.table_type, batch, token, entry1, s[0]);
    load_table<N>(p.sin, p.table_type, batch, token, entry2, s[1]);
    constexpr bool kAdjacent = Interleaved && N > 1;  // the partners share a vector
    const auto first_of = [](int pair) { return kAdjacent ? 2 * pair : pair; };
    const auto second_of = [](int pair) { return kAdjacent ? 2 * pair + 1 : pair + N; };
#pragma unroll
    for (int pair = 0; pair < N; ++pair) {
      float& s1 = s[first_of(pair) / N][first_of(pair) % N];
      float& s2 = s[second_of(pair) / N][second_of(pair) % N];
      const float sin1 = s1, sin2 = s2;
      s1 = p.backward ? sin2 : -sin1;
      s2 = p.backward ? -sin1 : sin2;
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

template <typename T, int N>
void launch_rope(const Rope& p, bool interleaved, cudaStream_t stream) {
  const unsigned blocks = static_cast<unsigned>(p.batch * RopeItems(p, N).blocks(p.tokens));
  if (interleaved) {
    rope_kernel<T, N, true><<<blocks, kRopeThreads, 0, stream>>>(p);
  } else {
    rope_kernel<T, N, false><<<blocks, kRopeThreads, 0, stream>>>(p);
  }
}

}  // namespace liger
