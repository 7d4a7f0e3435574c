// SPDX-License-Identifier: BSD-3-Clause

// Torch utilities of the CUDA ops beyond torch::stable: current stream, launch errors, allocation, strided
// rows.
#pragma once

#include <cuda_runtime.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <span>

#include "device/rows.cuh"
#include "host/checks/checks.h"
#include "host/checks/declared.h"
#include "host/launch/loaded_code.h"
#include "host/nvtx.h"

namespace liger {

using torch::stable::accelerator::DeviceGuard;

// Makes the device of an op current and opens an NVTX range, for its lifetime.
class OpGuard {
 public:
  OpGuard(const char* op, int device) : range_(op), device_(device) {}

 private:
  NvtxRange range_;
  DeviceGuard device_;
};

inline cudaStream_t current_stream(const Tensor& tensor) {
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(tensor.get_device_index(), &stream));
  return static_cast<cudaStream_t>(stream);
}

// Throws if a call of the CUDA runtime has failed.
void check_cuda(cudaError_t status, const char* op);

// Call after every launch: reports a kernel that could not start (no image for the device, too much shared
// memory). The runtime is linked statically, so errors of other libraries do not show up here.
inline void check_launch(const char* op) {
  check_cuda(cudaGetLastError(), op);
}

// Cached per device: cudaGetDeviceProperties takes milliseconds.
struct DeviceAttributes {
  int sm_count;
  int shared_memory_per_block_optin;
  LoadedCode code;
};
const DeviceAttributes& device_attributes(int device);

// A contiguous tensor on the device of `like`; and a tensor of the shape and dtype of x, with its strides if
// it is dense. torch::stable::new_empty and empty_like look up their op by name in every call: 0.3 us of host
// time.
Tensor empty(std::span<const int64_t> shape, ScalarType dtype, const Tensor& like);
inline Tensor empty(std::initializer_list<int64_t> shape, ScalarType dtype, const Tensor& like) {
  return empty(std::span(shape.begin(), shape.size()), dtype, like);
}
Tensor new_like(const Tensor& x);

// x itself or a contiguous copy. torch::stable::contiguous looks up its op by name even for x itself.
inline Tensor as_contiguous(const Tensor& x) {
  return x.is_contiguous() ? x : torch::stable::contiguous(x);
}

// The placeholder for an output that was not requested.
inline Tensor no_tensor(ScalarType dtype, const Tensor& like) {
  return empty({0}, dtype, like);
}

inline const void* data(const std::optional<Tensor>& tensor) {
  return tensor ? tensor->const_data_ptr() : nullptr;
}

// The rows of a tensor (..., H); nullopt if the last dimension is not dense or the leading dimensions need
// more strides than Rows has.
std::optional<Rows> rows_of(const Tensor& tensor);

// An argument as rows. `tensor` is a contiguous copy if rows_of() fails, or if `one_stride` asks for evenly
// spaced rows and they are not.
struct RowInput {
  Tensor tensor;
  Rows rows;
  const void* data() const { return tensor.const_data_ptr(); }
};
RowInput row_input(const Tensor& tensor, bool one_stride = false);

// A result as rows. A kernel writes to `written`; finish() copies it to `result` if `result` has no such
// rows.
struct RowOutput {
  Tensor result, written;
  Rows rows;
  void* data() const { return written.mutable_data_ptr(); }
  void finish();
};
RowOutput row_output(const Tensor& result, bool one_stride = false);

// True if the elements fill their memory without gaps or overlaps, in any order of dimensions.
bool is_dense(const Tensor& tensor);
// True if equal memory offsets mean equal indices.
bool same_strides(const Tensor& a, const Tensor& b);

void require_like(const char* op, const char* name, const Tensor& tensor, const char* other_name,
                  const Tensor& other);

// CUDA kernels compute float16, bfloat16 and float32; float64 belongs to the torch backend.
void require_cuda_dtype(const char* op, const char* name, const Tensor& tensor);

}  // namespace liger
