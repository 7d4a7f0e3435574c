// The little that CUDA ops need from torch beyond torch::stable: the current stream, launch errors, allocation.
#pragma once

#include <cuda_runtime.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <vector>

#include "common/checks.h"

namespace liger {

using torch::stable::accelerator::DeviceGuard;

inline cudaStream_t current_stream(const Tensor& tensor) {
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(tensor.get_device_index(), &stream));
  return static_cast<cudaStream_t>(stream);
}

inline void check_cuda(cudaError_t status, const char* op) {
  require(status == cudaSuccess, op, ": ", cudaGetErrorName(status), ": ", cudaGetErrorString(status));
}

// After every launch: a kernel that could not start (no image for this device, too much shared memory) says so here.
inline void check_launch(const char* op) { check_cuda(cudaGetLastError(), op); }

// Attributes never change while the process lives, and cudaGetDeviceProperties takes milliseconds.
struct DeviceAttributes {
  int multiprocessors;
  int capability;  // 10 * major + minor
  int shared_memory_per_block_optin;
};
const DeviceAttributes& device_attributes(int device);

inline Tensor empty(std::vector<int64_t> shape, ScalarType dtype, const Tensor& like) {
  return torch::stable::new_empty(like, shape, dtype);
}

// The stand-in for an output that was not asked for.
inline Tensor no_tensor(ScalarType dtype, const Tensor& like) { return empty({0}, dtype, like); }

inline const void* data(const std::optional<Tensor>& tensor) { return tensor ? tensor->const_data_ptr() : nullptr; }

// CUDA kernels compute float16, bfloat16 and float32; float64 belongs to the torch backend.
void require_cuda_dtype(const char* op, const char* name, const Tensor& tensor);

}  // namespace liger
