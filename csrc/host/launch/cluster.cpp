// SPDX-License-Identifier: BSD-3-Clause
#include "host/launch/cluster.h"

#include <map>
#include <mutex>
#include <tuple>

#include "host/launch/capture.h"

namespace liger {
namespace {

int query(const char* op, const void* kernel, const cudaLaunchConfig_t& config,
          const DeviceAttributes& device) {
  check_cuda(allow_shared_memory(kernel, Carveout::kShared), op);
  const RelaxedCapture relaxed;
  const unsigned blocks = config.attrs->val.clusterDim.x;
  int active = 0;
  if (blocks == 1) {
    check_cuda(cudaOccupancyMaxActiveBlocksPerMultiprocessor(
                   &active, kernel, static_cast<int>(config.blockDim.x), config.dynamicSmemBytes),
               op);
    return active * device.sm_count;
  }
  if (blocks > kPortableCluster) {
    // A device without non-portable cluster sizes returns an error, which must not reach the next launch.
    if (cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1) != cudaSuccess ||
        cudaOccupancyMaxActiveClusters(&active, kernel, &config) != cudaSuccess) {
      cudaGetLastError();
      return 0;
    }
    return active;
  }
  // The result is less than sm_count / blocks if the number of SMs in a GPC is not a multiple of the cluster
  // size.
  check_cuda(cudaOccupancyMaxActiveClusters(&active, kernel, &config), op);
  return active;
}

}  // namespace

int max_active_clusters(const char* op, const void* kernel, const cudaLaunchConfig_t& config,
                        const DeviceAttributes& device) {
  // The address of the attributes identifies the device: they live as long as the process.
  using Key = std::tuple<const void*, const DeviceAttributes*, unsigned, unsigned, size_t>;
  static std::mutex mutex;
  static std::map<Key, int> cache;
  const Key key{kernel, &device, config.attrs->val.clusterDim.x, config.blockDim.x, config.dynamicSmemBytes};
  const std::lock_guard lock(mutex);
  const auto found = cache.find(key);
  if (found != cache.end()) return found->second;
  return cache.emplace(key, query(op, kernel, config, device)).first->second;
}

}  // namespace liger
