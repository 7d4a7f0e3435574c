// How rows are spread over shared memory by kernels that keep them there (norm/resident.cuh).
#pragma once

#include <algorithm>

#include "device/integers.h"
#include "host/cluster_launch.h"
#include "norm/resident.cuh"

namespace liger {

// A slice consists of whole units of `unit` vectors of each of so many streams, with bytes_per_unit of shared
// memory beside them; slot_bytes: what a warp leaves for the others when they meet. Two or more blocks on a
// SM, one of which computes while others load and store; of rows that no cluster keeps so, the
// fewest blocks that hold one.
inline Residence plan_residence(int64_t row_vectors, int unit, int streams, int bytes_per_unit,
                                int slot_bytes, const DeviceAttributes& device) {
  const auto place = [&](int blocks, int fewest_resident) {
    Residence r{};
    const int64_t units = ceil_div(ceil_div(row_vectors, unit), blocks);
    const int64_t bytes = units * (int64_t{unit} * 16 * streams + bytes_per_unit);
    const auto meeting_bytes = [&](int warps) {
      return kResidentStages * static_cast<int>(sizeof(uint64_t)) + 2 * warps * blocks * slot_bytes;
    };
    // A block takes 1 KB of an SM beside what it can use.
    const int64_t fit =
        (device.shared_memory_per_block_optin + 1024) / (bytes + meeting_bytes(kResidentWarps) + 1024);
    if (fit < fewest_resident) return r;
    r.blocks = blocks;
    r.stay = blocks > 1 || fewest_resident == 1;
    r.slice = static_cast<int>(units * unit);
    r.stage = ceil_div(r.slice, kResidentStages);
    // As many threads as have 64 registers, busy for whole rounds of a stage.
    const int resident = static_cast<int>(std::min<int64_t>(fit, 8));
    const int most_threads = std::min(kResidentThreads, 1024 / resident / 32 * 32);
    const int rounds = ceil_div(r.stage, most_threads);
    r.threads = std::clamp(round_up(ceil_div(r.stage, rounds), 32), 64, most_threads);
    r.shared = static_cast<int>(bytes) + meeting_bytes(r.threads / 32);
    return r;
  };
  if (const Residence r = place(1, 2); r.blocks) return r;
  // A block alone is as fast as two pairs of blocks, and it meets nobody.
  if (const Residence r = place(1, 1); r.blocks) return r;
  for (const int fewest_resident : {2, 1}) {
    // Clusters of other sizes fill the device less.
    for (int blocks = 2; blocks <= kPortableCluster; blocks *= 2) {
      if (const Residence r = place(blocks, fewest_resident); r.blocks) return r;
    }
  }
  return {};
}

}  // namespace liger
