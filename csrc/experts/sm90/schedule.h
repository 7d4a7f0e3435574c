// SPDX-License-Identifier: BSD-3-Clause

// Which tile a cluster of two blocks computes in a grouped GEMM: host and device code without CUDA headers.
//
// Rows are sorted by expert. Two row tiles of an expert make a pair: both blocks of the cluster multiply by
// the same columns of B, and each loads half of them for both. A last row tile without a partner is computed
// by both blocks, each with a column tile of its own, so that rows are rounded up to kRows and not to 2
// kRows.
#pragma once

#include "device/integers.h"
#include "lm_head/sm90/sizes.h"

namespace liger::experts {

// Rows and columns of a tile, and pairs of row tiles that run along the columns together, for reuse in L2.
inline constexpr int kRows = 128, kColumns = sm90::kPingpongColumns, kGroupPairs = 8;
// The prefix table of a block is in its shared memory.
inline constexpr int kMaxExperts = 1024;

// The work of a cluster is counted in units, a tile for each of its blocks.
constexpr int units_of(int rows, int column_tiles) {
  const int row_tiles = ceil_div(rows, kRows);
  return row_tiles / 2 * column_tiles + row_tiles % 2 * ceil_div(column_tiles, 2);
}

struct ExpertTile {
  int expert;
  int first_row, rows;  // in the sorted rows; rows is at most kRows, and 0 for a block without a tile
  int column_tile;
  bool paired;       // both blocks have this column tile
  int row_tile = 0;  // of the gradient of a matrix, which sums over `rows` rows, any number
};

// The tile of block `rank` in unit `unit` of an expert with the rows from `begin` to `end`. A block without a
// tile repeats the last column tile, so that both blocks take the same number of steps.
constexpr ExpertTile tile_of(int unit, int rank, int expert, int begin, int end, int column_tiles) {
  const int pairs = ceil_div(end - begin, kRows) / 2;
  if (unit < pairs * column_tiles) {
    const int first = unit / (kGroupPairs * column_tiles) * kGroupPairs;
    const int left = pairs - first, width = left < kGroupPairs ? left : kGroupPairs;
    const int within = unit - first * column_tiles;
    const int row = begin + ((first + within % width) * 2 + rank) * kRows;
    return {expert, row, end - row < kRows ? end - row : kRows, within / width, true};
  }
  const int column = (unit - pairs * column_tiles) * 2 + rank, row = begin + pairs * 2 * kRows;
  const bool has_tile = column < column_tiles;
  return {expert, row, has_tile ? end - row : 0, has_tile ? column : column_tiles - 1, false};
}

// The expert of unit t: the last e with first_units[e] <= t. first_units: (experts + 1), the number of units
// of all experts before e.
constexpr int expert_of(const int* first_units, int experts, int t) {
  int low = 0, high = experts;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (first_units[middle] <= t ? low : high) = middle;
  }
  return low;
}

// Gradients of matrices have equal numbers of tiles for every expert. The blocks of a cluster have
// neighbouring row tiles; if their number is odd, the last one of an expert has none for the second block.
constexpr int weight_units_of(int row_tiles, int column_tiles) {
  return ceil_div(row_tiles, 2) * column_tiles;
}
constexpr ExpertTile weight_tile_of(int unit, int rank, int expert, int begin, int end, int row_tiles) {
  const int pairs = ceil_div(row_tiles, 2);
  return {expert, begin, end - begin, unit / pairs, true, unit % pairs * 2 + rank};
}

}  // namespace liger::experts
