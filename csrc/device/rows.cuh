// SPDX-License-Identifier: BSD-3-Clause

// Offsets of the rows of a strided tensor (..., H), so that views need no copy.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "device/fast_divide.h"

namespace liger {

// Rows are numbered over the leading dimensions in order. Most tensors need one stride; nested rows have up
// to three leading dimensions, (outer, middle, inner), and there are fewer than 2^31 of them.
struct Rows {
  int64_t stride = 0;
  bool nested = false;
  FastDivide inner, middle;
  int64_t middle_stride = 0, outer_stride = 0;

  __device__ __forceinline__ int64_t offset(int64_t row) const {
    if (!nested) return row * stride;
    const uint32_t flat = static_cast<uint32_t>(row);
    const uint32_t rest = inner.quotient(flat), outer = middle.quotient(rest);
    return int64_t{inner.remainder(flat, rest)} * stride +
           int64_t{middle.remainder(rest, outer)} * middle_stride + int64_t{outer} * outer_stride;
  }

  // True if every row starts at a multiple of this many elements.
  bool multiple_of(int64_t elements) const {
    return stride % elements == 0 && middle_stride % elements == 0 && outer_stride % elements == 0;
  }
};

// Rows of a single stride.
struct OneStride {
  int64_t stride;
  __device__ __forceinline__ int64_t offset(int64_t row) const { return row * stride; }
};

}  // namespace liger
