// SPDX-License-Identifier: BSD-3-Clause

// Chooses and runs the launch of a kernel that stages rows in shared memory (device/smem_rows.cuh).
#pragma once

#include <algorithm>
#include <climits>

#include "device/smem_rows.cuh"
#include "host/launch/cluster.h"

namespace liger {

// The number of clusters of a launch.
enum class Grid {
  kClusterPerRow,  // the other blocks of an SM hide the latency of a row, and the hardware balances the rows
  kPersistent,     // the active ones; each loops over rows and loads the next row early
};

// Takes the candidate with the highest SM utilisation: clusters need SMs of one GPC, so some cluster sizes
// leave SMs idle. Candidates after one that leaves few SMs idle are not considered: a larger cluster has
// smaller slices and synchronises more blocks. Only the device and the row length enter the choice, so a row
// has the same bits in any batch. Arguments: the kernel's parameters before its plan.
template <typename... Arguments>
class SmemRowLaunch {
 public:
  using Kernel = void (*)(Arguments..., SmemRowPlan);

  // part_bytes: as in SmemRowPlan.
  SmemRowLaunch(const char* op, int64_t row_vectors, const DeviceAttributes& device, int part_bytes = 0)
      : op_(op), row_vectors_(row_vectors), device_(device), part_bytes_(part_bytes) {}

  // Adds the kernel of a SmemRowShape with the smallest cluster in [min_blocks, max_blocks] whose shared
  // memory holds a row, and with the next larger cluster that holds it. At equal utilisation the earlier
  // candidate is kept.
  template <typename Shape>
  void add_candidate(Kernel kernel, Grid grid, int min_blocks = 1, int max_blocks = kPortableCluster) {
    const int block_slots = device_.sm_count * Shape::kBlocksPerSm;
    for (int more = 0; more < 2 && utilisation_ < kEnoughUtilisation; ++more) {
      const SmemRowPlan plan = Shape::plan(row_vectors_, min_blocks, max_blocks,
                                           device_.shared_memory_per_block_optin, part_bytes_);
      if (plan.stages == 0) return;
      min_blocks = plan.blocks + 1;
      cudaLaunchAttribute cluster{};
      const int shared_bytes = Shape::shared_bytes(plan);
      const cudaLaunchConfig_t config =
          cluster_config(plan.blocks, Shape::kThreads, shared_bytes, nullptr, cluster);
      const int active = max_active_clusters(op_, reinterpret_cast<const void*>(kernel), config, device_);
      const float utilisation =
          std::min(1.0f, static_cast<float>(active * plan.blocks) / static_cast<float>(block_slots));
      if (utilisation <= utilisation_) continue;
      kernel_ = kernel, plan_ = plan, threads_ = Shape::kThreads, shared_bytes_ = shared_bytes;
      clusters_ = grid == Grid::kPersistent ? active : INT_MAX;
      utilisation_ = utilisation;
    }
  }

  // The cluster size; 0 without a candidate for this row length.
  int blocks() const { return kernel_ != nullptr ? plan_.blocks : 0; }

  // Launches the kernel. Returns false without a candidate.
  bool run(int64_t rows, cudaStream_t stream, const Arguments&... arguments) const {
    if (kernel_ == nullptr) return false;
    const int64_t clusters = std::min<int64_t>(rows, clusters_);
    require(clusters * plan_.blocks <= INT_MAX, op_, ": ", rows, " rows are more than one launch can take");
    cudaLaunchAttribute cluster{};
    cudaLaunchConfig_t config = cluster_config(plan_.blocks, threads_, shared_bytes_, stream, cluster);
    config.gridDim.x = static_cast<unsigned>(clusters * plan_.blocks);
    check_cuda(cudaLaunchKernelEx(&config, kernel_, arguments..., plan_), op_);
    return true;
  }

 private:
  static constexpr float kEnoughUtilisation = 0.97f;

  const char* op_;
  int64_t row_vectors_;
  const DeviceAttributes& device_;
  int part_bytes_;
  Kernel kernel_ = nullptr;
  SmemRowPlan plan_{};
  int threads_ = 0, shared_bytes_ = 0;
  int64_t clusters_ = 0;      // at most
  float utilisation_ = 0.0f;  // resident blocks over the blocks that all SMs have room for
};

}  // namespace liger
