// The rows of a shard of the classes in the backward of log-probabilities, and in a forward that keeps exponentials.
#pragma once

#include "linear_ce/sm90/kept_rows.cuh"
#include "linear_ce/sm90/shard_references.cuh"

namespace liger::linear_ce {

// The backward knows the log-sum-exp of a row over all classes. So all ranks have the same reference, from which no sum
// of a tile overflows: the logit of the target, or if that is more than kMostDistance below the log-sum-exp, the latter.
// Rows beyond the count get 0. grid: rows of the chunk / kRowThreads.
static __global__ void __launch_bounds__(kRowThreads)
    references_from_lse(const ChunkRows chunk, const int* index, const float* target_logit, const float* lse,
                        float* reference) {
  const int row = blockIdx.x * kRowThreads + threadIdx.x;
  if (row >= chunk.rows) return;
  float chosen = 0.0f;
  if (row < chunk()) {
    const float of_row = lse[index[row]];
    chosen = target_logit[row];
    if (of_row - chosen > kMostDistance) chosen = of_row;
  }
  reference[row] = chosen;
}

// keep_rows() for a shard, from results of all classes. A sum in a kept row is that of all classes, relative to the
// reference of this rank: exp(lse - reference). If that is too large, the exponentials of the row are rescaled to the
// log-sum-exp as reference. grid: rows of the chunk.
struct KeepShardRows {
  ChunkRows chunk;
  const int* index;
  ce::Targets targets;
  int vocab;             // of all ranks
  const int32_t* local;  // as in Rule<ShardOf<T>>
  const float* target_logit;
  const float *lse, *entropy;  // of the batch; entropy may be null
  const float* reference;
  const int* overflow;
  const float* recomputed;      // references of rows of tiles with overflow
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
  const float lse = p.lse[source];
  float reference = p.overflow[row / sm90::kTileM] ? p.recomputed[row] : p.reference[row];
  if (lse - reference > kMostDistance) {
    rescale_row<T>(p.exponentials, p.panels, row, ce::exp_from(reference, lse));
    reference = lse;
    __syncthreads();
  }
  if (threadIdx.x != 0) return;
  const int64_t target = p.targets[source];
  const float z_target = p.target_logit[row], sum = ce::exp_from(lse, reference);
  KeptRow kept = {target >= 0 && target < p.vocab ? sum : NAN, z_target - lse, NAN, 0.0f};
  if (p.entropy != nullptr) kept.entropy = p.entropy[source];
  const int column = p.local[source];
  if (column >= 0 && p.class_one_hot != nullptr && p.class_one_hot[column].index != source) {
    kept.one_hot_included = 1.0f;
    *reinterpret_cast<T*>(p.exponentials.at(row, column)) =
        from_float<T>(ce::exp_from(z_target, reference) - sum);
  }
  p.out[row] = kept;
}

}  // namespace liger::linear_ce
