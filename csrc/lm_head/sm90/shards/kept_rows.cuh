// SPDX-License-Identifier: BSD-3-Clause

// Row kernels of a shard of the classes: for the backward of log-probabilities, and for a forward that keeps
// exponentials.
#pragma once

#include "lm_head/sm90/logprobs/kept_rows.cuh"
#include "lm_head/sm90/shards/references.cuh"

namespace liger::lm_head {

// The sum of exp(z - reference) of a row over all classes, as the forward wrote it for each row of the batch.
// The log-sum-exp, reference + log(sum), is rounded where logits are large.
struct WholeRow {
  float reference, sum;

  __device__ __forceinline__ float log_sum_exp_above(float other) const {
    return (reference - other) + logf(sum);
  }
  // The sum relative to another reference.
  __device__ __forceinline__ float sum_from(float other) const {
    return sum * ce::exp_from(reference, other);
  }
};
struct WholeRows {
  const float* stats;  // (2, rows): references and sums
  int64_t rows;        // of the batch
  __device__ __forceinline__ WholeRow operator[](int row) const { return {stats[row], stats[rows + row]}; }
};

// All ranks choose the same reference, from which no tile sum overflows: the logit of the target, or the
// log-sum-exp of all classes if the logit is more than kMaxDistance below it. Rows beyond the count get 0.
// grid: rows of the chunk / kRowThreads.
static __global__ void __launch_bounds__(kRowThreads)
    references_of_whole_rows(const ChunkRows chunk, const int* index, const float* target_logit,
                             const WholeRows whole, float* reference) {
  const int row = blockIdx.x * kRowThreads + threadIdx.x;
  if (row >= chunk.rows) return;
  float chosen = 0.0f;
  if (row < chunk()) {
    chosen = target_logit[row];
    const float distance = whole[index[row]].log_sum_exp_above(chosen);
    if (distance > kMaxDistance) chosen += distance;
  }
  reference[row] = chosen;
}

// keep_rows() for a shard, from results of all classes. A kept row has the sum over all classes, relative to
// the reference of this rank. If the sum is too large, the exponentials of the row are rescaled to the
// log-sum-exp as reference. grid: rows of the chunk.
struct KeepShardRows {
  ChunkRows chunk;
  const int* index;
  ce::Targets targets;
  int vocab;             // of all ranks
  const int32_t* local;  // as in Rule<ShardOf<T>>
  const float* target_logit;
  WholeRows whole;
  const float* entropy;  // of the batch; may be null
  const float* reference;
  const int* overflow;
  const float* recomputed;      // references of rows in tiles with overflow
  const OneHot* class_one_hot;  // of the shard, as in KeepRows
  Panels exponentials;
  int panels;
  KeptRow* out;
};

template <typename T>
__global__ void __launch_bounds__(kRowThreads) keep_shard_rows(const KeepShardRows p) {
  static_assert(!kSmallRange<T>, "float16 has shifts, too");
  const int row = blockIdx.x;
  if (row >= p.chunk()) return;
  const int source = p.index[row];
  const WholeRow whole = p.whole[source];
  float reference = p.overflow[row / sm90::kTileM] ? p.recomputed[row] : p.reference[row];
  const float distance = whole.log_sum_exp_above(reference);
  if (distance > kMaxDistance) {
    const float log_sum_exp = reference + distance;
    rescale_row<T>(p.exponentials, p.panels, row, ce::exp_from(reference, log_sum_exp));
    reference = log_sum_exp;
    __syncthreads();
  }
  if (threadIdx.x != 0) return;
  const int64_t target = p.targets[source];
  const float z_target = p.target_logit[row], sum = whole.sum_from(reference);
  const float logprob = (z_target - whole.reference) - logf(whole.sum);
  KeptRow kept = {target >= 0 && target < p.vocab ? sum : NAN, logprob, NAN, 0.0f};
  if (p.entropy != nullptr) kept.entropy = p.entropy[source];
  const int column = p.local[source];
  if (column >= 0 && p.class_one_hot != nullptr && p.class_one_hot[column].index != source) {
    kept.one_hot_included = 1.0f;
    *reinterpret_cast<T*>(p.exponentials.at(row, column)) =
        from_float<T>(ce::exp_from(z_target, reference) - sum);
  }
  p.out[row] = kept;
}

}  // namespace liger::lm_head
