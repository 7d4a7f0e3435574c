// The rows of a tensor (..., H) as pointer arithmetic, so that views need no copy.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace liger {

// Element offset of row r, the rows being counted over the leading dimensions in order. One stride is enough
// for most tensors; inner > 0 says that there are up to three leading dimensions: (any, middle, inner).
struct Rows {
  int64_t stride = 0;
  int64_t inner = 0, middle = 1;
  int64_t middle_stride = 0, outer_stride = 0;

  __host__ __device__ __forceinline__ int64_t offset(int64_t row) const {
    if (inner == 0) return row * stride;
    const uint64_t rest = static_cast<uint64_t>(row) / static_cast<uint64_t>(inner);
    const uint64_t outer = rest / static_cast<uint64_t>(middle);
    return (row - static_cast<int64_t>(rest) * inner) * stride +
           static_cast<int64_t>(rest - outer * middle) * middle_stride +
           static_cast<int64_t>(outer) * outer_stride;
  }

  // Whether every row starts at a multiple of this many elements.
  bool multiple_of(int64_t elements) const {
    return stride % elements == 0 && middle_stride % elements == 0 && outer_stride % elements == 0;
  }
};

}  // namespace liger
