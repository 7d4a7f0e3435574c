// SPDX-License-Identifier: BSD-3-Clause

// The rotation of rope and qk_norm_rope: tensors, tables, and the pairs of a work item.
//
// A work item is two vectors of N entries of a head: both entries of N pairs, or entries beyond the rotary
// dimension, which are copied. With N = kVec<T> every row of every tensor is dense and aligned to 16 bytes,
// head_dim is a multiple of N, and the rotary dimension is a multiple of 2 * N; N = 1 has no requirement.
#pragma once

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

template <typename Table, int N>
__device__ __forceinline__ void load_table(const RopeTable& table, int64_t batch, int64_t token, int entry,
                                           float (&out)[N]) {
  const int64_t at = batch * table.batch + token * table.token + entry * (N > 1 ? 1 : table.entry);
  load_floats<N>(static_cast<const Table*>(table.data) + at, out);
}

// The first entries of the two vectors of an item. Items of a head are numbered from 0.
template <int N, bool Interleaved>
struct ItemEntries {
  int first, second;
  bool rotated;
  bool has_second;  // false only for the last of an odd number of copied vectors

  __device__ __forceinline__ ItemEntries(const Rope& p, int index) {
    const int pairs = p.rotary / (2 * N);
    rotated = index < pairs;
    if (!rotated) {
      first = p.rotary + (index - pairs) * 2 * N;
      second = first + N;
    } else if (Interleaved) {
      first = index * 2 * N;
      second = first + N;
    } else {
      first = index * N;
      second = p.rotary / 2 + first;
    }
    has_second = second < p.head_dim;
  }

  // The same half of both vectors, M = N / 2, which has whole pairs.
  template <int M>
  __device__ __forceinline__ ItemEntries<M, Interleaved> half(int which) const {
    return {first + which * M, second + which * M, rotated, has_second};
  }

  __device__ __forceinline__ ItemEntries(int first, int second, bool rotated, bool has_second)
      : first(first), second(second), rotated(rotated), has_second(has_second) {}
};

// The rotation of the N pairs of an item, or its transpose.
template <int N, bool Interleaved, bool Backward>
struct Rotation {
  float c[2][N], s[2][N];

  template <typename Table>
  __device__ __forceinline__ void load(const Rope& p, int64_t batch, int64_t token,
                                       const ItemEntries<N, Interleaved>& entries) {
    load_table<Table, N>(p.cos, batch, token, entries.first, c[0]);
    load_table<Table, N>(p.cos, batch, token, entries.second, c[1]);
    load_table<Table, N>(p.sin, batch, token, entries.first, s[0]);
    load_table<Table, N>(p.sin, batch, token, entries.second, s[1]);
  }

  __device__ __forceinline__ void apply(float (&value)[2][N]) const {
#pragma unroll
    for (int pair = 0; pair < N; ++pair) {
      const int i = first_of(pair), j = second_of(pair);
      float &x1 = value[i / N][i % N], &x2 = value[j / N][j % N];
      const float sin1 = s[i / N][i % N], sin2 = s[j / N][j % N];
      const float rotated = fmaf(x1, c[i / N][i % N], Backward ? x2 * sin2 : -x2 * sin1);
      x2 = fmaf(x2, c[j / N][j % N], Backward ? -x1 * sin1 : x1 * sin2);
      x1 = rotated;
    }
  }

 private:
  static constexpr bool kAdjacent = Interleaved && N > 1;  // both entries of a pair are in one vector
  static __device__ __forceinline__ constexpr int first_of(int pair) { return kAdjacent ? 2 * pair : pair; }
  static __device__ __forceinline__ constexpr int second_of(int pair) {
    return kAdjacent ? 2 * pair + 1 : pair + N;
  }
};

}  // namespace liger
