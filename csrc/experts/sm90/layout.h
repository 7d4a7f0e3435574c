// SPDX-License-Identifier: BSD-3-Clause

// Index arithmetic of the grouped GEMMs: host and device code without CUDA headers.
#pragma once

namespace liger::experts {

// --- gathered rows in shared memory
// -------------------------------------------------------------------------

// A box has 64 elements (128 bytes, 8 vectors of 16 bytes) of each of its rows, with the 128-byte swizzle
// that wgmma reads. The boxes of a tile follow each other, so the rows of all boxes are 128 bytes apart.
constexpr int box_vector_offset(int row, int vector) {
  return row * 128 + ((vector ^ row) & 7) * 16;
}
// A warp of the producer copies kGatherRows rows of a box at a time: lane l copies vector l % 8 of the rows
// l / 8 + 4 i. These rows differ by 4 modulo 8, so with i even and with i odd the vectors of a lane are a
// constant number of bytes apart.
inline constexpr int kGatherWarps = 4, kGatherRows = 32 / 8, kGatherStep = kGatherRows * 128;

// --- accumulators
// -------------------------------------------------------------------------------------------

// In lane l, accumulator 4 j + 2 h + i is row l / 4 + 8 h of the warp's 16 rows and column 8 j + 2 (l % 4) +
// i.
constexpr int sum_index(int j, int h, int i) {
  return 4 * j + 2 * h + i;
}

// Interleaved gate and up: column 2 c of the tile is gate c, and 2 c + 1 is up c, so a lane has column
// 4 j + l % 4 of the product for each j. The lanes of a pair exchange one of their products for j = 2 m and
// 2 m + 1. Then each has two neighbouring columns, in this word of the 8 columns from 8 m on.
constexpr int interleaved_word(int lane) {
  return 2 * (lane & 1) + (lane >> 1 & 1);
}

}  // namespace liger::experts
