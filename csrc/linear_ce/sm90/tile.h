// Tile sizes of the wgmma GEMMs of linear_ce/sm90, which the kernels and the planner share.
#pragma once

namespace liger::sm90 {

// Rows and columns of the result per block, and the depth of a pipeline stage.
inline constexpr int kTileM = 128, kTileN = 256, kTileK = 64;
// Columns per panel of an operand that is stored in panels.
inline constexpr int kPanel = 128;

}  // namespace liger::sm90
