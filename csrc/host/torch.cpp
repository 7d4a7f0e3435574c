// SPDX-License-Identifier: BSD-3-Clause
#include "host/torch.h"

#include <algorithm>
#include <mutex>
#include <utility>
#include <vector>

#include "host/launch/capture.h"

namespace liger {
namespace {

// Errors that only a running kernel causes. They are sticky: the context is lost, and every later call of the
// process returns the same error.
bool is_kernel_fault(cudaError_t status) {
  switch (status) {
    case cudaErrorIllegalAddress:
    case cudaErrorMisalignedAddress:
    case cudaErrorInvalidAddressSpace:
    case cudaErrorInvalidPc:
    case cudaErrorIllegalInstruction:
    case cudaErrorHardwareStackError:
    case cudaErrorAssert:
    case cudaErrorLaunchFailure:
    case cudaErrorLaunchTimeout:
    case cudaErrorECCUncorrectable:
      return true;
    default:
      return false;
  }
}

}  // namespace

void check_cuda(cudaError_t status, const char* op) {
  if (__builtin_expect(status == cudaSuccess, 1)) return;
  // Clears the error, which the check of the next launch would report again.
  cudaGetLastError();
  const std::string error = std::string(cudaGetErrorName(status)) + ": " + cudaGetErrorString(status);
  require(
      !is_kernel_fault(status), op, " found that an earlier kernel of this process had failed: ", error,
      ". Kernels run asynchronously, and this one may be of any library: CUDA_LAUNCH_BLOCKING=1 tells which");
  require(false, op, ": ", error);
}

const DeviceAttributes& device_attributes(int device) {
  constexpr int kMaxDevices = 128;
  static DeviceAttributes attributes[kMaxDevices];
  static std::once_flag initialised[kMaxDevices];
  require(device >= 0 && device < kMaxDevices, "liger: device index ", device, " is out of range");
  std::call_once(initialised[device], [device] {
    const DeviceGuard guard(device);
    const RelaxedCapture relaxed;
    DeviceAttributes& a = attributes[device];
    check_cuda(cudaDeviceGetAttribute(&a.sm_count, cudaDevAttrMultiProcessorCount, device), "liger");
    check_cuda(cudaDeviceGetAttribute(&a.shared_memory_per_block_optin,
                                      cudaDevAttrMaxSharedMemoryPerBlockOptin, device),
               "liger");
    a.code = loaded_code();
  });
  return attributes[device];
}

namespace {

Tensor empty_strided(const int64_t* sizes, const int64_t* strides, int64_t dims, ScalarType dtype,
                     const Tensor& like) {
  int32_t device = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(like.get(), &device));
  AtenTensorHandle handle = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(dims, sizes, strides, static_cast<int32_t>(dtype), device,
                                                  like.get_device_index(), &handle));
  return Tensor(handle);
}

}  // namespace

Tensor empty(std::span<const int64_t> shape, ScalarType dtype, const Tensor& like) {
  int64_t few[8];
  std::vector<int64_t> many;
  int64_t* strides = few;
  if (shape.size() > std::size(few)) {
    many.resize(shape.size());
    strides = many.data();
  }
  int64_t stride = 1;
  for (size_t d = shape.size(); d-- > 0;) {
    strides[d] = stride;
    stride *= std::max<int64_t>(shape[d], 1);
  }
  return empty_strided(shape.data(), strides, static_cast<int64_t>(shape.size()), dtype, like);
}

Tensor new_like(const Tensor& x) {
  if (!x.is_contiguous()) return torch::stable::empty_like(x);
  return empty_strided(x.sizes().data(), x.strides().data(), x.dim(), x.scalar_type(), x);
}

void require_cuda_dtype(const char* op, const char* name, const Tensor& tensor) {
  const ScalarType dtype = tensor.scalar_type();
  require(dtype == ScalarType::Half || dtype == ScalarType::BFloat16 || dtype == ScalarType::Float, op, ": ",
          name, " has dtype ", dtype_name(dtype),
          ", expected float16, bfloat16 or float32 on the cuda backend",
          " (LIGER_BACKEND=torch computes float64)");
}

std::optional<Rows> rows_of(const Tensor& tensor) {
  const auto sizes = tensor.sizes();
  const auto strides = tensor.strides();
  const int64_t last = static_cast<int64_t>(sizes.size()) - 1;
  if (last < 0 || (sizes[last] > 1 && strides[last] != 1)) return std::nullopt;
  int64_t size[3], stride[3];
  int levels = 0;
  for (int64_t d = last - 1; d >= 0; --d) {
    if (sizes[d] == 1) continue;
    if (levels > 0 && strides[d] == size[levels - 1] * stride[levels - 1]) {
      size[levels - 1] *= sizes[d];
    } else if (levels == 3) {
      return std::nullopt;
    } else {
      size[levels] = sizes[d];
      stride[levels++] = strides[d];
    }
  }
  Rows rows;
  if (levels > 0) rows.stride = stride[0];
  if (levels > 1) {
    if (size[0] * size[1] * (levels > 2 ? size[2] : 1) >= int64_t{1} << 31) return std::nullopt;
    rows.nested = true;
    rows.inner = FastDivide(static_cast<uint32_t>(std::max<int64_t>(size[0], 1)));
    rows.middle = FastDivide(static_cast<uint32_t>(std::max<int64_t>(size[1], 1)));
    rows.middle_stride = stride[1];
  }
  if (levels > 2) rows.outer_stride = stride[2];
  return rows;
}

RowInput row_input(const Tensor& tensor, bool one_stride) {
  if (const auto rows = rows_of(tensor); rows && !(one_stride && rows->nested)) return {tensor, *rows};
  Tensor copy = torch::stable::contiguous(tensor);
  const Rows rows = *rows_of(copy);
  return {std::move(copy), rows};
}

RowOutput row_output(const Tensor& result, bool one_stride) {
  if (const auto rows = rows_of(result); rows && !(one_stride && rows->nested))
    return {result, result, *rows};
  Tensor written = torch::stable::new_empty(result, result.sizes());
  const Rows rows = *rows_of(written);
  return {result, std::move(written), rows};
}

void RowOutput::finish() {
  if (written.get() != result.get()) torch::stable::copy_(result, written);
}

bool is_dense(const Tensor& tensor) {
  std::vector<std::pair<int64_t, int64_t>> dimensions;  // stride, size
  for (int64_t d = 0; d < tensor.dim(); ++d) {
    if (tensor.size(d) == 0) return true;
    if (tensor.size(d) > 1) dimensions.emplace_back(tensor.stride(d), tensor.size(d));
  }
  std::sort(dimensions.begin(), dimensions.end());
  int64_t expected = 1;
  for (const auto& [stride, size] : dimensions) {
    if (stride != expected) return false;
    expected *= size;
  }
  return true;
}

bool same_strides(const Tensor& a, const Tensor& b) {
  for (int64_t d = 0; d < a.dim(); ++d) {
    if (a.size(d) > 1 && a.stride(d) != b.stride(d)) return false;
  }
  return true;
}

void require_like(const char* op, const char* name, const Tensor& tensor, const char* other_name,
                  const Tensor& other) {
  bool same = tensor.dim() == other.dim();
  for (int64_t d = 0; same && d < tensor.dim(); ++d) same = tensor.size(d) == other.size(d);
  require(same, op, ": ", name, " has shape ", shape_text(tensor), ", expected the shape of ", other_name,
          ", ", shape_text(other));
  require(tensor.scalar_type() == other.scalar_type(), op, ": ", name, " has dtype ",
          dtype_name(tensor.scalar_type()), ", expected the dtype of ", other_name, ", ",
          dtype_name(other.scalar_type()));
  require(same_device(tensor, other), op, ": ", name, " is on ", device_text(tensor),
          ", expected the device of ", other_name, ", ", device_text(other));
}

}  // namespace liger
