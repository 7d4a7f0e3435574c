// Dynamic shared memory beyond the 48 KB that every kernel may have.
#pragma once

#include <cuda_runtime.h>

namespace liger {

// How a multiprocessor divides its memory between shared memory and the L1 cache.
enum class Carveout { kByDriver, kShared };

// Lets a kernel have all that the current device offers beside the kernel's static shared memory. The limit
// belongs to the kernel and not to a launch: set to what one launch needs, it would be too small for the
// launch of another thread. Set once for a kernel and device.
cudaError_t allow_shared_memory(const void* kernel, Carveout carveout);

}  // namespace liger
