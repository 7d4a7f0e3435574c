// SPDX-License-Identifier: BSD-3-Clause

// Dynamic shared memory beyond the default limit of 48 KB.
#pragma once

#include <cuda_runtime.h>

namespace liger {

// The division of an SM's memory between shared memory and L1 cache.
enum class Carveout { kByDriver, kShared };

// Raises the limit of a kernel to the maximum of the current device, once per kernel and device. The limit is
// an attribute of the kernel, not of a launch: set to the need of one launch, it would be too small for the
// launch of another thread.
cudaError_t allow_shared_memory(const void* kernel, Carveout carveout);

}  // namespace liger
