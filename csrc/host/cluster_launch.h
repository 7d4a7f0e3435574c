// Launches of kernels whose blocks form clusters and take most of the shared memory.
#pragma once

#include <algorithm>

#include "host/shared_memory.h"
#include "host/torch.h"

namespace liger {

// The largest cluster that every device with clusters promises.
inline constexpr int kPortableCluster = 8;

// The config points to the attribute.
inline cudaLaunchConfig_t in_clusters(int blocks, int threads, int shared_bytes, cudaStream_t stream,
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

// How many clusters of this launch the device holds at a time, 0 where it holds none. The kernel gets what it
// needs for that once per device: asking takes longer than a launch.
int held_clusters(const char* op, const void* kernel, const cudaLaunchConfig_t& config,
                  const DeviceAttributes& device);

// Runs kernel(arguments..., plan) in as many clusters of plan.blocks blocks as the device holds at a time, at
// most one for each row. False where it holds none.
template <typename Plan, typename... Parameters, typename... Arguments>
bool launch_staying(const char* op, void (*kernel)(Parameters...), const Plan& plan, int threads,
                    int shared_bytes, int64_t rows, const DeviceAttributes& device, cudaStream_t stream,
                    const Arguments&... arguments) {
  cudaLaunchAttribute cluster{};
  cudaLaunchConfig_t config = in_clusters(plan.blocks, threads, shared_bytes, stream, cluster);
  const int held = held_clusters(op, reinterpret_cast<const void*>(kernel), config, device);
  if (held == 0) return false;
  config.gridDim.x = static_cast<unsigned>(std::min<int64_t>(rows, held) * plan.blocks);
  check_cuda(cudaLaunchKernelEx(&config, kernel, arguments..., plan), op);
  return true;
}

}  // namespace liger
