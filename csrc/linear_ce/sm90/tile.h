// Tile sizes of the wgmma GEMMs of linear_ce/sm90, which the kernels and the planner share.
#pragma once

#include <cstdint>

namespace liger::sm90 {

// Rows and columns of the result per block, and the depth of a pipeline stage.
inline constexpr int kTileM = 128, kTileN = 256, kTileK = 64;
// The hidden size is a multiple of it: TMA fills the rest of the last k-block with zeros, and epilogues write segments of
// 16 columns.
inline constexpr int kHiddenUnit = 16;
// What the epilogue of the logits computes beside exponentials of bfloat16 operands and their sums.
struct LogitsWork {
  bool float16 = false;
  bool metrics = false, squares = false;  // entropy and argmax; with them, sums of squares
  bool bias = false, softcap = false;

  constexpr bool transform() const { return bias || softcap; }
  constexpr bool operator==(const LogitsWork&) const = default;
};
// Builds with -DLIGER_PINGPONG=1: gemm_kernel_pingpong computes the weight gradient of a chunk, and the logits that
// gemm_kernel_overlapped computes otherwise (docs/performance/fused_linear_ce_sm90.md, "A tile per warpgroup").
#ifndef LIGER_PINGPONG
#define LIGER_PINGPONG 0
#endif
inline constexpr bool kPingpong = LIGER_PINGPONG;
inline constexpr int kPingpongColumns = 192;

// Columns of a tile of gemm_kernel_overlapped, of which a thread has two sets of accumulators.
inline constexpr int kOverlappedColumns = 192;
// Columns of a piece of its epilogue, one piece per k-block of the next tile. gemm_kernel computes what is not listed.
struct PieceColumns {
  LogitsWork work;
  int columns;
};
inline constexpr PieceColumns kPieceColumns[] = {
    {{}, 16},
    {{.bias = true}, 8},
    {{.softcap = true}, 8},
    {{.metrics = true}, 8},
    {{.metrics = true, .squares = true}, 8},
};
constexpr int piece_columns(const LogitsWork& work) {
  for (const PieceColumns& pieces : kPieceColumns) {
    if (pieces.work == work) return pieces.columns;
  }
  return 0;
}
// Whether gemm_kernel_overlapped computes the logits: where the next tile has a k-block for every piece.
constexpr bool overlaps_epilogue(int64_t hidden, const LogitsWork& work) {
  const int columns = piece_columns(work);
  if (kPingpong) return columns > 0;
  return columns > 0 && hidden > (kOverlappedColumns / columns - 1) * kTileK;
}
// Classes per tile of the logits, for which there is one sum per row.
constexpr int logits_columns(bool overlapped) {
  return overlapped ? kOverlappedColumns : kTileN;
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
// Tiles of columns of the weight gradient of a chunk.
constexpr int64_t grad_weight_tiles(int64_t hidden) {
  return kPingpong ? (hidden + kPingpongColumns - 1) / kPingpongColumns : column_tiles(hidden);
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
