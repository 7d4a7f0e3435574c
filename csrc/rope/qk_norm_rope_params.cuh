// SPDX-License-Identifier: BSD-3-Clause

// Parameters of qk_norm_rope, and the arithmetic of its norm.
#pragma once

#include "rope/rotation.cuh"

namespace liger {

// The weight of a norm: (head_dim,) in the dtype of the heads or float32, or null for 1.
struct HeadWeight {
  const void* data;
  bool is_float;
};

struct QkNormRope : Rope {
  HeadWeight q_weight, k_weight;
  float eps, offset, inverse_head_dim;
  bool round_rstd;    // casting mode "none": rstd is rounded to the dtype of the heads
  bool round_scaled;  // "none", "llama": x * rstd is rounded before the multiplication by the weight
};

// q or k. out: the result of the forward, or the gradient of x. In the backward out and partial may
// be null: not needed.
struct NormedHeads {
  const void *x, *grad_out;
  void* out;
  float* partial;  // of the gradient of the weight, (partials, head_dim)
  RopeStrides x_strides, grad_out_strides, out_strides;
  int heads;
};

// The kernels use the tables and sizes of Rope.
struct QkNormRopeBackward : QkNormRope {
  NormedHeads tensors[2];
};

// Number of items of 2n entries in a head: first the rotated entries, then the copied entries.
inline int items_per_head(const Rope& p, int n) {
  return p.rotary / (2 * n) + (p.head_dim - p.rotary + 2 * n - 1) / (2 * n);
}
// The logarithm of the smallest power of two that is at least `items`.
inline int lanes_of(int items) {
  int log2 = 0;
  while ((1 << log2) < items) ++log2;
  return log2;
}

// Up to kRopeHeads consecutive heads of a token.
struct HeadPlace {
  uint32_t batch, token;
  int first_head, heads;
};

// The vectorised kernels require strides below 2^32, so a product takes one instruction.
__device__ __forceinline__ int64_t wide_product(int64_t stride, uint32_t index) {
  return static_cast<int64_t>(uint64_t{static_cast<uint32_t>(stride)} * index);
}
__device__ __forceinline__ int64_t head_offset(const RopeStrides& strides, const HeadPlace& place) {
  return wide_product(strides.batch, place.batch) + wide_product(strides.token, place.token) +
         wide_product(strides.head, place.first_head);
}

// Part `which` of a vector that is divided into parts of M elements.
template <int M, typename T, int N>
__device__ __forceinline__ Vec<T, M>& part_of(Vec<T, N>& x, int which) {
  return reinterpret_cast<Vec<T, M>*>(&x)[which];
}

// The entries of the tables for an item of N pairs, as they are stored.
template <typename Table, int N>
struct TableItem {
  Vec<Table, N> c[2], s[2];

  template <bool Interleaved>
  __device__ __forceinline__ void load(const Rope& p, const HeadPlace& place,
                                       const ItemEntries<N, Interleaved>& entries) {
    const Table* cos = row_of(p.cos, place);
    const Table* sin = row_of(p.sin, place);
    c[0] = liger::load<Table, N>(cos + entries.first), c[1] = liger::load<Table, N>(cos + entries.second);
    s[0] = liger::load<Table, N>(sin + entries.first), s[1] = liger::load<Table, N>(sin + entries.second);
  }

  template <int M, bool Interleaved, bool Backward>
  __device__ __forceinline__ void unpack_part(int which, Rotation<M, Interleaved, Backward>& rotation) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      unpack(part_of<M>(c[i], which), rotation.c[i]);
      unpack(part_of<M>(s[i], which), rotation.s[i]);
    }
  }

 private:
  static __device__ __forceinline__ const Table* row_of(const RopeTable& table, const HeadPlace& place) {
    return static_cast<const Table*>(table.data) + wide_product(table.batch, place.batch) +
           wide_product(table.token, place.token);
  }
};

// Sums each of K values over 2^lanes_log2 consecutive threads of a warp. All threads of the warp must call
// it.
template <int K>
__device__ __forceinline__ void sum_over_lanes(float (&x)[K], int lanes_log2) {
#pragma unroll
  for (int log2 = 4; log2 >= 0; --log2) {
    if (log2 < lanes_log2) {
#pragma unroll
      for (int k = 0; k < K; ++k) x[k] += __shfl_xor_sync(0xffffffffu, x[k], 1 << log2);
    }
  }
}

template <typename T>
__device__ __forceinline__ float reciprocal_rms(const QkNormRope& p, float squares) {
  const float rstd = rsqrtf(squares * p.inverse_head_dim + p.eps);
  return p.round_rstd ? round_to<T>(rstd) : rstd;
}

// Values that the norm rounds to T before the rotation, and the type of the weights.
enum class Rounding {
  kOutput,      // x * rstd * weight, as if it were stored
  kScaled,      // x * rstd as well
  kOutputHalf,  // as kOutput, weights of a half type T
  kScaledHalf,  // as kScaled, weights of a half type T and no offset: they are multiplied in T
};

// The output of the norm, rounded to T as if it were stored before the rotation.
template <typename T, bool kRoundScaled, int N>
__device__ __forceinline__ void normalise(float (&x)[N], float rstd, const float (&w)[N]) {
#pragma unroll
  for (int k = 0; k < N; ++k) x[k] *= rstd;
  if constexpr (kRoundScaled) round_values<T>(x);
#pragma unroll
  for (int k = 0; k < N; ++k) x[k] *= w[k];
  round_values<T>(x);
}

}  // namespace liger
