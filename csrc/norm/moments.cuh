// SPDX-License-Identifier: BSD-3-Clause

// Mean and variance without cancellation, as shifted sums: the differences are taken from a shift close to
// the mean. One reduction computes the sum of differences and the sum of their squares. Partial results are
// combined from their counts, means and squared deviations (the parallel form of Welford's algorithm).
#pragma once

#include "device/reduce.cuh"
#include "device/vec.cuh"

namespace liger {

struct Moments {
  float mean;
  float squares;  // sum of the squared deviations from the mean
};

// Computes the moments of `count` values from the sum of their differences from `shift` and the sum of the
// squared differences. The relative error of the sums is amplified by at most count * (mean - shift)^2 /
// squares. If shift is the mean of n of the values, that factor is at most count / n, and small unless the
// variance is mainly due to these n values.
__device__ __forceinline__ Moments shifted_moments(float shift, float sum, float squares,
                                                   float inverse_count) {
  const float delta = sum * inverse_count;
  const float centred = fmaf(-sum, delta, squares);
  // fmaxf would replace the NaN of a row with infinities by 0.
  return {shift + delta, centred < 0.0f ? 0.0f : centred};
}

template <typename T, int N>
__device__ __forceinline__ float mean_of(const Vec<T, N>& x) {
  float value[N], sum = 0.0f;
  unpack(x, value);
#pragma unroll
  for (int i = 0; i < N; ++i) sum = fmaf(value[i], 1.0f / N, sum);
  return sum;
}

// Sums of the differences from a shift, and of their squares.
struct ShiftedSums {
  float sum = 0.0f, squares = 0.0f;

  template <typename T, int N>
  __device__ __forceinline__ void add(const Vec<T, N>& x, float shift) {
    float value[N];
    unpack(x, value);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const float delta = value[i] - shift;
      sum += delta;
      squares = fmaf(delta, delta, squares);
    }
  }
};

// The moments of any number of vectors, added one by one. Half types: sums shifted by the mean of the first
// vector. float32: the moments of each vector about its own mean are combined with the moments so far
// (Welford), which is accurate for any first vector.
template <typename T, int N>
struct RunningMoments {
  int vectors = 0;
  float mean = 0.0f;
  ShiftedSums sums;

  __device__ __forceinline__ void add(const Vec<T, N>& x) {
    ++vectors;
    if constexpr (sizeof(T) == 2) {
      if (vectors == 1) mean = mean_of(x);
      sums.add(x, mean);
    } else {
      ShiftedSums own;
      const float own_mean = mean_of(x), delta = own_mean - mean;
      own.add(x, own_mean);
      const float fraction = 1.0f / static_cast<float>(vectors);
      mean = fmaf(delta, fraction, mean);
      sums.squares += fmaf(delta * delta, N * (1.0f - fraction), own.squares);
    }
  }
  __device__ __forceinline__ float count() const { return static_cast<float>(vectors * N); }
  __device__ __forceinline__ Moments result() const {
    if constexpr (sizeof(T) == 4) return {mean, sums.squares};
    return shifted_moments(mean, sums.sum, sums.squares, 1.0f / fmaxf(count(), 1.0f));
  }
};

// The moments of the values in the registers of `lanes` consecutive threads of a warp, a power of two. Half
// types: one round of shuffles, with sums shifted by the mean of the first thread's first vector (if any
// thread has a vector, the first thread has one). float32: two rounds, the first for the mean, because the
// error of the shifted sums is below the rounding of half types only.
template <typename T, int N, int V, typename InRow>
__device__ __forceinline__ Moments lane_moments(const Vec<T, N> (&x)[V], const InRow& in_row, int lanes,
                                                float inverse_count) {
  float shift;
  if constexpr (sizeof(T) == 2) {
    shift = __shfl_sync(0xffffffffu, in_row(0) ? mean_of(x[0]) : 0.0f, 0, lanes);
  } else {
    shift = 0.0f;
#pragma unroll
    for (int j = 0; j < V; ++j) {
      if (in_row(j)) shift = fmaf(mean_of(x[j]), N, shift);
    }
    for (int offset = lanes / 2; offset > 0; offset /= 2)
      shift += __shfl_xor_sync(0xffffffffu, shift, offset);
    shift *= inverse_count;
  }
  ShiftedSums sums;
#pragma unroll
  for (int j = 0; j < V; ++j) {
    if (in_row(j)) sums.add(x[j], shift);
  }
  for (int offset = lanes / 2; offset > 0; offset /= 2) {
    sums.sum += __shfl_xor_sync(0xffffffffu, sums.sum, offset);
    sums.squares += __shfl_xor_sync(0xffffffffu, sums.squares, offset);
  }
  return shifted_moments(shift, sums.sum, sums.squares, inverse_count);
}

// The partial result of a warp. Aligned for ClusterReduce.
struct alignas(16) PartialMoments {
  float count, mean, squares;
};

// Combines partial results in one warp: each lane adds some, then reduce_warp() gives every lane the moments
// of all. shift: the mean of one partial result that has values.
struct MomentReduction {
  float shift, sum = 0.0f, squares = 0.0f;

  __device__ __forceinline__ explicit MomentReduction(float shift) : shift(shift) {}
  __device__ __forceinline__ void add(const PartialMoments& partial) {
    const float delta = partial.mean - shift, weighted = partial.count * delta;
    sum += weighted;
    squares += fmaf(weighted, delta, partial.squares);
  }
  __device__ __forceinline__ Moments reduce_warp(float inverse_count) {
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) {
      sum += __shfl_xor_sync(0xffffffffu, sum, offset);
      squares += __shfl_xor_sync(0xffffffffu, squares, offset);
    }
    return shifted_moments(shift, sum, squares, inverse_count);
  }
};

// The moments of the values in the registers of a block; its size is a multiple of 32. Each warp has its
// own shift, so one exchange between warps is enough. No earlier call may still use the scratch.
template <typename T, int N, int V, typename InRow>
__device__ __forceinline__ Moments block_moments(const Vec<T, N> (&x)[V], const InRow& in_row,
                                                 float inverse_count, PartialMoments (&scratch)[32]) {
  int vectors = 0;
#pragma unroll
  for (int j = 0; j < V; ++j) vectors += __popc(__ballot_sync(0xffffffffu, in_row(j)));
  const float count = static_cast<float>(vectors * N);
  const Moments warp_moments = lane_moments(x, in_row, 32, 1.0f / fmaxf(count, 1.0f));
  const int lane = threadIdx.x % 32, warps = blockDim.x / 32;
  if (warps == 1) return warp_moments;
  if (lane == 0) scratch[threadIdx.x / 32] = {count, warp_moments.mean, warp_moments.squares};
  __syncthreads();
  MomentReduction sums(scratch[0].mean);
  if (lane < warps) sums.add(scratch[lane]);
  return sums.reduce_warp(inverse_count);
}

// Combines the moments of chunks to the moments of a row of `count` values. All chunks but the last have
// chunk_size values. All threads of a block call it. scratch: as for block_reduce().
__device__ __forceinline__ Moments combine_chunks(const Moments* chunk_moments, int chunks,
                                                  int64_t chunk_size, int64_t count, float* scratch) {
  const auto size = [&](int chunk) {
    return static_cast<float>(min(chunk_size, count - chunk * chunk_size));
  };
  float sum = 0.0f;
  for (int chunk = threadIdx.x; chunk < chunks; chunk += blockDim.x)
    sum = fmaf(size(chunk) / static_cast<float>(count), chunk_moments[chunk].mean, sum);
  const float mean = block_reduce<Sum>(sum, scratch);
  float squares = 0.0f;
  for (int chunk = threadIdx.x; chunk < chunks; chunk += blockDim.x) {
    const float delta = chunk_moments[chunk].mean - mean;
    squares += fmaf(size(chunk) * delta, delta, chunk_moments[chunk].squares);
  }
  return {mean, block_reduce<Sum>(squares, scratch)};
}

}  // namespace liger
