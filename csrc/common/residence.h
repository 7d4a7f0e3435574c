// How rows are spread over shared memory, and the launch of kernels that keep them there
// (kernels/resident.cuh).
#pragma once

#include <algorithm>

#include "common/integers.h"
#include "common/torch.h"
#include "kernels/resident.cuh"

namespace liger {

// Beside its slices a block has `own_bytes` of shared memory, and own_bytes_per_unit for each unit of its
// slice. A slice consists of whole units of `unit` vectors. As many blocks on a multiprocessor as fit, since
// one computes while others load and store; rows that leave room for one block alone are spread over
// clusters.
inline Residence plan_residence(int64_t row_vectors, int unit, int streams, int own_bytes,
                                int own_bytes_per_unit, const DeviceAttributes& device) {
  const auto place = [&](int blocks, int most_resident, int fewest_resident) {
    Residence r{};
    const int64_t units = ceil_div(ceil_div(row_vectors, unit), blocks);
    const int64_t bytes = units * (int64_t{unit} * 16 * streams + own_bytes_per_unit);
    // A block takes 1 KB of a multiprocessor beside what it can use.
    const int64_t fit = (device.shared_memory_per_block_optin + 1024) / (bytes + own_bytes + 1024);
    r.resident = static_cast<int>(std::min<int64_t>(fit, most_resident));
    if (r.resident < fewest_resident) return r;
    r.blocks = blocks;
    r.slice = static_cast<int>(units * unit);
    r.stage = ceil_div(r.slice, kResidentStages);
    // Four vectors for a thread, as many threads as have 64 registers.
    const int most_threads = std::min(kResidentThreads, 1024 / r.resident / 32 * 32);
    r.threads = std::clamp(ceil_div(r.slice, 4 * 32) * 32, 64, most_threads);
    r.shared = static_cast<int>(bytes);
    return r;
  };
  // Clusters of other sizes fill the device less. Of rows too long for two blocks of the largest, the fewest.
  for (const int fewest_resident : {2, 1}) {
    for (int blocks = 1; blocks <= kResidentBlocks; blocks *= 2) {
      if (const Residence r = place(blocks, blocks == 1 ? 8 : 3, fewest_resident); r.blocks) return r;
    }
  }
  return {};
}

// Blocks that fill the device, but not more than one, or one cluster, for a row. own_bytes: as above.
template <typename Kernel, typename... Arguments>
void launch_resident(const char* op, Kernel kernel, const Residence& r, int64_t rows, int own_bytes,
                     const DeviceAttributes& device, cudaStream_t stream, const Arguments&... arguments) {
  const void* const function = reinterpret_cast<const void*>(kernel);
  // The same value in every call: another thread may launch this kernel for other rows in between.
  check_cuda(cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  device.shared_memory_per_block_optin - own_bytes),
             op);
  check_cuda(cudaFuncSetAttribute(function, cudaFuncAttributePreferredSharedMemoryCarveout,
                                  cudaSharedmemCarveoutMaxShared),
             op);
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim.x = static_cast<unsigned>(r.blocks);
  cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(r.blocks));
  config.blockDim = dim3(static_cast<unsigned>(r.threads));
  config.dynamicSmemBytes = static_cast<size_t>(r.shared);
  config.stream = stream;
  config.attrs = &cluster;
  config.numAttrs = 1;
  int held = device.multiprocessors * r.resident;
  if (r.blocks > 1) {
    // Clusters lie in groups of multiprocessors, which they may not fill.
    check_cuda(cudaOccupancyMaxActiveClusters(&held, kernel, &config), op);
    require(held > 0, op, ": no cluster of ", r.blocks, " blocks fits this device");
  }
  config.gridDim.x = static_cast<unsigned>(std::min<int64_t>(rows, held) * r.blocks);
  check_cuda(cudaLaunchKernelEx(&config, kernel, arguments..., r), op);
}

}  // namespace liger
