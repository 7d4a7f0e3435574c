// SPDX-License-Identifier: BSD-3-Clause

// Launches of the wgmma GEMM: TMA descriptors, the number of resident clusters, the launch configuration.
#pragma once

#include <algorithm>
#include <mutex>
#include <unordered_map>

#include "host/launch/capture.h"
#include "host/launch/shared_memory.h"
#include "host/launch/tensor_map.h"
#include "host/torch.h"
#include "lm_head/sm90/gemm/pingpong.cuh"

namespace liger::lm_head {

// Op name in error messages.
inline constexpr const char* kGemmOp = "fused_linear_ce";

// The TMA descriptor of a matrix, or of panels of one, in boxes of box_rows x kBox 16-bit elements.
inline CUtensorMap map_of(const void* memory, int64_t columns, int64_t rows, int64_t panels,
                          int64_t row_stride, int64_t panel_stride, CUtensorMapSwizzle swizzle,
                          int box_rows = sm90::kBox) {
  return tensor_map(kGemmOp, memory, {columns, rows, panels}, {row_stride, panel_stride},
                    {sm90::kBox, box_rows, 1}, swizzle);
}

inline CUtensorMap matrix_map(const void* memory, int64_t rows, int64_t columns, int64_t stride,
                              int box_rows = sm90::kBox) {
  return map_of(memory, columns, rows, 1, stride, std::max(rows, int64_t{1}) * stride,
                CU_TENSOR_MAP_SWIZZLE_128B, box_rows);
}

inline CUtensorMap matrix_map(const Tensor& matrix, int box_rows = sm90::kBox) {
  // A single row may have any stride, but TMA requires multiples of 16 bytes.
  const int64_t stride = matrix.size(0) > 1 ? matrix.stride(0) : matrix.size(1);
  return matrix_map(matrix.const_data_ptr(), matrix.size(0), matrix.size(1), stride, box_rows);
}

// The op in error messages, the kernel of an epilogue, its shared memory, and the type of its TMA
// descriptors.
template <class Epilogue>
struct GemmOf {
  static constexpr const char* kOp = kGemmOp;
  static constexpr auto kKernel = sm90::gemm_kernel<Epilogue>;
  static constexpr int kSharedBytes = sm90::kSharedBytes<Epilogue>;
  using Maps = sm90::Maps;
};
template <class Epilogue>
  requires requires { Epilogue::kHalves; }
struct GemmOf<Epilogue> {
  static constexpr const char* kOp = kGemmOp;
  static constexpr auto kKernel = sm90::gemm_kernel_pingpong<Epilogue>;
  static constexpr int kSharedBytes = sm90::kPingpongSharedBytes<Epilogue>;
  using Maps = sm90::PingpongMaps;
};

// The result points to `attributes`, which must outlive it.
template <class Epilogue>
cudaLaunchConfig_t launch_config(int blocks, cudaStream_t stream, cudaLaunchAttribute (&attributes)[2],
                                 bool all_resident = false) {
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(sm90::kThreads);
  config.dynamicSmemBytes = GemmOf<Epilogue>::kSharedBytes;
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

// Number of clusters of the GEMM that are active on the device at a time.
template <class Epilogue>
int resident_clusters(int device) {
  static std::mutex mutex;
  static std::unordered_map<int, int> known;
  const std::lock_guard lock(mutex);
  int& clusters = known[device];
  if (clusters == 0) {
    check_cuda(
        allow_shared_memory(reinterpret_cast<const void*>(GemmOf<Epilogue>::kKernel), Carveout::kByDriver),
        GemmOf<Epilogue>::kOp);
    const RelaxedCapture relaxed;
    cudaLaunchAttribute attributes[2]{};
    const cudaLaunchConfig_t config =
        launch_config<Epilogue>(device_attributes(device).sm_count, nullptr, attributes);
    check_cuda(cudaOccupancyMaxActiveClusters(&clusters, GemmOf<Epilogue>::kKernel, &config),
               GemmOf<Epilogue>::kOp);
    require(clusters > 0, GemmOf<Epilogue>::kOp, ": this device runs no clusters of ", sm90::kCluster,
            " blocks with ", GemmOf<Epilogue>::kSharedBytes, " bytes of shared memory");
  }
  return clusters;
}

// all_resident: blocks wait for each other, so all of them must be resident. A cooperative launch guarantees
// residency and cannot deadlock with another kernel over SMs.
template <class Epilogue>
void launch_gemm(const typename GemmOf<Epilogue>::Maps& maps, const Epilogue& epilogue, int device,
                 cudaStream_t stream, bool all_resident = false) {
  cudaLaunchAttribute attributes[2]{};
  const cudaLaunchConfig_t config = launch_config<Epilogue>(
      resident_clusters<Epilogue>(device) * sm90::kCluster, stream, attributes, all_resident);
  check_cuda(cudaLaunchKernelEx(&config, GemmOf<Epilogue>::kKernel, maps, epilogue), GemmOf<Epilogue>::kOp);
}

// Launches an epilogue of the input gradient, which may need semaphores for serial split-K.
template <class Epilogue>
void launch_grad_input(const sm90::Maps& maps, const Epilogue& epilogue, int device, cudaStream_t stream) {
  const int64_t count = sm90::split_k_semaphores(epilogue.chunk.rows, epilogue.hidden, epilogue.k_splits);
  if (count > 0)
    check_cuda(cudaMemsetAsync(epilogue.semaphores, 0, count * sizeof(*epilogue.semaphores), stream),
               kGemmOp);
  launch_gemm(maps, epilogue, device, stream, count > 0);
}

}  // namespace liger::lm_head
