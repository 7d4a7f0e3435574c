// LayerNorm forward: the weight and the bias belong to the columns of a row.
#pragma once

#include "norm/moment_norm.cuh"
#include "norm/parameters.cuh"

namespace liger {

// Usual: a weight of the dtype of x, and no bias or one like it, known when compiled.
template <bool Usual>
struct ColumnAffine {
  const void *weight, *bias;  // may be null
  bool is_float;

  template <typename T, int N, int V>
  struct Held {
    static constexpr bool kEarly = Usual && V <= 4;  // wider rows have no registers for it
    Vec<T, N> weight[kEarly ? V : 1], bias[kEarly ? V : 1];

    __device__ __forceinline__ void fetch(const ColumnAffine& affine, int j, int64_t, int64_t vector) {
      if constexpr (kEarly) {
        weight[j] = load<T, N>(static_cast<const T*>(affine.weight) + vector * N);
        if (affine.bias) bias[j] = load<T, N>(static_cast<const T*>(affine.bias) + vector * N);
      }
    }

    __device__ __forceinline__ void apply(const ColumnAffine& affine, int j, int64_t, int64_t vector,
                                          float (&values)[N]) const {
      float w[N], b[N];
      if constexpr (kEarly) {
        unpack(weight[j], w);
#pragma unroll
        for (int i = 0; i < N; ++i) b[i] = 0.0f;
        if (affine.bias) unpack(bias[j], b);
      } else {
        const bool is_float = !Usual && affine.is_float;
        load_parameter<T, N>(affine.weight, is_float, 0.0f, 1.0f, vector * N, w);
        load_parameter<T, N>(affine.bias, is_float, 0.0f, 0.0f, vector * N, b);
      }
#pragma unroll
      for (int i = 0; i < N; ++i) values[i] = fmaf(values[i], w[i], b[i]);
    }
  };
};

using LayerNorm = MomentNorm<Rows, ColumnAffine<false>>;
using UsualLayerNorm = MomentNorm<OneStride, ColumnAffine<true>>;

inline UsualLayerNorm usual(const LayerNorm& p) {
  return {p.x,
          p.y,
          p.mean,
          p.rstd,
          p.parts,
          {p.x_rows.stride},
          {p.y_rows.stride},
          p.rows,
          p.hidden,
          p.eps,
          p.inverse_hidden,
          {p.affine.weight, p.affine.bias, p.affine.is_float}};
}

// vectorised: every row of every tensor starts at a multiple of 16 bytes and holds whole vectors.
template <typename T>
void launch_layer_norm(const LayerNorm& p, bool vectorised, int chunks, cudaStream_t stream) {
  if (chunks > 0) {
    vectorised ? launch_moment_norm_chunks<T, kVec<T>>(p, chunks, stream)
               : launch_moment_norm_chunks<T, 1>(p, chunks, stream);
  } else if (!vectorised) {
    launch_moment_norm_rows<T, 1>(p, stream);
  } else if (p.affine.weight && !p.affine.is_float && !p.x_rows.nested && !p.y_rows.nested) {
    launch_moment_norm_rows<T, kVec<T>>(usual(p), stream);
  } else {
    launch_moment_norm_rows<T, kVec<T>>(p, stream);
  }
}

}  // namespace liger
