// SPDX-License-Identifier: BSD-3-Clause

// TMA descriptors (CUtensorMap) of compute capability 9.0.
#pragma once

#include <cuda.h>

#include <array>
#include <cstdint>

namespace liger {

// True if the driver can encode tensor maps (CUDA 12 and later).
bool has_tensor_maps();

// Elements of 16 bits; dimensions innermost first. The innermost stride is 1; `strides` has the others, in
// elements. Elements of a box outside of the tensor read as zero.
CUtensorMap tensor_map(const char* op, const void* memory, std::array<int64_t, 3> sizes,
                       std::array<int64_t, 2> strides, std::array<int, 3> box, CUtensorMapSwizzle swizzle);

}  // namespace liger
