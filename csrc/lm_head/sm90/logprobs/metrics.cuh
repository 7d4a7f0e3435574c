// SPDX-License-Identifier: BSD-3-Clause

// Two per-row results of fused_linear_logprobs, from sums of the logits GEMM:
//
//   log_sum_sq_probs   log(sum of p^2) = log(sum of E^2) - 2 log(sum of E), of the exponentials E
//   mean_logits        the mean over classes of the logits, which is linear in the hidden state:
//                      x . (sum of the rows of the weight) / classes / temperature
#pragma once

#include "device/reduce.cuh"
#include "lm_head/sm90/epilogues/common.cuh"

namespace liger::lm_head {

inline constexpr int kRowMetricThreads = 256;

// A result that is not requested is null, and so are its inputs.
template <typename T>
struct LogitMetrics {
  ChunkRows chunk;
  const int* index;  // of the valid rows of the chunk
  const float *sums, *square_sums;
  int columns;     // of both
  const T* input;  // (chunk.rows, hidden): the gathered rows
  int hidden;
  const float* class_sum;                 // (hidden): the sum of the rows of the weight
  float factor;                           // 1 / (classes * temperature)
  float *log_sum_sq_probs, *mean_logits;  // of the batch
};

// grid: rows of the chunk.
template <typename T>
__global__ void __launch_bounds__(kRowMetricThreads) logit_metrics(const LogitMetrics<T> p) {
  __shared__ float scratch[32];
  // The sum over a tile is at most kMaxRowSum^2 = 2^120, but the sum over all tiles may overflow without
  // kScale. The sum is at least 1, so no significant term underflows.
  constexpr float kScale = 0x1p-16f;
  const int row = blockIdx.x;
  if (row >= p.chunk()) return;
  const int source = p.index[row];
  if (p.log_sum_sq_probs != nullptr) {
    float sum = 0.0f, square_sum = 0.0f;
    for (int i = threadIdx.x; i < p.columns; i += kRowMetricThreads) {
      sum += p.sums[int64_t{row} * p.columns + i];
      square_sum = fmaf(p.square_sums[int64_t{row} * p.columns + i], kScale, square_sum);
    }
    sum = block_reduce<Sum>(sum, scratch);
    square_sum = block_reduce<Sum>(square_sum, scratch);
    // The logarithm of the ratio is exact where a difference of two large logarithms would cancel.
    if (threadIdx.x == 0) p.log_sum_sq_probs[source] = logf(square_sum / sum / sum / kScale);
  }
  if (p.mean_logits == nullptr) return;
  const uint4* const x = reinterpret_cast<const uint4*>(p.input + int64_t{row} * p.hidden);
  float dot = 0.0f;
  for (int i = threadIdx.x; i < p.hidden / 8; i += kRowMetricThreads) {
    const uint4 words = x[i];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const uint32_t word = (&words.x)[j];
      const float2 s = reinterpret_cast<const float2*>(p.class_sum + 8 * i)[j];
      dot = fmaf(low_of<T>(word), s.x, dot);
      dot = fmaf(high_of<T>(word), s.y, dot);
    }
  }
  dot = block_reduce<Sum>(dot, scratch);
  if (threadIdx.x == 0) p.mean_logits[source] = dot * p.factor;
}

}  // namespace liger::lm_head
