// Rows of logits that are some of the classes: what a loss over all of them needs to know, and the gradient
// once it is known.
#pragma once

#include "cross_entropy/rows.cuh"
#include "cross_entropy/tile.cuh"

namespace liger::ce {

// The column of a class, or -1 where it is not among those that the rows hold.
__device__ __forceinline__ int column_of(int64_t y, int64_t vocab_start, int vocab) {
  const int64_t column = y - vocab_start;
  return column >= 0 && column < vocab ? static_cast<int>(column) : -1;
}

struct StatsOutput {
  int64_t vocab_start;
  float* max;
  float* sum;
  float* target;
  float* class_sum;  // null: not wanted
};

// grid: rows. Any number of threads that is a multiple of 32.
template <typename T, bool kExtras>
__global__ void __launch_bounds__(kMaxThreads) stats_streamed(const Problem p, const StatsOutput o) {
  __shared__ Stats<kExtras> slots[kMaxThreads / 32];
  const int64_t index = blockIdx.x;
  const int64_t y = p.targets[index];
  Stats<kExtras> stats = no_stats<kExtras>();
  float z_target[1] = {0.0f};
  if (y == p.targets.ignore_index) {
    stats.max = 0.0f;
    stats.sum = 1.0f;
  } else {
    const T* logits = static_cast<const T*>(p.logits) + index * p.row_stride;
    const int column = column_of(y, o.vocab_start, p.vocab);
    if (column >= 0) {
      widen<kExtras>(Vec<T, 1>{logits[column]}, column, p, z_target);
      cap<kExtras, T>(p, z_target);
    }
    stats = streamed_stats<T, kExtras>(p, logits, align_row(logits, p.vocab));
    merge_block(stats, slots);
  }
  if (threadIdx.x != 0) return;
  o.max[index] = stats.max;
  o.sum[index] = stats.sum;
  o.target[index] = z_target[0];
  if constexpr (kExtras) {
    if (o.class_sum != nullptr) o.class_sum[index] = stats.weighted;
  }
}

// One value per row each, as cross_entropy_stats_backward of csrc/library.cpp defines them.
struct Coefficients {
  int64_t vocab_start;
  const float* reference;
  const float* of_exp;
  const float* of_target;
  const float* of_class;  // may be null
  const float* of_log;    // with kLogs
  void* out;
  int64_t out_stride;
};

template <typename T, bool kExtras, bool kAligned>
__global__ void __launch_bounds__(kBackwardThreads)
    backward_from_coefficients(const Problem p, const Coefficients c, int tiles) {
  write_tile<T, kExtras, kAligned>(p, c.out, c.out_stride, tiles,
                                   [&](int64_t index, const T* /*logits*/, int64_t y) {
                                     return Gradient{reference_of(c.reference[index]),
                                                     c.of_exp[index],
                                                     c.of_target[index],
                                                     c.of_class != nullptr ? c.of_class[index] : 0.0f,
                                                     column_of(y, c.vocab_start, p.vocab),
                                                     c.of_log != nullptr ? c.of_log[index] : 0.0f};
                                   });
}

}  // namespace liger::ce
