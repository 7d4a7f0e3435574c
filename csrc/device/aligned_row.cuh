// SPDX-License-Identifier: BSD-3-Clause

// Vectorised access to rows that start at any address.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "device/vec.cuh"

namespace liger {

// A row is `head` single elements up to the first 16-byte boundary, then 16-byte vectors, then `tail` single
// elements.
struct AlignedRow {
  int head, vectors, tail;

  __device__ __forceinline__ int edges() const { return head + tail; }
  __device__ __forceinline__ int edge_column(int edge, int columns) const {
    return edge < head ? edge : columns - tail + (edge - head);
  }
};

template <typename T>
__device__ __forceinline__ AlignedRow align_row(const T* row, int columns) {
  const int misaligned =
      static_cast<int>(reinterpret_cast<uintptr_t>(row) % 16) / static_cast<int>(sizeof(T));
  AlignedRow aligned;
  aligned.head = min(columns, misaligned == 0 ? 0 : kVec<T> - misaligned);
  aligned.vectors = (columns - aligned.head) / kVec<T>;
  aligned.tail = columns - aligned.head - aligned.vectors * kVec<T>;
  return aligned;
}

}  // namespace liger
