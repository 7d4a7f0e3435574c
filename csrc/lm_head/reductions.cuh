// SPDX-License-Identifier: BSD-3-Clause

// Reductions of the generic engine: column sums for the bias gradient, and rounding of accumulated gradients.
#pragma once

#include "device/vec.cuh"

namespace liger::lm_head {

inline constexpr int kColumnWarps = 8;
inline constexpr int kRoundThreads = 256;

// total[v] (+)= sum over rows of x[row, v], in a fixed order; the last call also writes it, rounded, to out.
// A row of x occupies a multiple of 16 bytes, so whole vectors may be read past the last column.
// grid: ceil(columns / (32 * kVec)); block: (32, kColumnWarps).
template <typename T>
__global__ void __launch_bounds__(32 * kColumnWarps)
    sum_columns(const T* x, int64_t row_stride, int rows, int columns, float* total, bool first, T* out) {
  constexpr int N = kVec<T>;
  __shared__ float partial[kColumnWarps][32 * N];
  const int64_t column = (static_cast<int64_t>(blockIdx.x) * 32 + threadIdx.x) * N;
  float sum[N] = {};
  if (column < columns) {
#pragma unroll 4
    for (int row = threadIdx.y; row < rows; row += kColumnWarps) {
      const Vec<T, N> raw = load<T, N>(x + row * row_stride + column);
#pragma unroll
      for (int i = 0; i < N; ++i) sum[i] += to_float(raw.v[i]);
    }
  }
#pragma unroll
  for (int i = 0; i < N; ++i) partial[threadIdx.y][i * 32 + threadIdx.x] = sum[i];
  __syncthreads();
  for (int i = threadIdx.y; i < N; i += kColumnWarps) {
    const int64_t v = column + i;
    if (v >= columns) continue;
    float s = first ? 0.0f : total[v];
#pragma unroll
    for (int warp = 0; warp < kColumnWarps; ++warp) s += partial[warp][i * 32 + threadIdx.x];
    total[v] = s;
    if (out != nullptr) out[v] = from_float<T>(s);
  }
}

// out = x, rounded. Both start at a multiple of 16 bytes.
template <typename T>
__global__ void __launch_bounds__(kRoundThreads) round_sum(const float* x, T* out, int64_t size) {
  constexpr int N = kVec<T>;
  const int64_t start = (static_cast<int64_t>(blockIdx.x) * kRoundThreads + threadIdx.x) * N;
  if (start + N <= size) {
    Vec<T, N> y;
#pragma unroll
    for (int i = 0; i < N; i += 4) {
      const Vec<float, 4> part = load_streaming<float, 4>(x + start + i);
#pragma unroll
      for (int j = 0; j < 4; ++j) y.v[i + j] = from_float<T>(part.v[j]);
    }
    store(out + start, y);
  } else {
    for (int64_t i = start; i < size; ++i) out[i] = from_float<T>(x[i]);
  }
}

}  // namespace liger::lm_head
