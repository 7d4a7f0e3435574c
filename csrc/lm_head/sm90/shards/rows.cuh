// SPDX-License-Identifier: BSD-3-Clause

// Kernels on the rows of a chunk where the classes are sharded over devices (step.h). A rank has the weight
// of some classes, its shard; every rank has the same rows.
//
// A rank computes exponentials relative to its own reference: the logit of the target, which all ranks
// know, or after a tile overflow the largest logit of its shard. The ranks exchange (reference, sum) of each
// row and add the sums, relative to the largest reference, in the order of ranks, so all have the same bits.
#pragma once

#include <type_traits>

#include "lm_head/sm90/epilogues/grad_input.cuh"
#include "lm_head/sm90/rows/apply_rule.cuh"
#include "lm_head/sm90/shards/references.cuh"

namespace liger::lm_head {

// The targets of a shard: an index into its classes, or -1 if the target belongs to another rank, is out of
// range or ignored.
template <typename Index>
__global__ void __launch_bounds__(kRowThreads)
    local_targets(const Index* targets, int64_t ignore_index, int64_t start, int classes, int64_t rows,
                  int32_t* local) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kRowThreads + threadIdx.x;
  if (row >= rows) return;
  const int64_t target = targets[row], column = target - start;
  const bool owned = target != ignore_index && column >= 0 && column < classes;
  local[row] = owned ? static_cast<int32_t>(column) : -1;
}

// Replaces gather() for rows that were gathered before: resets the overflow of tiles and finds the first row
// of each class.
static __global__ void __launch_bounds__(kRowThreads)
    claim_first_rows(const ChunkRows chunk, const int* index, const int32_t* local, FirstRowOfClass first_row,
                     int* overflow, int tiles) {
  const int row = blockIdx.x * kRowThreads + threadIdx.x;
  if (row < tiles) overflow[row] = 0;
  if (row >= chunk()) return;
  const int source = index[row];
  if (local[source] >= 0) first_row.claim(local[source], source);
}

// Writes the numbers per row that this rank sends (kRankNumbers). Rows beyond the count have zeros. grid: a
// warp per row.
struct ShardSums {
  ChunkRows chunk;
  const float* target_logit;
  const float* sums;
  int columns;  // of sums
  const int* overflow;
  const float* recomputed;  // references of rows in tiles with overflow
  RowMetrics metrics;       // null without metrics
  int vocab_start;          // the first class of the shard, for keys
  float* out;               // (kRankNumbers or kRankNumbersWithMetrics, chunk.rows)
};

static __global__ void __launch_bounds__(kRowThreads) write_shard_sums(const ShardSums p) {
  const int row = blockIdx.x * (kRowThreads / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
  if (row >= p.chunk.rows) return;
  float reference = 0.0f, sum = 0.0f, entropy_sum = 0.0f;
  unsigned long long key = 0;
  const bool valid = row < p.chunk(), metrics = p.metrics.best_keys != nullptr;
  if (valid) {
    reference = p.overflow[row / sm90::kTileM] ? p.recomputed[row] : p.target_logit[row];
    for (int i = lane; i < p.columns; i += 32) sum += p.sums[int64_t{row} * p.columns + i];
    sum = warp_reduce<Sum>(sum);
  }
  if (valid && metrics) {
    for (int i = lane; i < p.columns; i += 32)
      entropy_sum += p.metrics.entropy_sums[int64_t{row} * p.columns + i];
    entropy_sum = warp_reduce<Sum>(entropy_sum) / kLog2e;
    key = p.metrics.best_keys[row] - static_cast<unsigned>(p.vocab_start);  // the column is complemented
  }
  if (lane != 0) return;
  const int64_t rows = p.chunk.rows;
  p.out[row] = reference, p.out[rows + row] = sum;
  if (!metrics) return;
  p.out[2 * rows + row] = entropy_sum;
  p.out[3 * rows + row] = __uint_as_float(static_cast<uint32_t>(key >> 32));
  p.out[4 * rows + row] = __uint_as_float(static_cast<uint32_t>(key));
}

// Row sums gathered from all ranks, shape (ranks, numbers, rows).
struct RankSums {
  const float* memory;
  int ranks, rank, rows, numbers;  // rank: this one
  __device__ __forceinline__ float number(int which, int of, int row) const {
    return memory[(int64_t{of} * numbers + which) * rows + row];
  }
  __device__ __forceinline__ float reference(int of, int row) const { return number(0, of, row); }
  __device__ __forceinline__ float sum(int of, int row) const { return number(1, of, row); }
  __device__ __forceinline__ float entropy_sum(int of, int row) const { return number(2, of, row); }
  __device__ __forceinline__ unsigned long long key(int of, int row) const {
    const auto word = [&](int which) { return __float_as_uint(number(which, of, row)); };
    return static_cast<unsigned long long>(word(3)) << 32 | word(4);
  }
};

template <typename T>
struct ShardOf {};

// apply_rule() for a shard: the problem describes all classes; weight, exponentials and one-hot terms belong
// to the shard.
template <typename T>
struct Rule<ShardOf<T>> : Rule<T> {
  static constexpr bool kShard = true;
  static_assert(!kSmallRange<T>, "the shifts of float16 are relative to sums of one rank");
  RankSums ranks;
  const int32_t* local;  // the targets of the shard, for the rows of the batch
  int panels;            // of the exponentials

  // The statistics of a row of all classes.
  template <typename Stats>
  __device__ __forceinline__ void merge(int row, Stats& stats) const {
    float reference = -INFINITY;
    // A rank without a class of finite logit has the reference 0, which may be far above the others.
    for (int i = 0; i < ranks.ranks; ++i) {
      if (ranks.sum(i, row) != 0.0f) reference = fmaxf(reference, ranks.reference(i, row));
    }
    stats.max = ce::reference_of(reference);
    stats.sum = 0.0f;
    for (int i = 0; i < ranks.ranks; ++i) {
      const float sum = ranks.sum(i, row);
      if (sum != 0.0f) stats.sum = fmaf(sum, ce::exp_from(ranks.reference(i, row), stats.max), stats.sum);
    }
    if constexpr (std::is_same_v<Stats, ce::Stats<true>>) merge_metrics(row, stats);
  }
  __device__ __forceinline__ void merge_metrics(int row, ce::Stats<true>& stats) const {
    stats.entropy_sum = 0.0f;
    unsigned long long best = 0;
    for (int i = 0; i < ranks.ranks; ++i) {
      best = max(best, ranks.key(i, row));
      const float sum = ranks.sum(i, row), distance = ranks.reference(i, row) - stats.max;
      if (sum == 0.0f) continue;
      const float entropy_sum = fmaf(distance, sum, ranks.entropy_sum(i, row));
      stats.entropy_sum = fmaf(entropy_sum, ce::exp_from(distance, 0.0f), stats.entropy_sum);
    }
    stats.best_column = column_of_key(best);
  }

  // Converts coefficients of the whole row to coefficients of its exponentials on this rank.
  template <typename Stats>
  __device__ __forceinline__ void restrict_to_shard(int row, ce::Row& r, Stats& stats,
                                                    ce::GradientCoefficients& g) const {
    if (r.target >= 0) r.target = local[r.index];
    if (ranks.sum(ranks.rank, row) == 0.0f) return;  // all exponentials are 0
    const float reference = ranks.reference(ranks.rank, row), factor = ce::exp_from(reference, stats.max);
    if (stats.max - reference > kMaxDistance) {
      rescale_row<T>(this->exponentials, panels, row, factor);
      __syncthreads();
      return;
    }
    g.coef_exp *= factor;
    stats.max = reference;
  }
};

// The input gradient of a shard in float32: ranks add their gradients before rounding.
template <typename T, bool kPartialTiles, int kTileColumns>
struct FloatGradInputEpilogue : GradInputEpilogue<T, kPartialTiles, kTileColumns> {
  using Base = GradInputEpilogue<T, kPartialTiles, kTileColumns>;
  using typename Base::Operands;
  float* sum;  // (chunk.rows, hidden)

  __device__ __forceinline__ void store(sm90::Sums<kTileColumns>& sums, Operands, const Tile& tile, int row,
                                        int lane, const sm90::EpilogueSmem&) const {
    const int count = this->chunk();
    const typename Base::Width width(tile, this->hidden);
    if (this->k_splits > 1 && this->serial_split_k(sums, tile, row, lane)) return;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int r = tile.m0 + row + lane / 4 + 8 * h;
      const bool valid = r < count;
      this->scale_row(sums, h, r, valid, tile, lane, width);
      float* const to = sum + int64_t{r} * this->hidden + tile.n0 + lane % 4 * 2;
#pragma unroll
      for (int j = 0; j < Base::kColumns / 8; ++j) {
        if (valid && width.has(8 * j))
          *reinterpret_cast<float2*>(to + 8 * j) = make_float2(sums[4 * j + 2 * h], sums[4 * j + 2 * h + 1]);
      }
    }
  }
};

}  // namespace liger::lm_head
