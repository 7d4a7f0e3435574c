// Tile sizes of the wgmma GEMMs of linear_ce/sm90, which the kernels and the planner share.
#pragma once

#include <cstdint>

namespace liger::sm90 {

// Rows and columns of the result per block, and the depth of a pipeline stage.
inline constexpr int kTileM = 128, kTileN = 256, kTileK = 64;
// Columns per panel of an operand that is stored in panels.
inline constexpr int kPanel = 128;

template <typename T>
constexpr T column_tiles(T columns) {
  return (columns + kTileN - 1) / kTileN;
}
template <typename T>
constexpr T panels(T columns) {
  return (columns + kPanel - 1) / kPanel;
}
// Whether the last tile of columns of the hidden size, or the last panel of classes, is partial. Kernels of
// their own (kPartialTiles) handle such sizes.
constexpr bool has_partial_tiles(int64_t hidden, int64_t vocab) {
  return hidden % kTileN != 0 || vocab % kPanel != 0;
}

}  // namespace liger::sm90
