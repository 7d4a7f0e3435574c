// SPDX-License-Identifier: BSD-3-Clause

// Cross entropy over a vocabulary shard, the classes [vocab_start, vocab_start + vocab): the statistics of
// each row that a loss over all classes needs, and the gradient from the coefficients that the loss computes.
#pragma once

#include "cross_entropy/rows.cuh"
#include "cross_entropy/tile.cuh"

namespace liger::ce {

// The column of a class, or -1 if it is not in this shard.
__device__ __forceinline__ int column_of(int64_t y, int64_t vocab_start, int vocab) {
  const int64_t column = y - vocab_start;
  return column >= 0 && column < vocab ? static_cast<int>(column) : -1;
}

struct StatsOutput {
  int64_t vocab_start;
  float* max;
  float* sum;
  float* target;
  float* class_sum;  // null: not requested
};

// The sum of exp(z - max)^2 of a row over a block, after its maximum is known. Thread 0 gets the result.
template <typename T, bool kExtras>
__device__ __forceinline__ float sum_of_squares(const Problem& p, const T* logits, float max) {
  __shared__ float scratch[32];
  constexpr int N = kVec<T>;
  const AlignedRow aligned = align_row(logits, p.vocab);
  const float reference = reference_of(max);
  float sum = 0.0f;
  const auto add = [&]<int M>(const Vec<T, M>& raw, int column) {
    float z[M];
    unpack_logits<kExtras>(raw, column, p, z);
    apply_softcap<kExtras, T>(p, z);
#pragma unroll
    for (int i = 0; i < M; ++i) {
      const float e = exp_from(z[i], reference);
      sum = fmaf(e, e, sum);
    }
  };
  const T* body = logits + aligned.head;
#pragma unroll 2
  for (int v = threadIdx.x; v < aligned.vectors; v += blockDim.x)
    add(load<T, N>(body + static_cast<int64_t>(v) * N), aligned.head + v * N);
  if (threadIdx.x < aligned.edges()) {
    const int column = aligned.edge_column(threadIdx.x, p.vocab);
    add(Vec<T, 1>{logits[column]}, column);
  }
  return block_reduce<Sum>(sum, scratch);
}

// Reads the logits once, or twice with kSquares; the second read mostly hits L2. grid: rows. Block size:
// any multiple of 32 up to kMaxThreads.
template <typename T, bool kExtras, bool kSquares = false>
__global__ void __launch_bounds__(kMaxThreads)
    stats_streamed(const Problem p, const StatsOutput o, float* square_sum) {
  __shared__ Stats<kExtras> slots[kMaxThreads / 32];
  const int64_t index = blockIdx.x;
  const int64_t y = p.targets[index];
  Stats<kExtras> stats = empty_stats<kExtras>();
  float z_target[1] = {0.0f};
  if (y == p.targets.ignore_index) {
    stats.max = 0.0f;
    stats.sum = 1.0f;
    if (kSquares && threadIdx.x == 0) square_sum[index] = 1.0f;
  } else {
    const T* logits = static_cast<const T*>(p.logits) + index * p.row_stride;
    const int column = column_of(y, o.vocab_start, p.vocab);
    if (column >= 0) {
      unpack_logits<kExtras>(Vec<T, 1>{logits[column]}, column, p, z_target);
      apply_softcap<kExtras, T>(p, z_target);
    }
    stats = streamed_stats<T, kExtras>(p, logits, align_row(logits, p.vocab));
    merge_block(stats, slots);
    if constexpr (kSquares) {
      const float squares = sum_of_squares<T, kExtras>(p, logits, stats.max);
      if (threadIdx.x == 0) square_sum[index] = squares;
    }
  }
  if (threadIdx.x != 0) return;
  o.max[index] = stats.max;
  o.sum[index] = stats.sum;
  o.target[index] = z_target[0];
  if constexpr (kExtras) {
    if (o.class_sum != nullptr) o.class_sum[index] = stats.weighted_sum;
  }
}

// Each has one value per row; csrc/library.cpp defines them with the schema of cross_entropy_stats_backward.
struct StatsBackward {
  int64_t vocab_start;
  const float* reference;
  const float* coef_exp;
  const float* coef_target;
  const float* coef_class;  // may be null
  const float* coef_log;    // null without kCoefLog
  void* out;
  int64_t out_stride;
};

// grid: rows x tiles, as write_tile().
template <typename T, bool kExtras, bool kAligned>
__global__ void __launch_bounds__(kBackwardThreads)
    backward_from_coefficients(const Problem p, const StatsBackward b, int tiles) {
  write_tile<T, kExtras, kAligned>(
      p, b.out, b.out_stride, tiles, [&](int64_t index, const T* /*logits*/, int64_t y) {
        return GradientCoefficients{reference_of(b.reference[index]),
                                    b.coef_exp[index],
                                    b.coef_target[index],
                                    b.coef_class != nullptr ? b.coef_class[index] : 0.0f,
                                    column_of(y, b.vocab_start, p.vocab),
                                    b.coef_log != nullptr ? b.coef_log[index] : 0.0f};
      });
}

}  // namespace liger::ce
