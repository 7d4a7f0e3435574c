// SPDX-License-Identifier: BSD-3-Clause

// Building blocks of elementwise kernels: one vector of each tensor per thread, in small blocks, because full
// occupancy keeps more loads in flight than unrolling does.
//
// A tensor is a matrix with a row stride, so that half of a packed tensor is read and written in place. A
// contiguous tensor is one long row.
#pragma once

#include <initializer_list>

#include "device/vec.cuh"

namespace liger {

struct InputRows {
  const void* data;
  int64_t stride;  // elements between rows
};
struct OutputRows {
  void* data;
  int64_t stride;
};

// The shape of all tensors of a launch. columns: in elements until lay_out() or use_vectors() converts them.
struct Extent {
  int64_t rows, columns;
};

inline constexpr int kElementwiseThreads = 128;

// Converts columns to 16-byte vectors and returns true if every operand is aligned. An absent operand is
// null.
inline bool use_vectors(Extent& extent, int64_t element_size, std::initializer_list<InputRows> operands) {
  const int64_t vector = 16 / element_size;
  bool vectorised = extent.columns % vector == 0;
  for (const InputRows& x : operands)
    vectorised = vectorised && (x.data == nullptr ||
                                (is_aligned16(x.data) && (extent.rows == 1 || x.stride % vector == 0)));
  if (vectorised) extent.columns /= vector;
  return vectorised;
}

// Merges rows without gaps into one, then use_vectors().
inline bool lay_out(Extent& extent, int64_t element_size, std::initializer_list<InputRows> operands) {
  bool one_row = true;
  for (const InputRows& x : operands)
    one_row = one_row && (x.data == nullptr || extent.rows == 1 || x.stride == extent.columns);
  if (one_row) extent = {1, extent.columns * extent.rows};
  return use_vectors(extent, element_size, operands);
}

inline unsigned elementwise_blocks(const Extent& extent) {
  return static_cast<unsigned>((extent.rows * extent.columns + kElementwiseThreads - 1) /
                               kElementwiseThreads);
}

// Consecutive threads take consecutive vectors, row after row.
struct Position {
  int64_t row, column;  // column in vectors

  __device__ __forceinline__ explicit Position(const Extent& extent) {
    const int64_t first = int64_t{blockIdx.x} * kElementwiseThreads;
    row = extent.rows == 1 ? 0 : first / extent.columns;
    column = first - row * extent.columns + threadIdx.x;
    if (column < extent.columns) return;
    if (extent.columns >= kElementwiseThreads) {
      ++row;
      column -= extent.columns;
    } else {
      const uint32_t whole = static_cast<uint32_t>(column) / static_cast<uint32_t>(extent.columns);
      row += whole;
      column -= whole * extent.columns;
    }
  }
  template <typename T, int N>
  __device__ __forceinline__ Vec<T, N> read(const InputRows& x) const {
    return load<T, N>(static_cast<const T*>(x.data) + row * x.stride + column * N);
  }
  template <typename T, int N>
  __device__ __forceinline__ void write(const OutputRows& x, const Vec<T, N>& value) const {
    store(static_cast<T*>(x.data) + row * x.stride + column * N, value);
  }
};

}  // namespace liger
