// Which kernel takes rows that stay in shared memory (device/persistent_rows.cuh), in how many blocks.
#pragma once

#include <algorithm>

#include "device/persistent_rows.cuh"
#include "host/cluster_launch.h"

namespace liger {

// Of those considered, the kernel and the plan that leave the fewest multiprocessors without work, since
// clusters do not fill all groups of them. The device and the length of rows alone decide, so that a row has
// the same bits in any batch. Arguments: of the kernels, before their plan.
template <typename... Arguments>
class Placement {
 public:
  using Kernel = void (*)(Arguments..., PersistentPlan);

  Placement(const char* op, int64_t row_vectors, const DeviceAttributes& device)
      : op_(op), row_vectors_(row_vectors), device_(device) {}

  // The instance of a PersistentShape, with the fewest blocks for a row, from so many to so many, or one
  // more. Of equal ones the first considered stays.
  template <typename Shape>
  void consider(Kernel kernel, int fewest = 1, int most = kPortableCluster) {
    const int room = device_.multiprocessors * Shape::kResident;
    for (int more = 0; more < 2 && filled_ < 1.0f; ++more) {
      const PersistentPlan plan =
          Shape::plan(row_vectors_, fewest, most, device_.shared_memory_per_block_optin);
      if (plan.pieces == 0) return;
      fewest = plan.blocks + 1;
      cudaLaunchAttribute cluster{};
      const int shared_bytes = Shape::shared_bytes(plan);
      const cudaLaunchConfig_t config =
          in_clusters(plan.blocks, Shape::kThreads, shared_bytes, nullptr, cluster);
      const int held = held_clusters(op_, reinterpret_cast<const void*>(kernel), config, device_);
      const float share = std::min(1.0f, static_cast<float>(held * plan.blocks) / static_cast<float>(room));
      if (share <= filled_) continue;
      kernel_ = kernel, plan_ = plan, threads_ = Shape::kThreads, shared_bytes_ = shared_bytes;
      filled_ = share;
    }
  }

  // Blocks of a row; 0 where no kernel considered takes such rows.
  int blocks() const { return kernel_ != nullptr ? plan_.blocks : 0; }

  // False there.
  bool launch(int64_t rows, cudaStream_t stream, const Arguments&... arguments) const {
    return kernel_ != nullptr &&
           launch_staying(op_, kernel_, plan_, threads_, shared_bytes_, rows, device_, stream, arguments...);
  }

 private:
  const char* op_;
  int64_t row_vectors_;
  const DeviceAttributes& device_;
  Kernel kernel_ = nullptr;
  PersistentPlan plan_{};
  int threads_ = 0, shared_bytes_ = 0;
  float filled_ = 0.0f;  // share of the blocks that the multiprocessors have room for
};

}  // namespace liger
