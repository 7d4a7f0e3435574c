// SPDX-License-Identifier: BSD-3-Clause

// qk_norm_rope for heads of any size, stride and alignment: a warp per head, which reads it twice. The tables
// are float32.
#pragma once

#include "norm/parameters.cuh"
#include "rope/qk_norm_rope_params.cuh"

namespace liger {

inline constexpr int kGenericThreads = 256, kGenericWarps = kGenericThreads / 32;

// q or k as rows: the heads of a token are consecutive.
struct GenericHeads {
  NormedHeads tensor;
  HeadWeight weight;
};

struct GenericPlace {
  int64_t batch, token, head;
  __device__ __forceinline__ GenericPlace(const Rope& p, int heads, int64_t row) {
    head = row % heads;
    token = row / heads % p.tokens;
    batch = row / heads / p.tokens;
  }
  __device__ __forceinline__ int64_t offset(const RopeStrides& strides) const {
    return batch * strides.batch + head * strides.head + token * strides.token;
  }
};

template <typename T>
__device__ __forceinline__ float weight_at(const QkNormRope& p, const HeadWeight& weight, int entry) {
  float w[1];
  load_parameter<T, 1>(weight.data, weight.is_float, p.offset, 1.0f, entry, w);
  return w[0];
}

// Calls f(entries) for the items of this lane.
template <bool Interleaved, typename F>
__device__ __forceinline__ void for_each_item(const Rope& p, const F& f) {
  const int items = p.rotary / 2 + (p.head_dim - p.rotary + 1) / 2;
  for (int index = threadIdx.x % 32; index < items; index += 32) f(ItemEntries<1, Interleaved>(p, index));
}

template <typename T, bool Interleaved>
__global__ void __launch_bounds__(kGenericThreads)
    qk_norm_rope_generic_kernel(const __grid_constant__ QkNormRope p,
                                const __grid_constant__ GenericHeads heads) {
  const NormedHeads& tensor = heads.tensor;
  const int64_t rows = p.batch * p.tokens * tensor.heads;
  const int64_t row = int64_t{blockIdx.x} * kGenericWarps + threadIdx.x / 32;
  if (row >= rows) return;
  const GenericPlace place(p, tensor.heads, row);
  const T* x = static_cast<const T*>(tensor.x) + place.offset(tensor.x_strides);
  T* out = static_cast<T*>(tensor.out) + place.offset(tensor.out_strides);
  float squares[1] = {};
  for (int entry = threadIdx.x % 32; entry < p.head_dim; entry += 32) {
    const float value = to_float(x[entry * tensor.x_strides.entry]);
    squares[0] = fmaf(value, value, squares[0]);
  }
  sum_over_lanes(squares, 5);
  const float rstd = reciprocal_rms<T>(p, squares[0]);
  const auto normalise_at = [&](int entry, float (&value)[1]) {
    const float w[1] = {weight_at<T>(p, heads.weight, entry)};
    value[0] = to_float(x[entry * tensor.x_strides.entry]);
    p.round_scaled ? normalise<T, true>(value, rstd, w) : normalise<T, false>(value, rstd, w);
  };
  for_each_item<Interleaved>(p, [&](const ItemEntries<1, Interleaved>& entries) {
    float value[2][1] = {};
    normalise_at(entries.first, value[0]);
    if (entries.has_second) normalise_at(entries.second, value[1]);
    if (entries.rotated) {
      Rotation<1, Interleaved, false> rotation;
      rotation.template load<float>(p, place.batch, place.token, entries);
      rotation.apply(value);
    }
    out[entries.first * tensor.out_strides.entry] = from_float<T>(value[0][0]);
    if (entries.has_second) out[entries.second * tensor.out_strides.entry] = from_float<T>(value[1][0]);
  });
}

// Warp i has the rows i, i + warps, ... and partial i. A column of the partial belongs to the lane with that
// item.
template <typename T, bool Interleaved>
__global__ void __launch_bounds__(kGenericThreads)
    qk_norm_rope_backward_generic_kernel(const __grid_constant__ QkNormRope p,
                                         const __grid_constant__ GenericHeads heads) {
  using Entries = ItemEntries<1, Interleaved>;
  const NormedHeads& tensor = heads.tensor;
  const int64_t rows = p.batch * p.tokens * tensor.heads;
  const int64_t warp = int64_t{blockIdx.x} * kGenericWarps + threadIdx.x / 32;
  const int64_t warps = int64_t{gridDim.x} * kGenericWarps;
  float* const partial = tensor.partial ? tensor.partial + warp * p.head_dim : nullptr;
  if (partial) {
    for_each_item<Interleaved>(p, [&](const Entries& entries) {
      partial[entries.first] = 0.0f;
      if (entries.has_second) partial[entries.second] = 0.0f;
    });
  }
  for (int64_t row = warp; row < rows; row += warps) {
    const GenericPlace place(p, tensor.heads, row);
    const T* x = static_cast<const T*>(tensor.x) + place.offset(tensor.x_strides);
    const T* grad_out = static_cast<const T*>(tensor.grad_out) + place.offset(tensor.grad_out_strides);
    T* out = static_cast<T*>(tensor.out) + place.offset(tensor.out_strides);
    const auto x_at = [&](int entry) { return to_float(x[entry * tensor.x_strides.entry]); };
    const auto load_gradients = [&](const Entries& entries, float (&g)[2][1]) {
      g[0][0] = to_float(grad_out[entries.first * tensor.grad_out_strides.entry]);
      g[1][0] =
          entries.has_second ? to_float(grad_out[entries.second * tensor.grad_out_strides.entry]) : 0.0f;
      if (!entries.rotated) return;
      Rotation<1, Interleaved, true> rotation;
      rotation.template load<float>(p, place.batch, place.token, entries);
      rotation.apply(g);
    };
    float sums[2] = {};  // of squares, and of grad * w * x
    for_each_item<Interleaved>(p, [&](const Entries& entries) {
      float g[2][1];
      load_gradients(entries, g);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (i == 1 && !entries.has_second) continue;
        const int entry = i == 0 ? entries.first : entries.second;
        const float value = x_at(entry);
        sums[0] = fmaf(value, value, sums[0]);
        sums[1] = fmaf(g[i][0] * weight_at<T>(p, heads.weight, entry), value, sums[1]);
      }
    });
    sum_over_lanes(sums, 5);
    const float rstd = reciprocal_rms<T>(p, sums[0]);
    const float shift = sums[1] * p.inverse_head_dim * rstd * rstd * rstd;
    for_each_item<Interleaved>(p, [&](const Entries& entries) {
      float g[2][1];
      load_gradients(entries, g);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (i == 1 && !entries.has_second) continue;
        const int entry = i == 0 ? entries.first : entries.second;
        const float value = x_at(entry), scaled = value * rstd;
        if (partial) partial[entry] += g[i][0] * (p.round_scaled ? round_to<T>(scaled) : scaled);
        if (tensor.out) {
          const float w = weight_at<T>(p, heads.weight, entry);
          out[entry * tensor.out_strides.entry] = from_float<T>(fmaf(-shift, value, rstd * (g[i][0] * w)));
        }
      }
    });
  }
}

}  // namespace liger
