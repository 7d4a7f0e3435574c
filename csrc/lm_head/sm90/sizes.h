// SPDX-License-Identifier: BSD-3-Clause

// Sizes and limits for the kernels of lm_head/sm90, its planner, and the Python code that allocates its
// memory. Python reads them through the op plan_constants (planner_ops.cpp).
#pragma once

#include <cstddef>
#include <cstdint>

namespace liger::sm90 {

// Rows and columns of a block's result tile, and the depth of a pipeline stage.
inline constexpr int kTileM = 128, kTileN = 256, kTileK = 64;
// Blocks per cluster. All have the same columns; each has kTileM rows.
inline constexpr int kCluster = 2;
// The generic engine is faster for batches with fewer rows.
inline constexpr int64_t kMinRows = 256;
// The hidden size must be a multiple of kHiddenUnit: TMA fills the rest of the last k-block with zeros, and
// epilogues write segments of 16 columns.
inline constexpr int kHiddenUnit = 16;
// The tanh of the epilogue has an absolute error of 1e-7, which a softcap multiplies. The generic engine
// computes calls with a larger one.
inline constexpr int kMaxSoftcap = 1024;
// Columns of a tile of gemm_kernel_pingpong, which computes the logits: there is one sum per row and tile.
inline constexpr int kPingpongColumns = 192;
template <typename T>
constexpr T logits_tiles(T vocab) {
  return (vocab + kPingpongColumns - 1) / kPingpongColumns;
}
// Columns per panel of an operand that is stored in panels.
inline constexpr int kPanel = 128;
// Number of float32 values per row that the forward of log-probabilities keeps: KeptRow of
// logprobs/kept_rows.cuh.
inline constexpr int kKeptNumbers = 4;
// Number of values per row that the ranks of a sharded vocabulary exchange: a reference and the sum of the
// exponentials relative to the reference; with metrics also the sum of exponentials times logits, relative to
// the reference, and the two words of the key of the largest logit.
inline constexpr int kRankNumbers = 2, kRankNumbersWithMetrics = 5;

// Tile widths, in columns, for which each gradient has kernels. The weight gradient has no 320: its epilogue
// leaves shared memory for only three stages of that width.
inline constexpr int kGradInputWidths[] = {kTileN, 240, 224, 192, 320};
inline constexpr int kGradWeightWidths[] = {kTileN, 240, 224, 192};
// Returns the first width that divides the hidden size. If no width does, returns the narrowest width that
// needs no more tiles than kTileN. (A narrow last tile takes as many loads for less work, and its clusters
// run ahead of the other clusters that read the same rows; the rows are then read from DRAM twice.)
template <size_t kCount>
constexpr int tile_columns(int64_t hidden, const int (&widths)[kCount]) {
  for (const int width : widths) {
    if (hidden % width == 0) return width;
  }
  const int64_t tiles = (hidden + kTileN - 1) / kTileN;
  int narrowest = kTileN;
  for (const int width : widths) {
    if (width < narrowest && tiles * width >= hidden) narrowest = width;
  }
  return narrowest;
}
constexpr int64_t column_tiles(int64_t hidden, int width) {
  return (hidden + width - 1) / width;
}
constexpr int grad_input_columns(int64_t hidden) {
  return tile_columns(hidden, kGradInputWidths);
}
constexpr int grad_weight_columns(int64_t hidden) {
  return tile_columns(hidden, kGradWeightWidths);
}
// Serial split-K of the input gradient: the splits of a tile add to the same float32 sums, one after the
// other. These are the numbers of semaphores (one per tile) and of sums; both are 0 without splits.
constexpr int64_t split_k_semaphores(int64_t rows, int64_t hidden, int64_t k_splits) {
  return k_splits > 1 ? (rows + kTileM - 1) / kTileM * column_tiles(hidden, grad_input_columns(hidden)) : 0;
}
constexpr int64_t split_k_sums(int64_t rows, int64_t hidden, int64_t k_splits) {
  return split_k_semaphores(rows, hidden, k_splits) * kTileM * grad_input_columns(hidden);
}
template <typename T>
constexpr T panels(T columns) {
  return (columns + kPanel - 1) / kPanel;
}
// True if the last panel of classes, or the last tile of hidden columns, is partial. Separate kernels
// (kPartialTiles) handle such sizes.
constexpr bool has_partial_panel(int64_t vocab) {
  return vocab % kPanel != 0;
}
constexpr bool has_partial_tiles(int64_t hidden, int64_t vocab) {
  return hidden % kTileN != 0 || has_partial_panel(vocab);
}

}  // namespace liger::sm90
