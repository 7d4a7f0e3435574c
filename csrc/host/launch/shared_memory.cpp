// SPDX-License-Identifier: BSD-3-Clause
#include "host/launch/shared_memory.h"

#include <mutex>
#include <set>
#include <utility>

#include "host/launch/capture.h"

namespace liger {
namespace {

cudaError_t allow(const void* kernel, int device, Carveout carveout) {
  const RelaxedCapture relaxed;
  cudaFuncAttributes attributes{};
  int max_shared = 0;
  cudaError_t status = cudaFuncGetAttributes(&attributes, kernel);
  if (status == cudaSuccess)
    status = cudaDeviceGetAttribute(&max_shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  if (status == cudaSuccess)
    status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  max_shared - static_cast<int>(attributes.sharedSizeBytes));
  if (status == cudaSuccess && carveout == Carveout::kShared)
    status = cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                  cudaSharedmemCarveoutMaxShared);
  return status;
}

}  // namespace

cudaError_t allow_shared_memory(const void* kernel, Carveout carveout) {
  static std::mutex mutex;
  static std::set<std::pair<const void*, int>> allowed;
  int device = 0;
  if (const cudaError_t status = cudaGetDevice(&device); status != cudaSuccess) return status;
  const std::lock_guard lock(mutex);
  if (allowed.count({kernel, device})) return cudaSuccess;
  const cudaError_t status = allow(kernel, device, carveout);
  if (status == cudaSuccess) allowed.emplace(kernel, device);
  return status;
}

}  // namespace liger
