// SPDX-License-Identifier: BSD-3-Clause

// The rows of a chunk between GEMM 1 and the gradients: losses, metrics, scales and one-hot terms.
#pragma once

#include "lm_head/sm90/rows/gather.cuh"

namespace liger::lm_head {

// Computes loss, metrics, scale, one-hot term and the coefficient of label smoothing from row sums. If the
// weight gradient needs it, multiplies the gathered row by the scale in place (float16: scale_rows() does).
// grid: rows of the chunk.
template <typename T>
struct Rule {
  using Element = T;
  static constexpr bool kShard = false;
  ce::Problem problem;  // of the whole batch, without logits
  ChunkRows chunk;
  const int* index;
  const float* target_logit;
  const float* sums;
  int columns;  // of sums
  const int* overflow;
  Panels exponentials;
  bool gradient;  // false: results only
  T* input;       // null without a weight gradient
  int hidden;
  float* scale;  // in: references of rows in tiles with overflow; out: scales
  FirstRowOfClass first_row;
  OneHot* one_hot;
  RowMetrics metrics;  // null without metrics
  LogitTransform transform;
  const float* weighted_sum;  // of the rows of the chunk, with label smoothing
  float* smoothing;           // coefficients of the rows, with label smoothing
  RangeRows range;            // with kSmallRange
};

// ElementOrShard: the element type T, or ShardOf<T> (shards/rows.cuh). kExtras: with metrics or label
// smoothing.
template <typename ElementOrShard, bool kExtras>
__global__ void __launch_bounds__(kRowThreads) apply_rule(const Rule<ElementOrShard> p) {
  using T = typename Rule<ElementOrShard>::Element;
  constexpr bool kShard = Rule<ElementOrShard>::kShard;  // the sums of all ranks replace the tile sums
  __shared__ float scratch[32];
  const int row = blockIdx.x;
  if (row >= p.chunk()) return;
  const float z_target = p.target_logit[row];
  float computed = z_target;
  if constexpr (kSmallRange<T>) computed = p.range.reference[row];
  const float reference = p.overflow[row / sm90::kTileM] ? p.scale[row] : computed;
  float sum = 0.0f;
  for (int i = threadIdx.x; i < p.columns; i += kRowThreads) sum += p.sums[int64_t{row} * p.columns + i];
  sum = block_reduce<Sum>(sum, scratch);
  ce::Stats<kExtras> stats = ce::empty_stats<kExtras>();
  stats.max = reference;
  stats.sum = sum;
  if constexpr (kExtras) {
    if (p.metrics.entropy_sums != nullptr) {
      float entropy_sum = 0.0f;
      for (int i = threadIdx.x; i < p.columns; i += kRowThreads)
        entropy_sum += p.metrics.entropy_sums[int64_t{row} * p.columns + i];
      stats.entropy_sum = block_reduce<Sum>(entropy_sum, scratch) / kLog2e;
      stats.best_column = column_of_key(p.metrics.best_keys[row]);
    }
    if (p.weighted_sum != nullptr)
      stats.weighted_sum = fmaf(-ce::class_weight_sum(p.problem), reference, p.weighted_sum[row]);
  }
  if constexpr (kShard) p.merge(row, stats);
  ce::Row r = {p.index[row], -1, NAN, 1.0f, NAN};
  if (p.problem.token_weight != nullptr) r.token_weight = p.problem.token_weight[r.index];
  const int64_t target = p.problem.targets[r.index];
  if (target >= 0 && target < p.problem.vocab) {
    r.target = static_cast<int>(target);
    r.class_weight = p.problem.class_weight != nullptr ? p.problem.class_weight[target] : 1.0f;
    r.z_target = z_target;
  }
  if (threadIdx.x == 0) ce::write_results(p.problem, r, stats);
  if (!p.gradient) return;

  const float upstream =
      p.problem.denominator != nullptr ? r.token_weight / *p.problem.denominator : r.token_weight;
  ce::GradientCoefficients g = ce::gradient_coefficients(p.problem, r, upstream, stats.max, stats.sum);
  if constexpr (kShard) p.restrict_to_shard(row, r, stats, g);
  // The one-hot term relative to the scale of the row; 0 if the scale is 0, by underflow or a z-loss.
  const float relative_target = g.coef_exp != 0.0f ? g.coef_target / g.coef_exp : 0.0f;
  // An exponential of 1 is stored as `one`.
  float one = 1.0f, scale = g.coef_exp;
  bool is_element = false;
  if constexpr (kSmallRange<T>) {
    if (r.target >= 0 && g.coef_target != 0.0f)
      is_element =
          !p.first_row.is_first(r.index, r.target) ||
          (relative_target != 0.0f && is_mostly_target(ce::exp_from(z_target, stats.max), relative_target));
    const int shift = row_shift(p.range.shift[row], is_element ? relative_target : 0.0f, kOffset<T>);
    if (shift > 0) {
      shift_tiles<T>(p.range, p.exponentials, p.problem.vocab, row, shift);
      __syncthreads();
    }
    one = pow2(kOffset<T> - shift);
    scale *= pow2(shift - kOffset<T>);
  }
  if (threadIdx.x == 0) {
    p.scale[row] = scale;
    if constexpr (kSmallRange<T>) {
      if (p.input != nullptr)
        atomicMax(p.range.largest_scaled, __float_as_uint(fabsf(scale) * p.range.largest[row]));
    }
    if (p.smoothing != nullptr) p.smoothing[row] = g.coef_class;
    OneHot one_hot = {0.0f, -1};
    if (r.target >= 0 && g.coef_target != 0.0f) {
      const float derivative = p.transform.derivative(z_target);
      if (kSmallRange<T> ? !is_element : p.first_row.is_first(r.index, r.target)) {
        one_hot = {g.coef_target * derivative, r.target};
        p.first_row.set(r.target, one_hot.amount);
      } else {
        const float exact = ce::exp_from(z_target, stats.max);
        *reinterpret_cast<T*>(p.exponentials.at(row, r.target)) =
            from_float<T>((exact - relative_target) * derivative * one);
      }
    }
    p.one_hot[row] = one_hot;
  }
  if (kSmallRange<T> || p.input == nullptr) return;
  uint4* const x = reinterpret_cast<uint4*>(p.input + int64_t{row} * p.hidden);
  for (int i = threadIdx.x; i < p.hidden / 8; i += kRowThreads) x[i] = scaled_elements<T>(x[i], g.coef_exp);
}

}  // namespace liger::lm_head
