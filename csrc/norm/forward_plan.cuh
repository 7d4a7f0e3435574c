// How the forward of a norm spreads its rows over threads and blocks.
#pragma once

#include <cstdint>

namespace liger {

// How rows are spread: a row belongs to `lanes` neighbouring threads with `width` vectors each. Rows of up to
// a warp share a block, longer ones take one each.
struct ForwardPlan {
  int width;  // 0: too long for one block to hold
  bool grouped;
  int lanes_log2, threads;
  int64_t blocks;
};

// Threads per block at most: as many registers as leave enough loads under way.
template <int V>
inline constexpr int kForwardThreads = V <= 4 ? 512 : 1024;

// most_of_two: vectors of the longest row whose threads have two.
inline ForwardPlan plan_norm_forward(int64_t rows, int64_t vectors, bool vectorised, int64_t most_of_two) {
  const auto threads_of = [&](int width) {
    const int64_t lanes = (vectors + width - 1) / width;
    return static_cast<int>((lanes + 31) / 32 * 32);
  };
  const int of_four = threads_of(4);
  // Blocks of which an SM has registers for two, and threads without any for a third of another.
  const bool idle_room = of_four > 1024 / 3 && 1024 / of_four * of_four < 960;
  const bool idle_lanes = of_four > 32 && vectors < 3 * of_four;
  ForwardPlan plan{};
  if (!vectorised) {
    plan.width = vectors <= 8 * kForwardThreads<8> ? 8 : 0;
  } else if (vectors <= most_of_two || (idle_lanes && vectors <= 2 * kForwardThreads<2>)) {
    plan.width = 2;
  } else if (vectors <= 4 * kForwardThreads<4> && !idle_room) {
    plan.width = 4;
  } else {
    plan.width = vectors <= 8 * kForwardThreads<8> ? 8 : 0;
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
