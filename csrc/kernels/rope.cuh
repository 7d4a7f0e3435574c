// Rotary position embedding of q and k in one launch, forward and backward.
//
// A thread takes the two vectors that hold both members of its pairs, in several heads of one token: the
// cosines and sines are read and converted once for all of them. Entries beyond the rotary ones are copied by
// the same kernel.
#pragma once

#include <algorithm>

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
__device__ __forceinline__ void load_table(const RopeTable& table, TableType type, int64_t offset,
                                           float (&out)[N]) {
  switch (type) {
    case TableType::kHalf:
      load_floats<N>(static_cast<const __half*>(table.data) + offset, out);
      break;
    case TableType::kBFloat16:
      load_floats<N>(static_cast<const __nv_bfloat16*>(table.data) + offset, out);
      break;
    default:
      load_floats<N>(static_cast<const float*>(table.data) + offset, out);
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
};

template <typename T, int N, bool Interleaved>
__global__ void __launch_bounds__(kRopeThreads, 2) rope_kernel(const Rope p, int tokens_per_block) {
  const RopeItems items(p, N);
  const int64_t tiles = (p.tokens + tokens_per_block - 1) / tokens_per_block;
  const int64_t batch = blockIdx.x / tiles, first_token = (blockIdx.x - batch * tiles) * tokens_per_block;

  for (int item = threadIdx.x; item < items.per_token() * tokens_per_block; item += blockDim.x) {
    const int part = item % items.per_head, rest = item / items.per_head;
    const int64_t token = first_token + rest / items.chunks;
    if (token >= p.tokens) break;
    const int chunk = rest % items.chunks;
    const bool is_q = chunk < items.q_chunks;
    const int heads = is_q ? p.q.heads : p.k.heads;
    const int first_head = (is_q ? chunk : chunk - items.q_chunks) * kRopeHeads;
    const int64_t in_head = is_q ? p.q.in_strides.head : p.k.in_strides.head;
    const int64_t out_head = is_q ? p.q.out_strides.head : p.k.out_strides.head;
    const int64_t in_entry = N > 1 ? 1 : is_q ? p.q.in_strides.entry : p.k.in_strides.entry;
    const int64_t out_entry = N > 1 ? 1 : is_q ? p.q.out_strides.entry : p.k.out_strides.entry;
    const T* in = static_cast<const T*>(is_q ? p.q.in : p.k.in) +
                  batch * (is_q ? p.q.in_strides.batch : p.k.in_strides.batch) +
                  token * (is_q ? p.q.in_strides.token : p.k.in_strides.token) + first_head * in_head;
    T* out = static_cast<T*>(is_q ? p.q.out : p.k.out) +
             batch * (is_q ? p.q.out_strides.batch : p.k.out_strides.batch) +
             token * (is_q ? p.q.out_strides.token : p.k.out_strides.token) + first_head * out_head;

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
#pragma unroll
    for (int h = 0; h < kRopeHeads; ++h) {
      if (first_head + h >= heads) continue;
      x[h][0] = load<T, N>(in + h * in_head + entry1 * in_entry);
      if (second) x[h][1] = load<T, N>(in + h * in_head + entry2 * in_entry);
    }
    if (rotated) {
      // Entry i of the 2N becomes x_i * c_i + (its partner) * m_i; the transposed map takes the partner's
      // sine.
      float c[2][N], s[2][N];
      const int64_t cos_row = batch * p.cos.batch + token * p.cos.token;
      const int64_t sin_row = batch * p.sin.batch + token * p.sin.token;
      const int64_t cos_entry = N > 1 ? 1 : p.cos.entry, sin_entry = N > 1 ? 1 : p.sin.entry;
      load_table<N>(p.cos, p.table_type, cos_row + entry1 * cos_entry, c[0]);
      load_table<N>(p.cos, p.table_type, cos_row + entry2 * cos_entry, c[1]);
      load_table<N>(p.sin, p.table_type, sin_row + entry1 * sin_entry, s[0]);
      load_table<N>(p.sin, p.table_type, sin_row + entry2 * sin_entry, s[1]);
      constexpr bool kAdjacent = Interleaved && N > 1;  // the partners share a vector
      const auto first_of = [](int pair) { return kAdjacent ? 2 * pair : pair; };
      const auto second_of = [](int pair) { return kAdjacent ? 2 * pair + 1 : pair + N; };
#pragma unroll
      for (int pair = 0; pair < N; ++pair) {
        float& m1 = s[first_of(pair) / N][first_of(pair) % N];
        float& m2 = s[second_of(pair) / N][second_of(pair) % N];
        const float sin1 = m1, sin2 = m2;
        m1 = p.backward ? sin2 : -sin1;
        m2 = p.backward ? -sin1 : sin2;
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
#pragma unroll
    for (int h = 0; h < kRopeHeads; ++h) {
      if (first_head + h >= heads) continue;
      store(out + h * out_head + entry1 * out_entry, x[h][0]);
      if (second) store(out + h * out_head + entry2 * out_entry, x[h][1]);
    }
  }
}

template <typename T, int N>
void launch_rope(const Rope& p, bool interleaved, cudaStream_t stream) {
  const int per_token = RopeItems(p, N).per_token();
  const int tokens_per_block = std::max(1, kRopeThreads / per_token);
  const int64_t blocks = p.batch * ((p.tokens + tokens_per_block - 1) / tokens_per_block);
  const auto kernel = interleaved ? rope_kernel<T, N, true> : rope_kernel<T, N, false>;
  kernel<<<static_cast<unsigned>(blocks), kRopeThreads, 0, stream>>>(p, tokens_per_block);
}

}  // namespace liger
