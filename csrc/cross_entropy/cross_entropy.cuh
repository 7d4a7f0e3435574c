// SPDX-License-Identifier: BSD-3-Clause

// The kernels of cross entropy except the row kernels: the denominator, the reduction of per-row results to
// scalars, and the backward from saved statistics.
#pragma once

#include <cstdio>

#include "cross_entropy/tile.cuh"

namespace liger::ce {

inline constexpr int kReduceThreads = 1024;

// A deterministic sum over the block; only thread 0 gets it. scratch: 32 doubles.
__device__ __forceinline__ double block_sum(double x, double* scratch) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) x += __shfl_xor_sync(0xffffffffu, x, offset);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  __syncthreads();
  if (lane == 0) scratch[warp] = x;
  __syncthreads();
  x = lane < static_cast<int>(blockDim.x) / 32 ? scratch[lane] : 0.0;
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) x += __shfl_xor_sync(0xffffffffu, x, offset);
  return x;
}

enum class Scalar { kFloat, kHalf, kBFloat16, kDouble, kInt32, kInt64 };

__device__ __forceinline__ float scalar_to_float(const void* p, Scalar type) {
  switch (type) {
    case Scalar::kFloat:
      return *static_cast<const float*>(p);
    case Scalar::kHalf:
      return to_float(*static_cast<const __half*>(p));
    case Scalar::kBFloat16:
      return to_float(*static_cast<const __nv_bfloat16*>(p));
    case Scalar::kDouble:
      return static_cast<float>(*static_cast<const double*>(p));
    case Scalar::kInt32:
      return static_cast<float>(*static_cast<const int32_t*>(p));
    default:
      return static_cast<float>(*static_cast<const int64_t*>(p));
  }
}

struct Preparation {
  Targets targets;
  int64_t rows;
  int vocab;
  const float* class_weight;
  const void* given_denominator;  // the caller's; null: computed
  Scalar given_type;
  bool mean;  // how it is computed: the sum of the valid rows' class weights, or their number; false: 1
  float* denominator;  // null: not requested
  float* weight_sum;   // of class_weight; null: not requested
  bool fused;          // the message of kChecked names fused_linear_ce
};

// Writes the denominator of the loss and the sum of the class weights. grid: one block.
//
// kChecked (LIGER_CHECK_TARGETS=1): prints a target outside [0, vocab) and traps.
template <bool kChecked>
__global__ void __launch_bounds__(kReduceThreads) prepare(const Preparation p) {
  __shared__ double scratch[32];
  const bool count_rows = p.denominator != nullptr && p.given_denominator == nullptr && p.mean;
  double weight = 0.0;
  if (count_rows || kChecked) {
    for (int64_t row = threadIdx.x; row < p.rows; row += kReduceThreads) {
      const int64_t y = p.targets[row];
      if (y == p.targets.ignore_index) continue;
      if (y >= 0 && y < p.vocab) {
        weight += p.class_weight != nullptr ? p.class_weight[y] : 1.0f;
      } else if (kChecked) {
        printf("%s: target at row %lld is %lld, expected 0 <= target < %d or ignore_index %lld\n",
               p.fused ? "fused_linear_ce" : "cross_entropy", static_cast<long long>(row),
               static_cast<long long>(y), p.vocab, static_cast<long long>(p.targets.ignore_index));
        __trap();
      }
    }
  }
  if (p.denominator != nullptr) {
    if (count_rows) weight = block_sum(weight, scratch);
    if (threadIdx.x == 0) {
      *p.denominator = p.given_denominator != nullptr ? scalar_to_float(p.given_denominator, p.given_type)
                                                      : (p.mean ? static_cast<float>(weight) : 1.0f);
    }
  }
  if (p.weight_sum != nullptr) {
    double sum = 0.0;
    for (int64_t v = threadIdx.x; v < p.vocab; v += kReduceThreads) sum += p.class_weight[v];
    sum = block_sum(sum, scratch);
    if (threadIdx.x == 0) *p.weight_sum = static_cast<float>(sum);
  }
}

struct Reduction {
  Targets targets;
  int64_t rows;
  const float* denominator;
  const float* row_loss;
  const float* row_z_loss;
  const int64_t* predicted;
  float* loss;  // null: not requested, as for the following
  float* z_loss;
  float* accuracy;
};

// Reduces per-row results to scalars. grid: one block, which fixes the order. Sums are in double, so many
// rows do not cost digits.
__global__ void __launch_bounds__(kReduceThreads) reduce_rows(const Reduction p) {
  __shared__ double scratch[32];
  double loss = 0.0, z_loss = 0.0, correct = 0.0, valid = 0.0;
  for (int64_t row = threadIdx.x; row < p.rows; row += kReduceThreads) {
    if (p.loss != nullptr) loss += p.row_loss[row];
    if (p.z_loss != nullptr) z_loss += p.row_z_loss[row];
    if (p.accuracy != nullptr) {
      const int64_t y = p.targets[row];
      if (y != p.targets.ignore_index) {
        valid += 1.0;
        correct += p.predicted[row] == y;
      }
    }
  }
  if (p.loss != nullptr) {
    loss = block_sum(loss, scratch);
    if (threadIdx.x == 0) *p.loss = static_cast<float>(loss / *p.denominator);
  }
  if (p.z_loss != nullptr) {
    z_loss = block_sum(z_loss, scratch);
    if (threadIdx.x == 0) *p.z_loss = static_cast<float>(z_loss / *p.denominator);
  }
  if (p.accuracy != nullptr) {
    correct = block_sum(correct, scratch);
    valid = block_sum(valid, scratch);
    if (threadIdx.x == 0) *p.accuracy = static_cast<float>(correct / valid);
  }
}

struct Backward {
  const float* grad_loss;  // one value, or one per row with per_row
  bool per_row;
  const float* stats;  // (2, rows): Problem::row_max and row_sum of the forward
  const float* denominator;
  void* out;
  int64_t out_stride;
};

// The gradient of rows from their saved maxima and sums: one read of the logits, one write. grid: rows x
// tiles.
template <typename T, bool kExtras, bool kAligned>
__global__ void __launch_bounds__(kBackwardThreads)
    backward_from_stats(const Problem p, const Backward b, int tiles) {
  write_tile<T, kExtras, kAligned>(
      p, b.out, b.out_stride, tiles, [&](int64_t index, const T* logits, int64_t y) {
        const float max = b.stats[index], sum = b.stats[p.rows + index];
        const Row row = read_row<kExtras>(p, logits, index, y);
        const float upstream = row.token_weight * b.grad_loss[b.per_row ? index : 0] / *b.denominator;
        return gradient_coefficients(p, row, upstream, max, sum);
      });
}

}  // namespace liger::ce
