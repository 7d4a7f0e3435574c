// Mean and variance without cancellation: the squared differences are summed from the mean of those values
// that they are summed over, and the results of parts are joined by their means and counts.
#pragma once

#include "common/reduce.cuh"
#include "common/vec.cuh"

namespace liger {

struct Moments {
  float mean;
  float squares;  // sum of the squared differences from the mean
};

template <typename T, int N, int V, typename Held>
__device__ __forceinline__ float sum_held(const Vec<T, N> (&x)[V], const Held& held) {
  float sum = 0.0f;
#pragma unroll
  for (int j = 0; j < V; ++j) {
    if (!held(j)) continue;
    float value[N];
    unpack(x[j], value);
#pragma unroll
    for (int i = 0; i < N; ++i) sum += value[i];
  }
  return sum;
}

template <typename T, int N, int V, typename Held>
__device__ __forceinline__ float sum_squares_held(const Vec<T, N> (&x)[V], const Held& held, float mean) {
  float sum = 0.0f;
#pragma unroll
  for (int j = 0; j < V; ++j) {
    if (!held(j)) continue;
    float value[N];
    unpack(x[j], value);
#pragma unroll
    for (int i = 0; i < N; ++i) sum = fmaf(value[i] - mean, value[i] - mean, sum);
  }
  return sum;
}

// Of `count` values that `lanes` neighbouring threads of a warp hold, a power of two of them.
template <typename T, int N, int V, typename Held>
__device__ __forceinline__ Moments lane_moments(const Vec<T, N> (&x)[V], const Held& held, int lanes,
                                                float count) {
  float mean = sum_held(x, held);
  for (int offset = lanes / 2; offset > 0; offset /= 2) mean += __shfl_xor_sync(0xffffffffu, mean, offset);
  mean /= count;
  float squares = sum_squares_held(x, held, mean);
  for (int offset = lanes / 2; offset > 0; offset /= 2)
    squares += __shfl_xor_sync(0xffffffffu, squares, offset);
  return {mean, squares};
}

struct WarpMoments {
  float count, mean, squares;
};

// Of `count` values that a block of whole warps holds, with one exchange: each warp has a mean of its own.
// scratch is for this call alone.
template <typename T, int N, int V, typename Held>
__device__ __forceinline__ Moments block_moments(const Vec<T, N> (&x)[V], const Held& held, float count,
                                                 WarpMoments (&scratch)[32]) {
  int vectors = 0;
#pragma unroll
  for (int j = 0; j < V; ++j) vectors += __popc(__ballot_sync(0xffffffffu, held(j)));
  const float own = static_cast<float>(vectors * N);
  const Moments of_warp = lane_moments(x, held, 32, fmaxf(own, 1.0f));
  const int lane = threadIdx.x % 32, warps = blockDim.x / 32;
  if (warps == 1) return of_warp;
  if (lane == 0) scratch[threadIdx.x / 32] = {own, of_warp.mean, of_warp.squares};
  __syncthreads();
  const WarpMoments other = lane < warps ? scratch[lane] : WarpMoments{};
  const float mean = warp_reduce<Sum>(other.count * other.mean) / count;
  const float apart = other.mean - mean;
  return {mean, warp_reduce<Sum>(fmaf(other.count * apart, apart, other.squares))};
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
