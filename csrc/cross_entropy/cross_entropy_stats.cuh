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

// One read of the logits. grid: rows. Block size: any multiple of 32 up to kMaxThreads.
template <typename T, bool kExtras>
__global__ void __launch_bounds__(kMaxThreads) stats_streamed(const Problem p, const StatsOutput o) {
  __shared__ Stats<kExtras> slots[kMaxThreads / 32];
  const int64_t index = blockIdx.x;
  const int64_t y = p.targets[index];
  Stats<kExtras> stats = empty_stats<kExtras>();
  float z_target[1] = {0.0f};
  if (y == p.targets.ignore_index) {
    stats.max = 0.0f;
    stats.sum = 1.0f;
  } else {
    const T* logits = static_cast<const T*>(p.logits) + index * p.row_stride;
    const int column = column_of(y, o.vocab_start, p.vocab);
    if (column >= 0) {
      unpack_logits<kExtras>(Vec<T, 1>{logits[column]}, column, p, z_target);
      apply_softcap<kExtras, T>(p, z_target);
    }
    stats = streamed_stats<T, kExtras>(p, logits, align_row(logits, p.vocab));
    merge_block(stats, slots);
  }
  if (threadIdx.x != 0) return;
  o.max[index] = stats.max;
  o.sum[index] = stats.sum;
  o.target[index] = z_target[0];
  if constexpr (kExtras) {
    if (o.class_sum != nullptr) o.class_sum[index] = stats.weighted_sum;
  }
}

// One value per row each; csrc/library.cpp defines them with the schema of cross_entropy_stats_backward.
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
