// SPDX-License-Identifier: BSD-3-Clause

// Launches of kernels with thread-block clusters that use most of the shared memory.
#pragma once

#include "host/launch/shared_memory.h"
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

}  // namespace liger
