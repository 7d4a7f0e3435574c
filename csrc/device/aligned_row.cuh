// Rows that start anywhere, in vectors of 16 bytes all the same.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "device/vec.cuh"

namespace liger {

// A row is cut into `head` single elements up to the first 16-byte boundary, whole vectors, and `tail` single
// elements.
struct Span {
  int head, vectors, tail;

  __device__ __forceinline__ int edges() const { return head + tail; }
  __device__ __forceinline__ int edge_column(int edge, int columns) const {
    return edge < head ? edge : columns - tail + (edge - head);
  }
};

template <typename T>
__device__ __forceinline__ Span span_of(const T* row, int columns) {
  const int misaligned =
      static_cast<int>(reinterpret_cast<uintptr_t>(row) % 16) / static_cast<int>(sizeof(T));
  Span span;
  span.head = min(columns, misaligned == 0 ? 0 : kVec<T> - misaligned);
  span.vectors = (columns - span.head) / kVec<T>;
  span.tail = columns - span.head - span.vectors * kVec<T>;
  return span;
}

}  // namespace liger
