// SPDX-License-Identifier: BSD-3-Clause

// Row statistics of softmax (online maximum and sum) and of its gradient (a dot product), and their reduction
// over a warp, a block or a set of slots. Every merge runs in a fixed order, so results are deterministic.
#pragma once

#include "device/exp2.cuh"
#include "device/reduce.cuh"
#include "device/vec.cuh"

namespace liger {

template <typename T>
__device__ __forceinline__ float softmax_exp(float x) {
  return sizeof(T) == 4 ? expf(x) : exp2_fast(x * kLog2e);
}

// Online softmax: the running maximum and the sum of exp(value - max), which is 0 while all values were -inf.
template <typename T>
struct alignas(8) SoftmaxStats {
  float max = -INFINITY, sum = 0.0f;

  // The shift of the exponentials; finite, because -inf - -inf would be nan.
  __device__ __forceinline__ float reference() const { return max == -INFINITY ? 0.0f : max; }
  // Rescales the sum to a larger maximum. The maximum rarely changes after the first vectors.
  __device__ __forceinline__ void rescale(float next) {
    if (next == max) return;
    const float before = max;
    max = next;
    sum *= softmax_exp<T>(before - reference());
  }
  // Adds U vectors at once, so that the running maximum is compared only once.
  template <int N, int U>
  __device__ __forceinline__ void add(const Vec<T, N> (&x)[U]) {
    float next = max, values[N];
#pragma unroll
    for (int u = 0; u < U; ++u) {
      unpack(x[u], values);
#pragma unroll
      for (int i = 0; i < N; ++i) next = fmaxf(next, values[i]);
    }
    rescale(next);
    const float shift = reference();
#pragma unroll
    for (int u = 0; u < U; ++u) {
      unpack(x[u], values);
#pragma unroll
      for (int i = 0; i < N; ++i) sum += softmax_exp<T>(values[i] - shift);
    }
  }
  __device__ __forceinline__ void merge(SoftmaxStats other) {
    const float next = fmaxf(max, other.max);
    rescale(next);
    other.rescale(next);
    sum += other.sum;
  }
  __device__ __forceinline__ void merge_warp() {
    rescale(warp_reduce<Max>(max));
    sum = warp_reduce<Sum>(sum);
  }
};

// The sum of grad_y * y of a row.
struct DotProduct {
  float sum = 0.0f;

  __device__ __forceinline__ void merge(const DotProduct& other) { sum += other.sum; }
  __device__ __forceinline__ void merge_warp() { sum = warp_reduce<Sum>(sum); }
};

template <typename T, int N>
__device__ __forceinline__ float dot_product(const Vec<T, N>& a, const Vec<T, N>& b, float sum) {
  float x[N], y[N];
  unpack(a, x);
  unpack(b, y);
#pragma unroll
  for (int i = 0; i < N; ++i) sum = fmaf(x[i], y[i], sum);
  return sum;
}

// Overwrites y with grad_x = y * (grad_y - dot).
template <typename T, int N>
__device__ __forceinline__ void softmax_grad(const Vec<T, N>& grad_y, Vec<T, N>& y, float dot) {
  float g[N], values[N];
  unpack(grad_y, g);
  unpack(y, values);
#pragma unroll
  for (int i = 0; i < N; ++i) values[i] *= g[i] - dot;
  y = pack<T, N>(values);
}

// Merges `count` slots; every lane gets the result.
template <typename Stats>
__device__ __forceinline__ void merge_slots(Stats& stats, const Stats* slots, int count) {
  stats = {};
  for (int i = threadIdx.x % 32; i < count; i += 32) stats.merge(slots[i]);
  stats.merge_warp();
}

// Merges the statistics of all threads of a block; every thread gets the result. slots: one per warp, in
// shared memory.
template <typename Stats>
__device__ __forceinline__ void merge_block(Stats& stats, Stats* slots) {
  stats.merge_warp();
  if (threadIdx.x % 32 == 0) slots[threadIdx.x / 32] = stats;
  __syncthreads();
  merge_slots(stats, slots, blockDim.x / 32);
}

}  // namespace liger
