// SPDX-License-Identifier: BSD-3-Clause
#include "host/launch/tensor_map.h"

#include "host/torch.h"

namespace liger {
namespace {

using Encode = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                            const cuuint64_t*, const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave,
                            CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

// Resolved at run time: the driver is not linked, so the library loads on machines without it.
Encode encode_function() {
  static const Encode encode = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult result{};
#if CUDART_VERSION >= 12050
    const cudaError_t status = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000,
                                                                cudaEnableDefault, &result);
#else
    const cudaError_t status =
        cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &function, cudaEnableDefault, &result);
#endif
    const bool available = status == cudaSuccess && result == cudaDriverEntryPointSuccess;
    return available ? reinterpret_cast<Encode>(function) : nullptr;
  }();
  return encode;
}

}  // namespace

bool has_tensor_maps() {
  return encode_function() != nullptr;
}

CUtensorMap tensor_map(const char* op, const void* memory, std::array<int64_t, 3> sizes,
                       std::array<int64_t, 2> strides, std::array<int, 3> box, CUtensorMapSwizzle swizzle) {
  constexpr int kElementBytes = 2;
  cuuint64_t dims[3], bytes[2];
  cuuint32_t box_dims[3], steps[3] = {1, 1, 1};
  for (int i = 0; i < 3; ++i) dims[i] = static_cast<cuuint64_t>(sizes[i]);
  for (int i = 0; i < 2; ++i) bytes[i] = static_cast<cuuint64_t>(strides[i]) * kElementBytes;
  for (int i = 0; i < 3; ++i) box_dims[i] = static_cast<cuuint32_t>(box[i]);
  CUtensorMap map;
  const CUresult status =
      encode_function()(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3, const_cast<void*>(memory), dims, bytes,
                        box_dims, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle,
                        CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  require(status == CUDA_SUCCESS, op, ": cuTensorMapEncodeTiled failed with ", static_cast<int>(status));
  return map;
}

}  // namespace liger
