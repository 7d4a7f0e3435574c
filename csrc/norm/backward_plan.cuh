// SPDX-License-Identifier: BSD-3-Clause

// Launch heuristic of the norm backwards. It depends on the shape and the device only, so equal calls give
// equal bits.
#pragma once

#include <algorithm>

#include "device/vec.cuh"

namespace liger {

inline constexpr int kMaxRowThreads = 512;
inline constexpr int kMaxRowWarps = kMaxRowThreads / 32;

struct RowPlan {
  int width;    // vectors per thread; 0: a row does not fit in the registers of a block
  int rows;     // rows per thread group and step
  int lanes;    // threads per row: the size of a thread group
  int threads;  // threads per block
  int stages;   // stages of the shared-memory ring; a stage has the rows of one step
  int blocks;
  int shared;  // bytes of dynamic shared memory
  int groups() const { return threads / lanes; }
};

// Threads per row: a power of two up to a warp, then whole warps.
inline int row_lanes(int64_t vectors, int width) {
  const int needed = static_cast<int>((vectors + width - 1) / width);
  if (needed > 32) return (needed + 31) / 32 * 32;
  int lanes = 1;
  while (lanes < needed) lanes *= 2;
  return lanes;
}

// Vectors per thread. Two are better than one, because half as many warps take part in the reduction of a
// row. A step (the reduction of a row and its stores) takes about 2400 cycles, in which an SM's share of the
// memory bandwidth is 44 KB: if the rows of a step are smaller than that, the kernel is bound by the latency
// of its steps. Then four vectors are better, provided that twice as many rows fit. Otherwise two are,
// because with half types a thread cannot keep four vectors in registers during the reduction.
inline int row_width(int64_t vectors, bool vectorised, int streams, int max_threads_width4) {
  if (!vectorised) return vectors <= 8 * kMaxRowThreads ? 8 : 0;
  // The reduction of a row within a warp needs no barrier.
  for (const int width : {1, 2, 4}) {
    if (vectors <= 32 * width) return width;
  }
  const int groups_width2 = kMaxRowThreads / row_lanes(vectors, 2);
  const int groups_width4 = max_threads_width4 / row_lanes(vectors, 4);
  if (groups_width4 == 0) return 0;
  const int64_t step_bytes = groups_width2 * vectors * 16 * (streams + 1);  // read and written
  return step_bytes < 44 * 1024 && groups_width4 >= 2 * groups_width2 ? 4 : 2;
}

// Persistent blocks, one per SM and as large as its registers allow: each block writes one partial gradient
// of the parameters.
inline RowPlan plan_rows(int64_t rows, int64_t vectors, int vector_bytes, bool vectorised, int streams,
                         int max_threads_width4, int sm_count, int shared_limit) {
  RowPlan plan{};
  plan.width = row_width(vectors, vectorised, streams, max_threads_width4);
  if (plan.width == 0) return plan;

  plan.lanes = row_lanes(vectors, plan.width);
  const int max_threads = plan.width == 4 ? max_threads_width4 : kMaxRowThreads;
  plan.threads = max_threads / plan.lanes * plan.lanes;
  // With one vector per thread, a thread has two rows at once, and their reductions overlap.
  plan.rows = plan.width == 1 ? 2 : 1;
  const int64_t steps = (rows + plan.groups() * plan.rows - 1) / (plan.groups() * plan.rows);
  plan.blocks = static_cast<int>(std::min<int64_t>(steps, sm_count));

  // Bytes in flight per SM that cover the latency of global memory. (96 KB took 1 % longer.)
  constexpr int kInFlight = 64 * 1024;
  const int stage_bytes = plan.threads * plan.width * plan.rows * streams * vector_bytes;
  plan.stages = std::clamp(kInFlight / stage_bytes, 2, 4);
  while (plan.stages > 1 && plan.stages * stage_bytes > shared_limit - 4096) --plan.stages;
  plan.shared = plan.stages * stage_bytes;
  return plan;
}

struct BackwardPlan {
  RowPlan rows;
  int partials;  // partial gradients of the parameters, one row each
};

// streams: the number of tensors of the size of x that are read. max_threads_width4: the maximum block size
// of the kernel with four vectors per thread.
template <typename T>
BackwardPlan plan_norm_backward(int64_t rows, int64_t hidden, bool vectorised, int streams,
                                int max_threads_width4, int sm_count, int shared_limit) {
  const int n = vectorised ? kVec<T> : 1;
  BackwardPlan plan{plan_rows(rows, hidden / n, n * sizeof(T), vectorised, streams, max_threads_width4,
                              sm_count, shared_limit),
                    0};
  if (plan.rows.width == 0) {
    const int64_t columns = (hidden + 256 * n - 1) / (256 * n);
    plan.partials = static_cast<int>(std::min(rows, std::max<int64_t>(1, 8 * sm_count / columns)));
  } else {
    plan.partials = plan.rows.blocks;
    if (plan.rows.groups() > 1) {
      const int sums = plan.rows.groups() * static_cast<int>(hidden * sizeof(float));
      plan.rows.shared = std::max(plan.rows.shared, sums);
    }
  }
  return plan;
}

}  // namespace liger
