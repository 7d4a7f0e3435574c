// Launch heuristic of the kernels that stage whole rows in shared memory (norm/resident.cuh).
#pragma once

#include <algorithm>

#include "device/integers.h"
#include "host/cluster_launch.h"
#include "norm/resident.cuh"

namespace liger {

// A row gets one block if one can hold it, else the smallest cluster at two blocks per SM or more, where one
// block computes while others load and store, else the smallest cluster at one block per SM. blocks == 0 in
// the result: a row does not fit.
//   segment            vectors; a slice is a multiple of it
//   streams            tensors whose rows are staged
//   bytes_per_segment  further shared memory per segment
//   slot_bytes         partial result of a warp
inline SmemRowPlan plan_smem_rows(int64_t row_vectors, int segment, int streams, int bytes_per_segment,
                                  int slot_bytes, const DeviceAttributes& device) {
  const auto plan = [&](int blocks, int min_blocks_per_sm) {
    SmemRowPlan r{};
    const int64_t segments = ceil_div(ceil_div(row_vectors, segment), blocks);
    const int64_t bytes = segments * (int64_t{segment} * 16 * streams + bytes_per_segment);
    const auto exchange_bytes = [&](int warps) {
      return kResidentStages * static_cast<int>(sizeof(uint64_t)) + 2 * warps * blocks * slot_bytes;
    };
    // The driver reserves 1 KB of shared memory per resident block.
    const int64_t blocks_per_sm =
        (device.shared_memory_per_block_optin + 1024) / (bytes + exchange_bytes(kResidentWarps) + 1024);
    if (blocks_per_sm < min_blocks_per_sm) return r;
    r.blocks = blocks;
    r.persistent = blocks > 1 || min_blocks_per_sm == 1;
    r.slice = static_cast<int>(segments * segment);
    r.stage = ceil_div(r.slice, kResidentStages);
    // As many threads as can have 64 registers each; then as few as process a stage in the same number of
    // rounds.
    const int occupancy = static_cast<int>(std::min<int64_t>(blocks_per_sm, 8));
    const int max_threads = std::min(kResidentThreads, 1024 / occupancy / 32 * 32);
    const int rounds = ceil_div(r.stage, max_threads);
    r.threads = std::clamp(round_up(ceil_div(r.stage, rounds), 32), 64, max_threads);
    r.shared = static_cast<int>(bytes) + exchange_bytes(r.threads / 32);
    return r;
  };
  if (const SmemRowPlan r = plan(1, 2); r.blocks) return r;
  // One block per SM is as fast as clusters of two blocks at two blocks per SM, and it needs no cluster
  // barrier.
  if (const SmemRowPlan r = plan(1, 1); r.blocks) return r;
  for (const int min_blocks_per_sm : {2, 1}) {
    // Cluster sizes that are no power of two leave more SMs idle.
    for (int blocks = 2; blocks <= kPortableCluster; blocks *= 2) {
      if (const SmemRowPlan r = plan(blocks, min_blocks_per_sm); r.blocks) return r;
    }
  }
  return {};
}

}  // namespace liger
