// Tile sizes of the wgmma GEMMs of linear_ce/sm90, which the kernels and the planner share.
#pragma once

#include <cstdint>

namespace liger::sm90 {

// Rows and columns of the result per block, and the depth of a pipeline stage.
inline constexpr int kTileM = 128, kTileN = 256, kTileK = 64;
// The hidden size is a multiple of it: TMA fills the rest of the last k-block with zeros, and epilogues write segments of
// 16 columns.
inline constexpr int kHiddenUnit = 16;
// Columns of a tile of gemm_kernel_pingpong, which computes the logits: there is one sum per row and tile.
inline constexpr int kPingpongColumns = 192;
template <typename T>
constexpr T logits_tiles(T vocab) {
  return (vocab + kPingpongColumns - 1) / kPingpongColumns;
}
// Columns per panel of an operand that is stored in panels.
inline constexpr int kPanel = 128;

// The columns of a tile of a gradient: equal tiles, as few as with kTileN columns, and a width for which there is a
// kernel. (A narrow last tile would take as many loads for less work, and its clusters would be ahead of the others that
// read the same rows, which are then read from DRAM twice.)
inline constexpr int kTileWidths[] = {192, 224, 240, kTileN};
constexpr int tile_columns(int64_t hidden) {
  const int64_t tiles = (hidden + kTileN - 1) / kTileN;
  for (const int width : kTileWidths) {
    if (tiles * width >= hidden) return width;
  }
  return kTileN;
}
constexpr int64_t column_tiles(int64_t hidden) {
  const int width = tile_columns(hidden);
  return (hidden + width - 1) / width;
}
// Serial split-K of the input gradient: the splits of a tile add to the same float32 sums, one after the other. A semaphore
// per tile, and the sums; none without splits.
constexpr int64_t split_k_semaphores(int64_t rows, int64_t hidden, int64_t k_splits) {
  return k_splits > 1 ? (rows + kTileM - 1) / kTileM * column_tiles(hidden) : 0;
}
constexpr int64_t split_k_sums(int64_t rows, int64_t hidden, int64_t k_splits) {
  return split_k_semaphores(rows, hidden, k_splits) * kTileM * tile_columns(hidden);
}
template <typename T>
constexpr T panels(T columns) {
  return (columns + kPanel - 1) / kPanel;
}
// Whether the last panel of classes, or the last tile of columns of the hidden size, is partial. Kernels of
// their own (kPartialTiles) handle such sizes.
constexpr bool has_partial_panel(int64_t vocab) {
  return vocab % kPanel != 0;
}
constexpr bool has_partial_tiles(int64_t hidden, int64_t vocab) {
  return hidden % kTileN != 0 || has_partial_panel(vocab);
}

}  // namespace liger::sm90
