// What the tensor copy engine of compute capability 9.0 wants to know of a tensor in memory.
#pragma once

#include <cuda.h>

#include <array>
#include <cstdint>

namespace liger {

// Whether the driver can encode maps: since CUDA 12.
bool has_tensor_maps();

// bfloat16, the innermost dimension first; its stride is 1, `strides` are those of the others in elements.
// What a box has outside of the tensor reads as zero.
CUtensorMap tensor_map(const char* op, const void* memory, std::array<int64_t, 3> sizes,
                       std::array<int64_t, 2> strides, std::array<int, 3> box, CUtensorMapSwizzle swizzle);

}  // namespace liger
