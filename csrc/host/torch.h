// The little that CUDA ops need from torch beyond torch::stable: the current stream, launch errors,
// allocation.
#pragma once

#include <cuda_runtime.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <vector>

#include "device/rows.cuh"
#include "host/checks.h"
#include "host/loaded_code.h"

namespace liger {

using torch::stable::accelerator::DeviceGuard;

inline cudaStream_t current_stream(const Tensor& tensor) {
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(tensor.get_device_index(), &stream));
  return static_cast<cudaStream_t>(stream);
}

// Throws unless the status of a call of the CUDA runtime is success.
void check_cuda(cudaError_t status, const char* op);

// After every launch: a kernel that could not start (no image for this device, too much shared memory) says
// so here. The runtime is linked statically, so no other library's calls leave an error here.
inline void check_launch(const char* op) {
  check_cuda(cudaGetLastError(), op);
}

// Attributes never change while the process lives, and cudaGetDeviceProperties takes milliseconds.
struct DeviceAttributes {
  int multiprocessors;
  int shared_memory_per_block_optin;
  LoadedCode code;
};
const DeviceAttributes& device_attributes(int device);

// A contiguous tensor on the device of another one, and one of the shape, dtype and, where dense, strides of
// x. Not torch::stable::new_empty and empty_like, which look their op up by its name in every call: 0.3 us of
// host time each.
Tensor empty(const std::vector<int64_t>& shape, ScalarType dtype, const Tensor& like);
Tensor new_like(const Tensor& x);

// The stand-in for an output that was not asked for.
inline Tensor no_tensor(ScalarType dtype, const Tensor& like) {
  return empty({0}, dtype, like);
}

inline const void* data(const std::optional<Tensor>& tensor) {
  return tensor ? tensor->const_data_ptr() : nullptr;
}

// The rows of a tensor (..., H), or nothing where its last dimension is not dense or its leading ones are too
// scattered.
std::optional<Rows> rows_of(const Tensor& tensor);

// An argument seen as rows; its tensor is a contiguous copy where its strides are no rows, or where
// `one_stride` asks for evenly spaced ones and they are not.
struct RowInput {
  Tensor tensor;
  Rows rows;
  const void* data() const { return tensor.const_data_ptr(); }
};
RowInput row_input(const Tensor& tensor, bool one_stride = false);

// A result seen as rows. A kernel writes `written`; finish() copies it over where the strides of `result` are
// no rows.
struct RowOutput {
  Tensor result, written;
  Rows rows;
  void* data() const { return written.mutable_data_ptr(); }
  void finish();
};
RowOutput row_output(const Tensor& result, bool one_stride = false);

// Whether the elements fill their memory without gaps or overlaps, in any order of the dimensions.
bool is_dense(const Tensor& tensor);
// Whether equal offsets in memory mean equal indices.
bool same_strides(const Tensor& a, const Tensor& b);

void require_like(const char* op, const char* name, const Tensor& tensor, const char* other_name,
                  const Tensor& other);

// CUDA kernels compute float16, bfloat16 and float32; float64 belongs to the torch backend.
void require_cuda_dtype(const char* op, const char* name, const Tensor& tensor);

}  // namespace liger
