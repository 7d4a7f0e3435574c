// Launches of kernels whose blocks form thread-block clusters and use most of the shared memory.
#pragma once

#include <algorithm>

#include "host/shared_memory.h"
#include "host/torch.h"

namespace liger {

// The largest portable cluster size.
inline constexpr int kPortableCluster = 8;

// The result points to `cluster`, which must outlive it.
inline cudaLaunchConfig_t cluster_config(int blocks, int threads, int shared_bytes, cudaStream_t stream,
                                         cudaLaunchAttribute& cluster) {
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim.x = static_cast<unsigned>(blocks);
  cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
  config.stream = stream;
  config.attrs = &cluster;
  config.numAttrs = 1;
  return config;
}

// The number of clusters of this launch that can be active on the device at a time; 0 if it cannot run. Sets
// the attributes of the kernel that the launch needs. Cached per kernel and device: the query takes longer
// than a launch.
int max_active_clusters(const char* op, const void* kernel, const cudaLaunchConfig_t& config,
                        const DeviceAttributes& device);

// Launches kernel(arguments..., plan) as min(rows, max_active_clusters) clusters of plan.blocks blocks.
// Returns false if no cluster can be active.
template <typename Plan, typename... Parameters, typename... Arguments>
bool launch_persistent_clusters(const char* op, void (*kernel)(Parameters...), const Plan& plan, int threads,
                                int shared_bytes, int64_t rows, const DeviceAttributes& device,
                                cudaStream_t stream, const Arguments&... arguments) {
  cudaLaunchAttribute cluster{};
  cudaLaunchConfig_t config = cluster_config(plan.blocks, threads, shared_bytes, stream, cluster);
  const int active = max_active_clusters(op, reinterpret_cast<const void*>(kernel), config, device);
  if (active == 0) return false;
  config.gridDim.x = static_cast<unsigned>(std::min<int64_t>(rows, active) * plan.blocks);
  check_cuda(cudaLaunchKernelEx(&config, kernel, arguments..., plan), op);
  return true;
}

}  // namespace liger
