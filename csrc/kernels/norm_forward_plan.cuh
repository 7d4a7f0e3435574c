// How the forward of a norm spreads its rows over threads and blocks.
#pragma once

#include <cstdint>

namespace liger {

// How rows are spread: a row belongs to `lanes` neighbouring threads with `width` vectors each. Rows of up to
// a warp share a block, wider ones take one each.
struct ForwardPlan {
  int width;  // 0: too wide for one block to hold
  bool grouped;
  int lanes_log2, threads;
  int64_t blocks;
};

inline ForwardPlan plan_norm_forward(int64_t rows, int64_t vectors, bool vectorised) {
  ForwardPlan plan{};
  if (!vectorised) {
    plan.width = vectors <= 8 * 1024 ? 8 : 0;
  } else {
    plan.width = vectors <= 2 * 256 ? 2 : vectors <= 4 * 512 ? 4 : vectors <= 8 * 1024 ? 8 : 0;
  }
  if (plan.width == 0) return plan;
  const int lanes = static_cast<int>((vectors + plan.width - 1) / plan.width);
  plan.grouped = lanes <= 32;
  if (plan.grouped) {
    while ((1 << plan.lanes_log2) < lanes) ++plan.lanes_log2;
    plan.threads = 128;
    const int64_t groups = plan.threads >> plan.lanes_log2;
    plan.blocks = (rows + groups - 1) / groups;
  } else {
    plan.threads = (lanes + 31) / 32 * 32;
    plan.blocks = rows;
  }
  return plan;
}

// Threads per block at most: as many registers as leave enough loads under way.
template <int V>
inline constexpr int kForwardThreads = V <= 4 ? 512 : 1024;

}  // namespace liger
