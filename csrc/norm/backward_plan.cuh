// How the backward of a norm spreads its rows over threads and blocks: functions of the shape and the device
// only, so that the same call gives the same bits every time.
#pragma once

#include <algorithm>

#include "device/vec.cuh"

namespace liger {

inline constexpr int kMaxRowThreads = 512;
inline constexpr int kMaxRowWarps = kMaxRowThreads / 32;

struct RowPlan {
  int width;    // vectors per thread; 0: the row is too wide for one block to hold
  int rows;     // rows per thread group and step
  int lanes;    // threads per row
  int threads;  // threads per block
  int stages;   // steps under way
  int blocks;
  int shared;  // bytes of dynamic shared memory
  int groups() const { return threads / lanes; }
};

// Threads of a row: a power of two within a warp, whole warps beyond.
inline int row_lanes(int64_t vectors, int width) {
  const int needed = static_cast<int>((vectors + width - 1) / width);
  if (needed > 32) return (needed + 31) / 32 * 32;
  int lanes = 1;
  while (lanes < needed) lanes *= 2;
  return lanes;
}

// Vectors per thread. Two rather than one, since half as many warps then wait for each other in the sum of a
// row. A step (the sum of a row and its stores) takes some 2400 cycles, in which an SM's share of
// the memory is 44 KB: where the rows that a block works on are less, its steps are what takes the time. Then
// four vectors, if twice as many rows fit. Otherwise two, since in half types a thread does not keep four in
// registers during the sum.
inline int row_width(int64_t vectors, bool vectorised, int streams, int threads_of_four) {
  if (!vectorised) return vectors <= 8 * kMaxRowThreads ? 8 : 0;
  // A row within a warp is summed without a barrier.
  for (const int width : {1, 2, 4}) {
    if (vectors <= 32 * width) return width;
  }
  const int groups_of_two = kMaxRowThreads / row_lanes(vectors, 2);
  const int groups_of_four = threads_of_four / row_lanes(vectors, 4);
  if (groups_of_four == 0) return 0;
  const int64_t step_bytes = groups_of_two * vectors * 16 * (streams + 1);  // read and written
  return step_bytes < 44 * 1024 && groups_of_four >= 2 * groups_of_two ? 4 : 2;
}

// One block per SM, as large as its registers allow: every block writes a partial result.
inline RowPlan plan_rows(int64_t rows, int64_t vectors, int vector_bytes, bool vectorised, int streams,
                         int threads_of_four, int sm_count, int shared_limit) {
  RowPlan plan{};
  plan.width = row_width(vectors, vectorised, streams, threads_of_four);
  if (plan.width == 0) return plan;

  plan.lanes = row_lanes(vectors, plan.width);
  const int most_threads = plan.width == 4 ? threads_of_four : kMaxRowThreads;
  plan.threads = most_threads / plan.lanes * plan.lanes;
  // Two rows at once where a thread holds little of one: their reductions overlap.
  plan.rows = plan.width == 1 ? 2 : 1;
  const int64_t steps = (rows + plan.groups() * plan.rows - 1) / (plan.groups() * plan.rows);
  plan.blocks = static_cast<int>(std::min<int64_t>(steps, sm_count));

  // Enough bytes under way per SM to cover the latency of memory. (96 KB took 1 % longer.)
  constexpr int kInFlight = 64 * 1024;
  const int stage_bytes = plan.threads * plan.width * plan.rows * streams * vector_bytes;
  plan.stages = std::clamp(kInFlight / stage_bytes, 2, 4);
  while (plan.stages > 1 && plan.stages * stage_bytes > shared_limit - 4096) --plan.stages;
  plan.shared = plan.stages * stage_bytes;
  return plan;
}

// And how many parts of the gradients of the parameters will be written.
struct BackwardPlan {
  RowPlan rows;
  int parts;
};

// streams: how many tensors of the size of x are read. threads_of_four: the most threads of a block of a
// kernel with four vectors per thread.
template <typename T>
BackwardPlan plan_norm_backward(int64_t rows, int64_t hidden, bool vectorised, int streams,
                                int threads_of_four, int sm_count, int shared_limit) {
  const int n = vectorised ? kVec<T> : 1;
  BackwardPlan plan{plan_rows(rows, hidden / n, n * sizeof(T), vectorised, streams, threads_of_four, sm_count,
                              shared_limit),
                    0};
  if (plan.rows.width == 0) {
    const int64_t columns = (hidden + 256 * n - 1) / (256 * n);
    plan.parts = static_cast<int>(std::min(rows, std::max<int64_t>(1, 8 * sm_count / columns)));
  } else {
    plan.parts = plan.rows.blocks;
    if (plan.rows.groups() > 1) {
      const int sums = plan.rows.groups() * static_cast<int>(hidden * sizeof(float));
      plan.rows.shared = std::max(plan.rows.shared, sums);
    }
  }
  return plan;
}

}  // namespace liger
