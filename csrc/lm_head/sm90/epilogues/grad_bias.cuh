// SPDX-License-Identifier: BSD-3-Clause

// The gradient of the bias: for each class the sum over rows of the scaled exponentials, minus one-hot and
// smoothing terms.
#pragma once

#include "device/reduce.cuh"
#include "lm_head/sm90/epilogues/common.cuh"

namespace liger::lm_head {

template <typename T>
struct GradBias {
  ChunkRows chunk;
  int vocab;
  const float* scale;         // of the rows of the chunk
  const OneHot* one_hot;      // per class
  const float* smoothing;     // coefficients of the rows; null without label smoothing
  const float* class_weight;  // null for ones
  bool first, last;           // chunk
  float* total;               // (vocab)
  T* out;                     // (vocab), written by the last chunk

  // The sum of `smoothing`: each of `threads` threads sums a part, and reduce() adds the parts.
  template <class Reduce>
  __device__ __forceinline__ float sum_of_smoothing(int thread, int threads, const Reduce& reduce) const {
    if (smoothing == nullptr) return 0.0f;
    float sum = 0.0f;
    for (int row = thread, rows = chunk(); row < rows; row += threads) sum += smoothing[row];
    return reduce(sum);
  }
  // Adds the sum of a chunk to the gradient of a class. coefficient: the sum of `smoothing`.
  __device__ __forceinline__ void add(int column, float sum, float coefficient) const {
    if (!first) sum += total[column];
    const OneHot target = one_hot[column];
    if (target.index >= 0) sum -= target.amount;
    if (smoothing != nullptr) sum -= coefficient * (class_weight != nullptr ? class_weight[column] : 1.0f);
    total[column] = sum;
    if (last) out[column] = from_float<T>(sum);
  }
};

// Computes the sums where the GEMM of the weight gradient does not: if there is no weight gradient, and in
// float16. One block per panel.
template <typename T>
__global__ void __launch_bounds__(kRowThreads) add_grad_bias(const GradBias<T> p, const Panels exponentials) {
  constexpr int kVectors = sm90::kPanel / 8, kRows = kRowThreads / kVectors;
  __shared__ float sums[kRows][sm90::kPanel];
  __shared__ float scratch[32];
  const int vector = threadIdx.x % kVectors, group = threadIdx.x / kVectors, rows = p.chunk();
  const int first_column = blockIdx.x * sm90::kPanel;
  float sum[8] = {};
#pragma unroll 4
  for (int row = group; row < rows; row += kRows) {
    const uint4 words = *reinterpret_cast<const uint4*>(exponentials.at(row, first_column + 8 * vector));
    add_scaled<T>(sum, p.scale[row], words);
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) sums[group][8 * vector + i] = sum[i];
  const float coefficient = p.sum_of_smoothing(threadIdx.x, kRowThreads,
                                               [&](float sum) { return block_reduce<Sum>(sum, scratch); });
  __syncthreads();
  const int column = first_column + threadIdx.x;
  if (threadIdx.x >= sm90::kPanel || column >= p.vocab) return;
  float total = 0.0f;
#pragma unroll
  for (int i = 0; i < kRows; ++i) total += sums[i][threadIdx.x];
  p.add(column, total, coefficient);
}

}  // namespace liger::lm_head
