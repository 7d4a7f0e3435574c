// SPDX-License-Identifier: BSD-3-Clause

// LayerNorm forward (norm/moment_norm.cuh) with one weight and bias per column.
#pragma once

#include "norm/moment_norm.cuh"
#include "norm/parameters.cuh"

namespace liger {

// kFastPath: at compile time, the weight has the dtype of x, and so has the bias if there is one.
template <bool kFastPath>
struct ColumnAffine {
  const void *weight, *bias;  // may be null
  bool is_float;

  template <typename T, int N, int V>
  struct Fragment {
    static constexpr bool kPrefetch = kFastPath && V <= 4;  // eight vectors leave no registers for it
    Vec<T, N> weight[kPrefetch ? V : 1], bias[kPrefetch ? V : 1];

    __device__ __forceinline__ void prefetch(const ColumnAffine& affine, int j, int64_t, int64_t vector) {
      if constexpr (kPrefetch) {
        weight[j] = load<T, N>(static_cast<const T*>(affine.weight) + vector * N);
        if (affine.bias) bias[j] = load<T, N>(static_cast<const T*>(affine.bias) + vector * N);
      }
    }

    __device__ __forceinline__ void apply(const ColumnAffine& affine, int j, int64_t, int64_t vector,
                                          float (&values)[N]) const {
      float w[N], b[N];
      if constexpr (kPrefetch) {
        unpack(weight[j], w);
#pragma unroll
        for (int i = 0; i < N; ++i) b[i] = 0.0f;
        if (affine.bias) unpack(bias[j], b);
      } else {
        const bool is_float = !kFastPath && affine.is_float;
        load_parameter<T, N>(affine.weight, is_float, 0.0f, 1.0f, vector * N, w);
        load_parameter<T, N>(affine.bias, is_float, 0.0f, 0.0f, vector * N, b);
      }
#pragma unroll
      for (int i = 0; i < N; ++i) values[i] = fmaf(values[i], w[i], b[i]);
    }
  };
};

using LayerNorm = MomentNorm<Rows, ColumnAffine<false>>;
using FastLayerNorm = MomentNorm<OneStride, ColumnAffine<true>>;

inline FastLayerNorm fast_params(const LayerNorm& p) {
  return {p.x,
          p.y,
          p.mean,
          p.rstd,
          p.chunk_moments,
          {p.x_rows.stride},
          {p.y_rows.stride},
          p.rows,
          p.hidden,
          p.eps,
          p.inverse_hidden,
          {p.affine.weight, p.affine.bias, p.affine.is_float}};
}

// vectorised: every row of x and y, the weight and the bias are aligned to 16 bytes, and hidden is a multiple
// of kVec<T>.
template <typename T>
void launch_layer_norm(const LayerNorm& p, bool vectorised, int chunks, cudaStream_t stream) {
  if (chunks > 0) {
    vectorised ? launch_moment_norm_chunks<T, kVec<T>>(p, chunks, stream)
               : launch_moment_norm_chunks<T, 1>(p, chunks, stream);
  } else if (!vectorised) {
    launch_moment_norm_rows<T, 1>(p, stream);
  } else if (p.affine.weight && !p.affine.is_float && !p.x_rows.nested && !p.y_rows.nested) {
    launch_moment_norm_rows<T, kVec<T>>(fast_params(p), stream);
  } else {
    launch_moment_norm_rows<T, kVec<T>>(p, stream);
  }
}

}  // namespace liger
