// SPDX-License-Identifier: BSD-3-Clause

// GroupNorm forward (norm/moment_norm.cuh): a row is one group of channels of one sample, with one weight and
// bias per channel.
#pragma once

#include "device/fast_divide.h"
#include "norm/moment_norm.cuh"
#include "norm/parameters.cuh"

namespace liger {

// n / divisor, through FastDivide if all n are below 2^31.
struct ChannelDivide {
  int64_t divisor;
  bool small;
  FastDivide fast;

  ChannelDivide() = default;
  ChannelDivide(int64_t divisor, int64_t numbers)
      : divisor(divisor),
        small(numbers < int64_t{1} << 31),
        fast(small ? static_cast<uint32_t>(divisor) : 1) {}

  __device__ __forceinline__ int quotient(int n) const {
    return static_cast<int>(fast.quotient(static_cast<uint32_t>(n)));
  }
  __device__ __forceinline__ int64_t quotient(int64_t n) const {
    return small ? fast.quotient(static_cast<uint32_t>(n)) : n / divisor;
  }
};

struct ChannelAffine {
  const void *weight, *bias;  // may be null
  bool is_float;
  int64_t channels_per_group;
  ChannelDivide groups;   // row / groups per sample = sample
  ChannelDivide vectors;  // vector / vectors per channel = channel in the group

  // The weight and the bias of the channel of a vector.
  template <typename T, typename Index>
  __device__ __forceinline__ float2 at(int64_t row, Index vector) const {
    const int64_t group = row - groups.quotient(row) * groups.divisor;
    const int64_t channel = group * channels_per_group + vectors.quotient(vector);
    float w[1], b[1];
    load_parameter<T, 1>(weight, is_float, 0.0f, 1.0f, channel, w);
    load_parameter<T, 1>(bias, is_float, 0.0f, 0.0f, channel, b);
    return {w[0], b[0]};
  }

  template <typename T, int N, int V>
  struct Fragment {
    static constexpr bool kPrefetch = V <= 4;  // eight vectors leave no registers for it
    float2 prefetched[kPrefetch ? V : 1];

    template <typename Index>
    __device__ __forceinline__ void prefetch(const ChannelAffine& affine, int j, int64_t row, Index vector) {
      if constexpr (kPrefetch) prefetched[j] = affine.at<T>(row, vector);
    }

    template <typename Index>
    __device__ __forceinline__ void apply(const ChannelAffine& affine, int j, int64_t row, Index vector,
                                          float (&values)[N]) const {
      const float2 parameters = kPrefetch ? prefetched[kPrefetch ? j : 0] : affine.at<T>(row, vector);
#pragma unroll
      for (int i = 0; i < N; ++i) values[i] = fmaf(values[i], parameters.x, parameters.y);
    }
  };
};

using GroupNorm = MomentNorm<OneStride, ChannelAffine>;

// vectorised: every channel is aligned to 16 bytes, and the spatial size is a multiple of kVec<T>.
template <typename T>
void launch_group_norm(const GroupNorm& p, bool vectorised, int chunks, cudaStream_t stream) {
  if (chunks > 0) {
    vectorised ? launch_moment_norm_chunks<T, kVec<T>>(p, chunks, stream)
               : launch_moment_norm_chunks<T, 1>(p, chunks, stream);
  } else {
    vectorised ? launch_moment_norm_rows<T, kVec<T>>(p, stream) : launch_moment_norm_rows<T, 1>(p, stream);
  }
}

}  // namespace liger
