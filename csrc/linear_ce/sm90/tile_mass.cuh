// A debug counter: how many tiles of the gradient of the logits have hardly any probability mass. Off by default.
// docs/performance/fused_linear_ce_sm90.md defines it, and has the bound on the error if such tiles were skipped.
#pragma once

#include <cstdint>
#include <iterator>

#include "cross_entropy/rule.cuh"
#include "linear_ce/sm90/epilogues.cuh"

namespace liger::linear_ce {

// The memory of the int64 tensor that liger.debug.tile_mass allocates (python/liger/debug/_tile_mass.py). A tile
// is counted in below[i] if the largest mass among its rows is less than kTileMassThresholds[i].
inline constexpr float kTileMassThresholds[] = {0x1p-12f, 0x1p-16f, 0x1p-20f};
inline constexpr int kTileMassThresholdCount = std::size(kTileMassThresholds);
struct TileMassCounts {
  unsigned long long tiles, tiles_without_target;
  unsigned long long below[kTileMassThresholdCount], below_without_target[kTileMassThresholdCount];
};

// The sums of exponentials per row and tile are those of the logits GEMM, before exponentials are multiplied by
// the derivative of a softcap and before one-hot terms are added: the mass of the row in the tile, times the
// row's total.
struct TileMass {
  ChunkRows chunk;
  const int* index;  // of the valid rows of the chunk
  ce::Targets targets;
  int vocab;
  const float* sums;  // (rows, columns)
  int columns;        // tiles per row
  TileMassCounts* counts;
};

// Where the counts of a device are added; null while the counter is off.
TileMassCounts* tile_mass_counts(int device);
void launch_count_tile_mass(const TileMass& mass, cudaStream_t stream);

}  // namespace liger::linear_ce
