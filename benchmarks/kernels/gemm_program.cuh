// What the programs of this folder share: checks, memory, TMA descriptors and launches without torch.
#pragma once

#include <cudaTypedefs.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>

#include "linear_ce/sm90/epilogues.cuh"

namespace {

using namespace liger;
using namespace liger::linear_ce;
using Bf16 = __nv_bfloat16;

void check(cudaError_t status, int line) {
  if (status == cudaSuccess) return;
  std::fprintf(stderr, "line %d: %s\n", line, cudaGetErrorString(status));
  std::exit(1);
}
#define CHECK(call) check(call, __LINE__)

template <typename T>
T* allocate(int64_t count) {
  void* memory = nullptr;
  CHECK(cudaMalloc(&memory, std::max<int64_t>(count, 1) * sizeof(T)));
  CHECK(cudaMemset(memory, 0xff, std::max<int64_t>(count, 1) * sizeof(T)));  // NaN
  return static_cast<T*>(memory);
}

CUtensorMap map_of(const Bf16* memory, int64_t columns, int64_t rows, int64_t panels, int64_t row_stride,
                   int64_t panel_stride, int box_rows, CUtensorMapSwizzle swizzle) {
  static const auto encode = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult result{};
    CHECK(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault,
                                           &result));
    return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(function);
  }();
  const cuuint64_t sizes[3] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows),
                               static_cast<cuuint64_t>(panels)};
  const cuuint64_t strides[2] = {static_cast<cuuint64_t>(row_stride) * 2,
                                 static_cast<cuuint64_t>(panel_stride) * 2};
  const cuuint32_t box[3] = {sm90::kBox, static_cast<cuuint32_t>(box_rows), 1}, steps[3] = {1, 1, 1};
  CUtensorMap map;
  const CUresult status = encode(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3, const_cast<Bf16*>(memory), sizes,
                                 strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle,
                                 CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (status != CUDA_SUCCESS) {
    std::fprintf(stderr, "cuTensorMapEncodeTiled failed with %d\n", static_cast<int>(status));
    std::exit(1);
  }
  return map;
}

template <class Kernel, typename Maps, class Epilogue>
void launch(Kernel kernel, int shared_bytes, const Maps& maps, const Epilogue& epilogue) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = sm90::kCluster;
  attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
  cudaLaunchConfig_t config{};
  config.blockDim = dim3(sm90::kThreads);
  config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
  config.attrs = &attribute;
  config.numAttrs = 1;
  static const int resident = [&] {
    CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes));
    int sms = 0, active = 0;
    CHECK(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 0));
    config.gridDim = dim3(static_cast<unsigned>(sms));
    CHECK(cudaOccupancyMaxActiveClusters(&active, kernel, &config));
    return active;
  }();
  config.gridDim = dim3(static_cast<unsigned>(resident * sm90::kCluster));
  CHECK(cudaLaunchKernelEx(&config, kernel, maps, epilogue));
}

}  // namespace
