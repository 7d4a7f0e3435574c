// Mean and variance without cancellation: differences and their squares are taken from the mean of some of
// the values that they are summed over, so that both sums go through one exchange, and the results of parts
// are joined by their means and counts.
#pragma once

#include "device/reduce.cuh"
#include "device/vec.cuh"

namespace liger {

struct Moments {
  float mean;
  float squares;  // sum of the squared differences from the mean
};

// Of `count` values: sum and squares are those of their differences from shift. What is lost is at most
// count * (mean - shift)^2 / squares times the rounding of the sums; shift being the mean of n of the values,
// that is at most count / n, and next to nothing unless those n are what the variance consists of.
__device__ __forceinline__ Moments shifted_moments(float shift, float sum, float squares,
                                                   float inverse_count) {
  const float apart = sum * inverse_count;
  return {shift + apart, fmaxf(fmaf(-sum, apart, squares), 0.0f)};
}

template <typename T, int N>
__device__ __forceinline__ float mean_of(const Vec<T, N>& x) {
  float value[N], sum = 0.0f;
  unpack(x, value);
#pragma unroll
  for (int i = 0; i < N; ++i) sum = fmaf(value[i], 1.0f / N, sum);
  return sum;
}

// Of differences from a shift, and of their squares.
struct ShiftedSums {
  float sum = 0.0f, squares = 0.0f;

  template <typename T, int N>
  __device__ __forceinline__ void add(const Vec<T, N>& x, float shift) {
    float value[N];
    unpack(x, value);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const float apart = value[i] - shift;
      sum += apart;
      squares = fmaf(apart, apart, squares);
    }
  }
};

// Of any number of vectors, one after another. Half types: from the mean of the first one; float32: each
// about its own mean, joined to those before, which loses nothing whatever the first one is.
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
      const float own_mean = mean_of(x), apart = own_mean - mean;
      own.add(x, own_mean);
      const float share = 1.0f / static_cast<float>(vectors);
      mean = fmaf(apart, share, mean);
      sums.squares += fmaf(apart * apart, N * (1.0f - share), own.squares);
    }
  }
  __device__ __forceinline__ float count() const { return static_cast<float>(vectors * N); }
  __device__ __forceinline__ Moments result() const {
    if constexpr (sizeof(T) == 4) return {mean, sums.squares};
    return shifted_moments(mean, sums.sum, sums.squares, 1.0f / fmaxf(count(), 1.0f));
  }
};

// Of the values that `lanes` neighbouring threads of a warp hold, a power of two of them. Half types take one
// round of shuffles, the differences being those from the mean of a vector of the first of the threads, which
// holds one if any does; float32 takes two, since what that loses is below the rounding of half types only.
template <typename T, int N, int V, typename Held>
__device__ __forceinline__ Moments lane_moments(const Vec<T, N> (&x)[V], const Held& held, int lanes,
                                                float inverse_count) {
  float shift;
  if constexpr (sizeof(T) == 2) {
    shift = __shfl_sync(0xffffffffu, held(0) ? mean_of(x[0]) : 0.0f, 0, lanes);
  } else {
    shift = 0.0f;
#pragma unroll
    for (int j = 0; j < V; ++j) {
      if (held(j)) shift = fmaf(mean_of(x[j]), N, shift);
    }
    for (int offset = lanes / 2; offset > 0; offset /= 2)
      shift += __shfl_xor_sync(0xffffffffu, shift, offset);
    shift *= inverse_count;
  }
  ShiftedSums sums;
#pragma unroll
  for (int j = 0; j < V; ++j) {
    if (held(j)) sums.add(x[j], shift);
  }
  for (int offset = lanes / 2; offset > 0; offset /= 2) {
    sums.sum += __shfl_xor_sync(0xffffffffu, sums.sum, offset);
    sums.squares += __shfl_xor_sync(0xffffffffu, sums.squares, offset);
  }
  return shifted_moments(shift, sums.sum, sums.squares, inverse_count);
}

// Aligned for the stores of a meeting.
struct alignas(16) PartMoments {
  float count, mean, squares;
};

// What the lanes of a warp add to the moments of all parts together; `first` is the mean of a part that has
// values.
struct JoinedSums {
  float first, sum = 0.0f, squares = 0.0f;

  __device__ __forceinline__ explicit JoinedSums(float first) : first(first) {}
  __device__ __forceinline__ void add(const PartMoments& part) {
    const float apart = part.mean - first, weighted = part.count * apart;
    sum += weighted;
    squares += fmaf(weighted, apart, part.squares);
  }
  __device__ __forceinline__ Moments of_warp(float inverse_count) {
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) {
      sum += __shfl_xor_sync(0xffffffffu, sum, offset);
      squares += __shfl_xor_sync(0xffffffffu, squares, offset);
    }
    return shifted_moments(first, sum, squares, inverse_count);
  }
};

// Of the values that a block of whole warps holds, with one exchange: each warp has a mean of its own.
// scratch is for this call alone.
template <typename T, int N, int V, typename Held>
__device__ __forceinline__ Moments block_moments(const Vec<T, N> (&x)[V], const Held& held,
                                                 float inverse_count, PartMoments (&scratch)[32]) {
  int vectors = 0;
#pragma unroll
  for (int j = 0; j < V; ++j) vectors += __popc(__ballot_sync(0xffffffffu, held(j)));
  const float own = static_cast<float>(vectors * N);
  const Moments of_warp = lane_moments(x, held, 32, 1.0f / fmaxf(own, 1.0f));
  const int lane = threadIdx.x % 32, warps = blockDim.x / 32;
  if (warps == 1) return of_warp;
  if (lane == 0) scratch[threadIdx.x / 32] = {own, of_warp.mean, of_warp.squares};
  __syncthreads();
  JoinedSums sums(scratch[0].mean);
  if (lane < warps) sums.add(scratch[lane]);
  return sums.of_warp(inverse_count);
}

// Of a row from those of its `parts` parts, each of `part_size` values but the last one, by all threads of a
// block. scratch: as block_reduce() asks.
__device__ __forceinline__ Moments join_parts(const Moments* of_parts, int parts, int64_t part_size,
                                              int64_t count, float* scratch) {
  const auto size_of = [&](int part) { return static_cast<float>(min(part_size, count - part * part_size)); };
  float sum = 0.0f;
  for (int part = threadIdx.x; part < parts; part += blockDim.x)
    sum = fmaf(size_of(part) / static_cast<float>(count), of_parts[part].mean, sum);
  const float mean = block_reduce<Sum>(sum, scratch);
  float squares = 0.0f;
  for (int part = threadIdx.x; part < parts; part += blockDim.x) {
    const float apart = of_parts[part].mean - mean;
    squares += fmaf(size_of(part) * apart, apart, of_parts[part].squares);
  }
  return {mean, block_reduce<Sum>(squares, scratch)};
}

}  // namespace liger
