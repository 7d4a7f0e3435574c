#include "common/torch.h"

#include <mutex>

namespace liger {

const DeviceAttributes& device_attributes(int device) {
  constexpr int kMaxDevices = 128;
  static DeviceAttributes attributes[kMaxDevices];
  static std::once_flag known[kMaxDevices];
  require(device >= 0 && device < kMaxDevices, "liger: device index ", device, " is out of range");
  std::call_once(known[device], [device] {
    int major = 0, minor = 0;
    DeviceAttributes& a = attributes[device];
    check_cuda(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device), "liger");
    check_cuda(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device), "liger");
    check_cuda(cudaDeviceGetAttribute(&a.multiprocessors, cudaDevAttrMultiProcessorCount, device), "liger");
    check_cuda(cudaDeviceGetAttribute(&a.shared_memory_per_block_optin, cudaDevAttrMaxSharedMemoryPerBlockOptin, device),
               "liger");
    a.capability = 10 * major + minor;
  });
  return attributes[device];
}

void require_cuda_dtype(const char* op, const char* name, const Tensor& tensor) {
  const ScalarType dtype = tensor.scalar_type();
  require(dtype == ScalarType::Half || dtype == ScalarType::BFloat16 || dtype == ScalarType::Float, op, ": ", name,
          " has dtype ", dtype_name(dtype), ", expected float16, bfloat16 or float32 on the cuda backend",
          " (LIGER_BACKEND=torch computes float64)");
}

}  // namespace liger
