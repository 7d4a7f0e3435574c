// Chooses the launch of a persistent kernel whose rows are staged in shared memory
// (device/persistent_rows.cuh).
#pragma once

#include <algorithm>

#include "device/persistent_rows.cuh"
#include "host/cluster_launch.h"

namespace liger {

// Takes the candidate with the highest SM utilisation: clusters need SMs of one GPC, so some cluster sizes
// leave SMs idle. Only the device and the row length enter the choice, so a row has the same bits in any
// batch. Arguments: the kernel's parameters before its plan.
template <typename... Arguments>
class PersistentLaunch {
 public:
  using Kernel = void (*)(Arguments..., PersistentPlan);

  PersistentLaunch(const char* op, int64_t row_vectors, const DeviceAttributes& device)
      : op_(op), row_vectors_(row_vectors), device_(device) {}

  // Adds the kernel of a PersistentShape with the smallest cluster in [fewest, most] whose shared memory
  // holds a row, and with the next larger one that does. At equal utilisation the earlier candidate is kept.
  template <typename Shape>
  void add_candidate(Kernel kernel, int fewest = 1, int most = kPortableCluster) {
    const int block_slots = device_.sm_count * Shape::kBlocksPerSm;
    for (int more = 0; more < 2 && utilisation_ < 1.0f; ++more) {
      const PersistentPlan plan =
          Shape::plan(row_vectors_, fewest, most, device_.shared_memory_per_block_optin);
      if (plan.stages == 0) return;
      fewest = plan.blocks + 1;
      cudaLaunchAttribute cluster{};
      const int shared_bytes = Shape::shared_bytes(plan);
      const cudaLaunchConfig_t config =
          cluster_config(plan.blocks, Shape::kThreads, shared_bytes, nullptr, cluster);
      const int active = max_active_clusters(op_, reinterpret_cast<const void*>(kernel), config, device_);
      const float utilisation =
          std::min(1.0f, static_cast<float>(active * plan.blocks) / static_cast<float>(block_slots));
      if (utilisation <= utilisation_) continue;
      kernel_ = kernel, plan_ = plan, threads_ = Shape::kThreads, shared_bytes_ = shared_bytes;
      utilisation_ = utilisation;
    }
  }

  // The cluster size; 0 without a candidate for this row length.
  int blocks() const { return kernel_ != nullptr ? plan_.blocks : 0; }

  // Launches the kernel. Returns false without a candidate.
  bool run(int64_t rows, cudaStream_t stream, const Arguments&... arguments) const {
    return kernel_ != nullptr && launch_persistent_clusters(op_, kernel_, plan_, threads_, shared_bytes_,
                                                            rows, device_, stream, arguments...);
  }

 private:
  const char* op_;
  int64_t row_vectors_;
  const DeviceAttributes& device_;
  Kernel kernel_ = nullptr;
  PersistentPlan plan_{};
  int threads_ = 0, shared_bytes_ = 0;
  float utilisation_ = 0.0f;  // resident blocks over the blocks that all SMs have room for
};

}  // namespace liger
