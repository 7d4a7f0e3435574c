// What the threads of a row of softmax, and of its gradient, find out about it, and how that is merged.
#pragma once

#include "device/exp2.cuh"
#include "device/reduce.cuh"
#include "device/vec.cuh"

namespace liger {

template <typename T>
__device__ __forceinline__ float softmax_exp(float x) {
  return sizeof(T) == 4 ? expf(x) : exp2_fast(x * kLog2e);
}

// The largest value so far, and the sum of exp(value - max). As long as there was nothing but -inf, it is 0.
template <typename T>
struct alignas(8) SoftmaxStats {
  float max = -INFINITY, sum = 0.0f;

  // So that nothing is inf - inf.
  __device__ __forceinline__ float reference() const { return max == -INFINITY ? 0.0f : max; }
  // Rare after the first vectors.
  __device__ __forceinline__ void raise(float next) {
    if (next == max) return;
    const float before = max;
    max = next;
    sum *= softmax_exp<T>(before - reference());
  }
  // Vectors of x at once: one comparison with the maximum for all of them.
  template <int N, int U>
  __device__ __forceinline__ void add(const Vec<T, N> (&x)[U]) {
    float next = max, values[N];
#pragma unroll
    for (int u = 0; u < U; ++u) {
      unpack(x[u], values);
#pragma unroll
      for (int i = 0; i < N; ++i) next = fmaxf(next, values[i]);
    }
    raise(next);
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
    raise(next);
    other.raise(next);
    sum += other.sum;
  }
  __device__ __forceinline__ void merge_warp() {
    raise(warp_reduce<Max>(max));
    sum = warp_reduce<Sum>(sum);
  }
};

// The sum of grad_y * y.
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

// y becomes grad_x.
template <typename T, int N>
__device__ __forceinline__ void softmax_grad(const Vec<T, N>& grad_y, Vec<T, N>& y, float dot) {
  float g[N], values[N];
  unpack(grad_y, g);
  unpack(y, values);
#pragma unroll
  for (int i = 0; i < N; ++i) values[i] *= g[i] - dot;
  y = pack<T, N>(values);
}

template <typename Stats>
__device__ __forceinline__ void merge_slots(Stats& stats, const Stats* slots, int count) {
  stats = {};
  for (int i = threadIdx.x % 32; i < count; i += 32) stats.merge(slots[i]);
  stats.merge_warp();
}

// Merges what the threads of a block have. slots: one for each warp, in shared memory.
template <typename Stats>
__device__ __forceinline__ void merge_block(Stats& stats, Stats* slots) {
  stats.merge_warp();
  if (threadIdx.x % 32 == 0) slots[threadIdx.x / 32] = stats;
  __syncthreads();
  merge_slots(stats, slots, blockDim.x / 32);
}

}  // namespace liger
