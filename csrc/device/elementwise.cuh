// Kernels that treat every element alone: one vector of each tensor per thread, in small blocks, because full
// occupancy keeps more loads under way than unrolling does.
//
// Tensors are rows with one stride each, so that a part of every row (half of a packed tensor) is read and
// written in place; tensors without gaps are one long row.
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

// What all tensors of a launch have in common: columns in elements until lay_out or use_vectors.
struct Extent {
  int64_t rows, columns;
};

inline constexpr int kElementwiseThreads = 128;

// Counts columns in vectors of 16 bytes where every operand allows it; says whether it did. Absent operands
// have null data.
inline bool use_vectors(Extent& extent, int64_t element_size, std::initializer_list<InputRows> operands) {
  const int64_t vector = 16 / element_size;
  bool vectorised = extent.columns % vector == 0;
  for (const InputRows& x : operands)
    vectorised = vectorised && (x.data == nullptr ||
                                (is_aligned16(x.data) && (extent.rows == 1 || x.stride % vector == 0)));
  if (vectorised) extent.columns /= vector;
  return vectorised;
}

// The same after rows without gaps have been made one.
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
