// SPDX-License-Identifier: BSD-3-Clause
#include "host/launch/loaded_code.h"

#include "host/torch.h"

namespace liger {
namespace {

constexpr int kThreadsSm90a = 64;

// All sources are compiled for the same architectures, so the driver loads the same image of this kernel as
// of every other one. cudaFuncAttributes has the architecture of the image, but not its arch-specific
// features: the launch bound encodes those.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
__global__ void __launch_bounds__(kThreadsSm90a) marker() {}
#else
__global__ void __launch_bounds__(kThreadsSm90a / 2) marker() {}
#endif

}  // namespace

LoadedCode loaded_code() {
  cudaFuncAttributes attributes{};
  check_cuda(cudaFuncGetAttributes(&attributes, marker), "liger");
  return {attributes.ptxVersion, attributes.maxThreadsPerBlock == kThreadsSm90a};
}

}  // namespace liger
