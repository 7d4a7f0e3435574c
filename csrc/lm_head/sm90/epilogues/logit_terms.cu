// SPDX-License-Identifier: BSD-3-Clause
#include "lm_head/sm90/epilogues/logit_terms.cuh"

#include "device/integers.h"
#include "device/reduce.cuh"
#include "device/vec.cuh"
#include "host/torch.h"
#include "lm_head/fused_linear_ce.h"

namespace liger::lm_head {
namespace {

constexpr const char* kOp = FusedLinearCe::kOp;
constexpr int kSumThreads = 256, kSumColumns = 256, kSplits = 64;

// partial[split][column] = the sum of a split. grid: (ceil(columns / kSumColumns), kSplits).
template <typename T>
__global__ void __launch_bounds__(kSumThreads) sum_rows(const RowSums<T> p) {
  constexpr int kLanes = kSumColumns / 8, kRows = kSumThreads / kLanes;
  __shared__ float sums[kRows][kSumColumns];
  const int lane = threadIdx.x % kLanes, group = threadIdx.x / kLanes;
  const int column = blockIdx.x * kSumColumns + 8 * lane;
  const int64_t rows = p.count != nullptr ? max(int64_t{0}, min(p.rows, *p.count - p.first)) : p.rows;
  const int64_t per_split = ceil_div(rows, int64_t{kSplits});
  const int64_t begin = blockIdx.y * per_split, end = min(begin + per_split, rows);
  float sum[8] = {};
  if (column < p.columns) {
#pragma unroll 4
    for (int64_t row = begin + group; row < end; row += kRows) {
      const int64_t source = p.index != nullptr ? p.index[row] : row;
      const float amount = p.amount != nullptr ? p.amount[row] : 1.0f;
      const uint4 words = *reinterpret_cast<const uint4*>(p.matrix + source * p.stride + column);
      add_scaled<T>(sum, amount, words);
    }
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) sums[group][8 * lane + i] = sum[i];
  __syncthreads();
  static_assert(kSumThreads == kSumColumns, "a thread sums a column");
  float total = 0.0f;
#pragma unroll
  for (int i = 0; i < kRows; ++i) total += sums[i][threadIdx.x];
  p.partial[(int64_t{blockIdx.y} * gridDim.x + blockIdx.x) * kSumColumns + threadIdx.x] = total;
}

// vector[column] = the sum over the splits. grid: ceil(columns / kSumColumns).
__global__ void __launch_bounds__(kSumColumns) sum_splits(const float* partial, float* vector) {
  const int64_t column = int64_t{blockIdx.x} * kSumColumns + threadIdx.x;
  const int64_t stride = int64_t{gridDim.x} * kSumColumns;
  float total = 0.0f;
#pragma unroll 8
  for (int split = 0; split < kSplits; ++split) total += partial[split * stride + column];
  vector[column] = total;
}

constexpr int kBiasThreads = 1024;

// Launched with one block.
template <typename T>
__global__ void __launch_bounds__(kBiasThreads) largest_bias(const BiasTerms<T> p) {
  __shared__ float scratch[32];
  float largest = -INFINITY;
#pragma unroll 8
  for (int64_t i = threadIdx.x; i < p.vocab; i += kBiasThreads) largest = fmaxf(largest, to_float(p.bias[i]));
  largest = block_reduce<Max>(largest, scratch);
  // Differences from an infinite offset would be NaN.
  if (threadIdx.x == 0) *p.offset = fabsf(largest) < INFINITY ? largest : 0.0f;
}

// One thread per element of padded.
template <typename T>
__global__ void __launch_bounds__(kSumThreads) widen_bias(const BiasTerms<T> p) {
  const int64_t i = int64_t{blockIdx.x} * kSumThreads + threadIdx.x;
  const float offset = p.offset != nullptr ? *p.offset : 0.0f;
  if (i < p.padded_size) p.padded[i] = i < p.vocab ? to_float(p.bias[i]) - offset : 0.0f;
}

// Launched with one block, which fixes the order.
template <typename T>
__global__ void __launch_bounds__(kBiasThreads) sum_bias(const BiasTerms<T> p) {
  __shared__ float scratch[32];
  float total = 0.0f;
  for (int64_t i = threadIdx.x; i < p.vocab; i += kBiasThreads) {
    const float bias = p.padded[i];
    total += p.class_weight != nullptr ? p.class_weight[i] * bias : bias;
  }
  total = block_reduce<Sum>(total, scratch);
  if (threadIdx.x == 0) *p.weighted_sum = total;
}

}  // namespace

int64_t row_sum_elements(int64_t columns) {
  return kSplits * round_up(columns, int64_t{kSumColumns});
}

template <typename T>
void launch_row_sums(const RowSums<T>& sums, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>(ceil_div(sums.columns, int64_t{kSumColumns}));
  sum_rows<<<dim3(blocks, kSplits), kSumThreads, 0, stream>>>(sums);
  check_launch(kOp);
  sum_splits<<<blocks, kSumColumns, 0, stream>>>(sums.partial, sums.vector);
  check_launch(kOp);
}

template <typename T>
void launch_bias_terms(const BiasTerms<T>& terms, cudaStream_t stream) {
  if (terms.offset != nullptr) {
    largest_bias<<<1, kBiasThreads, 0, stream>>>(terms);
    check_launch(kOp);
  }
  widen_bias<<<static_cast<unsigned>(ceil_div(terms.padded_size, int64_t{kSumThreads})), kSumThreads, 0,
               stream>>>(terms);
  check_launch(kOp);
  if (terms.weighted_sum == nullptr) return;
  sum_bias<<<1, kBiasThreads, 0, stream>>>(terms);
  check_launch(kOp);
}

template void launch_row_sums(const RowSums<__nv_bfloat16>&, cudaStream_t);
template void launch_row_sums(const RowSums<__half>&, cudaStream_t);
template void launch_bias_terms(const BiasTerms<__nv_bfloat16>&, cudaStream_t);
template void launch_bias_terms(const BiasTerms<__half>&, cudaStream_t);

}  // namespace liger::lm_head
