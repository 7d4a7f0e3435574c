// Launches of the wgmma GEMM: TMA descriptors, the number of resident clusters, the launch configuration.
#pragma once

#include <algorithm>
#include <mutex>
#include <unordered_map>

#include "host/capture.h"
#include "host/shared_memory.h"
#include "host/tensor_map.h"
#include "host/torch.h"
#include "linear_ce/sm90/gemm.cuh"

namespace liger::linear_ce {

// The op that errors name.
inline constexpr const char* kGemmOp = "fused_linear_ce";

// The TMA descriptor of a matrix, or of panels of one, in boxes of kBox x kBox elements.
inline CUtensorMap map_of(const __nv_bfloat16* memory, int64_t columns, int64_t rows, int64_t panels,
                          int64_t row_stride, int64_t panel_stride, CUtensorMapSwizzle swizzle) {
  return tensor_map(kGemmOp, memory, {columns, rows, panels}, {row_stride, panel_stride},
                    {sm90::kBox, sm90::kBox, 1}, swizzle);
}

inline CUtensorMap matrix_map(const __nv_bfloat16* memory, int64_t rows, int64_t columns, int64_t stride) {
  return map_of(memory, columns, rows, 1, stride, std::max(rows, int64_t{1}) * stride,
                CU_TENSOR_MAP_SWIZZLE_128B);
}

inline const __nv_bfloat16* elements(const Tensor& matrix) {
  return static_cast<const __nv_bfloat16*>(matrix.const_data_ptr());
}
inline CUtensorMap matrix_map(const Tensor& matrix) {
  return matrix_map(elements(matrix), matrix.size(0), matrix.size(1), matrix.stride(0));
}

// The result points to `attributes`, which must outlive it.
template <class Epilogue>
cudaLaunchConfig_t launch_config(int blocks, cudaStream_t stream, cudaLaunchAttribute (&attributes)[2],
                                 bool all_resident = false) {
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(sm90::kThreads);
  config.dynamicSmemBytes = sm90::kSharedBytes;
  config.stream = stream;
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim.x = sm90::kCluster;
  attributes[0].val.clusterDim.y = attributes[0].val.clusterDim.z = 1;
  attributes[1].id = cudaLaunchAttributeCooperative;
  attributes[1].val.cooperative = 1;
  config.attrs = attributes;
  config.numAttrs = all_resident ? 2 : 1;
  return config;
}

// Clusters of the GEMM that are active on the device at a time.
template <class Epilogue>
int resident_clusters(int device) {
  static std::mutex mutex;
  static std::unordered_map<int, int> known;
  const std::lock_guard lock(mutex);
  int& clusters = known[device];
  if (clusters == 0) {
    check_cuda(
        allow_shared_memory(reinterpret_cast<const void*>(sm90::gemm_kernel<Epilogue>), Carveout::kByDriver),
        kGemmOp);
    const RelaxedCapture relaxed;
    cudaLaunchAttribute attributes[2]{};
    const cudaLaunchConfig_t config =
        launch_config<Epilogue>(device_attributes(device).sm_count, nullptr, attributes);
    check_cuda(cudaOccupancyMaxActiveClusters(&clusters, sm90::gemm_kernel<Epilogue>, &config), kGemmOp);
    require(clusters > 0, kGemmOp, ": this device runs no clusters of ", sm90::kCluster, " blocks with ",
            sm90::kSharedBytes, " bytes of shared memory");
  }
  return clusters;
}

// all_resident: blocks wait for each other, so all of them must be resident. A cooperative launch guarantees
// it: no other kernel can hold an SM that this one waits for while it waits for an SM of this one.
template <class Epilogue>
void launch_gemm(const sm90::Maps& maps, const Epilogue& epilogue, int device, cudaStream_t stream,
                 bool all_resident = false) {
  cudaLaunchAttribute attributes[2]{};
  const cudaLaunchConfig_t config = launch_config<Epilogue>(
      resident_clusters<Epilogue>(device) * sm90::kCluster, stream, attributes, all_resident);
  check_cuda(cudaLaunchKernelEx(&config, sm90::gemm_kernel<Epilogue>, maps, epilogue), kGemmOp);
}

}  // namespace liger::linear_ce
