// SPDX-License-Identifier: BSD-3-Clause

// Launches on the emulated machine. The test writes on_machine(kernel, ...) for kernel<<<...>>>.
#pragma once

#include "machine.h"

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
using cudaStream_t = void*;
enum cudaError_t { cudaSuccess };
enum { cudaLaunchAttributeProgrammaticStreamSerialization };
struct cudaLaunchAttribute {
  int id;
  struct {
    int programmaticStreamSerializationAllowed;
  } val;
};
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
  cudaLaunchAttribute* attrs;
  int numAttrs;
};

inline int launches = 0;
inline bool launches_backwards = false;  // the threads of a block run in the reverse order

template <typename... Parameters>
auto on_machine(void (*kernel)(Parameters...), dim3 grid, int threads, int, cudaStream_t) {
  return [=](const auto&... arguments) {
    ++launches;
    run({static_cast<int>(grid.x), static_cast<int>(grid.y)}, threads, launches_backwards,
        [&] { kernel(arguments...); });
  };
}
template <typename... Parameters, typename... Arguments>
void cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                        const Arguments&... arguments) {
  on_machine(kernel, config->gridDim, config->blockDim.x, 0, nullptr)(arguments...);
}
