// SPDX-License-Identifier: BSD-3-Clause

// Launch heuristic of the norm forwards. The kernels keep a whole row in registers.
#pragma once

#include <cstdint>

namespace liger {

// `lanes` consecutive threads process a row, with up to `width` vectors each. If a row needs at most one
// warp, a block processes several rows (grouped), otherwise one row.
struct ForwardPlan {
  int width;  // vectors per thread; 0: a row does not fit in the registers of a block
  bool grouped;
  int lanes_log2;  // if grouped: 2^lanes_log2 threads per row
  int threads;     // per block
  int64_t blocks;
};

// Maximum block size at V vectors per thread. The limit bounds the registers per thread, and the SM has
// enough loads in flight.
template <int V>
inline constexpr int kForwardThreads = V <= 4 ? 512 : 1024;

// max_vectors_width2: rows of up to this many vectors have two vectors per thread in any case.
// max_threads_width8: the maximum block size of the kernel with eight vectors per thread.
inline ForwardPlan plan_norm_forward(int64_t rows, int64_t vectors, bool vectorised,
                                     int64_t max_vectors_width2,
                                     int max_threads_width8 = kForwardThreads<8>) {
  const auto threads_of = [&](int width) {
    const int64_t lanes = (vectors + width - 1) / width;
    return static_cast<int>((lanes + 31) / 32 * 32);
  };
  const int threads_width4 = threads_of(4);
  // At width 4 an SM has registers for 1024 threads. Blocks of more than 341 threads that fill fewer than 960
  // of the 1024 slots waste registers.
  const bool idle_registers = threads_width4 > 1024 / 3 && 1024 / threads_width4 * threads_width4 < 960;
  // At width 4 the threads would have fewer than three vectors on average.
  const bool idle_lanes = threads_width4 > 32 && vectors < 3 * threads_width4;
  ForwardPlan plan{};
  if (!vectorised) {
    plan.width = vectors <= 8 * max_threads_width8 ? 8 : 0;
  } else if (vectors <= max_vectors_width2 || (idle_lanes && vectors <= 2 * kForwardThreads<2>)) {
    plan.width = 2;
  } else if (vectors <= 4 * kForwardThreads<4> && !idle_registers) {
    plan.width = 4;
  } else {
    plan.width = vectors <= 8 * max_threads_width8 ? 8 : 0;
  }
  if (plan.width == 0) return plan;
  plan.threads = threads_of(plan.width);
  plan.grouped = plan.threads == 32;
  plan.blocks = rows;
  if (plan.grouped) {
    while ((int64_t{plan.width} << plan.lanes_log2) < vectors) ++plan.lanes_log2;
    plan.threads = 128;
    const int64_t groups = plan.threads >> plan.lanes_log2;
    plan.blocks = (rows + groups - 1) / groups;
  }
  return plan;
}

}  // namespace liger
