#include "host/cluster_launch.h"

#include <map>
#include <mutex>
#include <tuple>

#include "host/capture.h"

namespace liger {
namespace {

int ask(const char* op, const void* kernel, const cudaLaunchConfig_t& config,
        const DeviceAttributes& device) {
  check_cuda(allow_shared_memory(kernel, Carveout::kShared), op);
  const RelaxedCapture relaxed;
  const unsigned blocks = config.attrs->val.clusterDim.x;
  int held = 0;
  if (blocks == 1) {
    check_cuda(cudaOccupancyMaxActiveBlocksPerMultiprocessor(
                   &held, kernel, static_cast<int>(config.blockDim.x), config.dynamicSmemBytes),
               op);
    return held * device.multiprocessors;
  }
  if (blocks > kPortableCluster) {
    // Not every device has such clusters: it may say so by an error, which is none here.
    if (cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1) != cudaSuccess ||
        cudaOccupancyMaxActiveClusters(&held, kernel, &config) != cudaSuccess) {
      cudaGetLastError();
      return 0;
    }
    return held;
  }
  // Clusters lie in groups of multiprocessors, which they may not fill.
  check_cuda(cudaOccupancyMaxActiveClusters(&held, kernel, &config), op);
  return held;
}

}  // namespace

int held_clusters(const char* op, const void* kernel, const cudaLaunchConfig_t& config,
                  const DeviceAttributes& device) {
  // The attributes of a device are at one address for as long as the process lives.
  using Key = std::tuple<const void*, const DeviceAttributes*, unsigned, unsigned, size_t>;
  static std::mutex mutex;
  static std::map<Key, int> known;
  const Key key{kernel, &device, config.attrs->val.clusterDim.x, config.blockDim.x, config.dynamicSmemBytes};
  const std::lock_guard lock(mutex);
  const auto found = known.find(key);
  if (found != known.end()) return found->second;
  return known.emplace(key, ask(op, kernel, config, device)).first->second;
}

}  // namespace liger
