// SPDX-License-Identifier: BSD-3-Clause

// Softmax over rows, in float, and its gradient y * (grad_y - sum(grad_y * y)). No float copy of a row is
// ever written to global memory. Three kinds of kernels:
//
//   register   any device: 4 to 32 lanes or one block have a short row in their registers; one read
//   smem       sm_90+: a block or a cluster stages a longer row in shared memory; one read (softmax/smem.cuh)
//   streamed   any device, any row length: one block reads its row twice, the second time backwards from its
//              end, which the caches still have
//
// 16-byte accesses require that rows start equally misaligned in all operands; otherwise kernels for single
// elements (N == 1) run.
#pragma once

#include "device/elementwise.cuh"
#include "device/reduce.cuh"
#include "softmax/stats.cuh"

namespace liger {

struct Softmax {
  InputRows x, grad_y;  // x: y in the backward; grad_y: backward only
  OutputRows out;       // y or grad_x
  Extent extent;        // columns in elements
};

inline constexpr int kSoftmaxThreads = 128;    // block size if a block has several rows
inline constexpr int kRegisterThreads = 512;   // maximum block size if a block has one row in its registers
inline constexpr int kStreamedThreads = 1024;  // block size of the streamed kernels
inline constexpr int kWholeBlock = 0;

// The threads of one row: kLanes neighbouring lanes, a power of two up to 32, or the whole block. Groups past
// the last row are not valid: they have no elements, but their lanes must take part in the shuffles.
template <int kLanes>
struct RowGroup {
  int64_t row;
  int lane, lanes;
  bool valid;

  __device__ __forceinline__ explicit RowGroup(int64_t rows) {
    if constexpr (kLanes == kWholeBlock) {
      row = blockIdx.x, lane = threadIdx.x, lanes = blockDim.x, valid = true;
    } else {
      row = int64_t{blockIdx.x} * (kSoftmaxThreads / kLanes) + threadIdx.x / kLanes;
      lane = threadIdx.x % kLanes, lanes = kLanes, valid = row < rows;
    }
  }
  template <typename Op>
  __device__ __forceinline__ float reduce(float x) const {
    if constexpr (kLanes == kWholeBlock) {
      __shared__ float scratch[32];
      return block_reduce<Op>(x, scratch);
    } else {
      return warp_reduce<Op, kLanes>(x);
    }
  }
};

// The vectors of a row that one thread has in its registers; elements outside the row are `padding`. kPeel:
// rows start at any address, equally misaligned in all operands. Vectors are at 16-byte boundaries, so the
// first and the last one may be partly outside the row.
template <typename T, int N, int kVectors, bool kPeel>
struct RowFragment {
  Vec<T, N> vectors[kVectors];
  int columns, misaligned = 0;  // misaligned: elements between the last 16-byte boundary and the row

  template <typename Group>
  __device__ __forceinline__ RowFragment(const Group& group, const InputRows& x, int64_t columns,
                                         float padding)
      : columns(group.valid ? static_cast<int>(columns) : 0) {
    const T* row = static_cast<const T*>(x.data) + group.row * x.stride;
    if constexpr (kPeel) misaligned = static_cast<int>(reinterpret_cast<uintptr_t>(row) % 16 / sizeof(T));
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      const int element = first_element(group, k);
      if (is_full(element)) {
        vectors[k] = load<T, N>(row + element);
        continue;
      }
#pragma unroll
      for (int i = 0; i < N; ++i) {
        const bool inside = kPeel && inside_row(element + i);
        vectors[k].v[i] = inside ? row[element + i] : from_float<T>(padding);
      }
    }
  }
  template <typename Group>
  __device__ __forceinline__ int first_element(const Group& group, int k) const {
    return (group.lane + k * group.lanes) * N - (kPeel ? misaligned : 0);
  }
  __device__ __forceinline__ bool inside_row(int element) const { return element >= 0 && element < columns; }
  __device__ __forceinline__ bool is_full(int element) const {
    return kPeel ? element >= 0 && element + N <= columns : element < columns;
  }
  // Makes the compiler unpack vector k anew. Floats that are live across two passes would take twice the
  // registers of packed half types. The memory clobber keeps the unpacking after the store of the previous
  // vector.
  __device__ __forceinline__ Vec<T, N>& rematerialise(int k) {
    if constexpr (kPaired<T, N>) {
      uint32_t* words = reinterpret_cast<uint32_t*>(&vectors[k]);
#pragma unroll
      for (int i = 0; i < N / 2; ++i) asm volatile("" : "+r"(words[i])::"memory");
    }
    return vectors[k];
  }
  template <typename Group>
  __device__ __forceinline__ void write(const Group& group, const OutputRows& out, int k) const {
    T* row = static_cast<T*>(out.data) + group.row * out.stride;
    const int element = first_element(group, k);
    if (is_full(element)) {
      kPeel ? store_whole(row + element, vectors[k]) : store(row + element, vectors[k]);
    } else if constexpr (kPeel) {
#pragma unroll
      for (int i = 0; i < N; ++i) {
        if (inside_row(element + i)) row[element + i] = vectors[k].v[i];
      }
    }
  }
};

template <typename T, int N, int kLanes, int kVectors, bool kPeel>
__global__ void __launch_bounds__(kLanes == kWholeBlock ? kRegisterThreads : kSoftmaxThreads)
    softmax_register_kernel(const Softmax p) {
  const RowGroup<kLanes> group(p.extent.rows);
  RowFragment<T, N, kVectors, kPeel> x(group, p.x, p.extent.columns, -INFINITY);
  SoftmaxStats<T> stats;
  float max = -INFINITY, values[N];
#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
    unpack(x.vectors[k], values);
#pragma unroll
    for (int i = 0; i < N; ++i) max = fmaxf(max, values[i]);
  }
  // In a block each thread sums relative to its own maximum: one block reduction merges maxima and sums.
  if constexpr (kLanes != kWholeBlock) max = warp_reduce<Max, kLanes>(max);
  stats.rescale(max);
  const float shift = stats.reference();
#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
    if constexpr (kVectors > 1) unpack(x.rematerialise(k), values);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      values[i] = softmax_exp<T>(values[i] - shift);
      stats.sum += values[i];
    }
  }
  if constexpr (kLanes == kWholeBlock) {
    __shared__ SoftmaxStats<T> slots[kRegisterThreads / 32];
    merge_block(stats, slots);
  } else {
    stats.sum = warp_reduce<Sum, kLanes>(stats.sum);
  }
  const float scale = 1.0f / stats.sum;
#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
    // The exponentials of a single vector are still in registers; the exponentials of several vectors are
    // recomputed.
    if constexpr (kVectors > 1) unpack(x.rematerialise(k), values);
#pragma unroll
    for (int i = 0; i < N; ++i)
      values[i] = (kVectors > 1 ? softmax_exp<T>(values[i] - stats.max) : values[i]) * scale;
    x.vectors[k] = pack<T, N>(values);
    x.write(group, p.out, k);
  }
}

template <typename T, int N, int kLanes, int kVectors, bool kPeel>
__global__ void __launch_bounds__(kLanes == kWholeBlock ? kRegisterThreads : kSoftmaxThreads)
    softmax_backward_register_kernel(const Softmax p) {
  const RowGroup<kLanes> group(p.extent.rows);
  RowFragment<T, N, kVectors, kPeel> y(group, p.x, p.extent.columns, 0.0f);
  RowFragment<T, N, kVectors, kPeel> grad_y(group, p.grad_y, p.extent.columns, 0.0f);
  float dot = 0.0f;
#pragma unroll
  for (int k = 0; k < kVectors; ++k) dot = dot_product(grad_y.vectors[k], y.vectors[k], dot);
  dot = group.template reduce<Sum>(dot);
#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
    softmax_grad(grad_y.rematerialise(k), y.rematerialise(k), dot);
    y.write(group, p.out, k);
  }
}

// The last column of this thread, or a negative number: the second read starts there and goes backwards.
__device__ __forceinline__ int64_t last_column(int64_t columns) {
  return columns <= threadIdx.x ? -1 : threadIdx.x + (columns - 1 - threadIdx.x) / blockDim.x * blockDim.x;
}

template <typename T, int N>
__global__ void __launch_bounds__(kStreamedThreads) softmax_streamed_kernel(const Softmax p) {
  const RowGroup<kWholeBlock> group(p.extent.rows);
  const int64_t columns = p.extent.columns / N;  // in vectors
  const T* x = static_cast<const T*>(p.x.data) + group.row * p.x.stride;
  T* out = static_cast<T*>(p.out.data) + group.row * p.out.stride;
  float max = -INFINITY, sum = 0.0f, values[N];
#pragma unroll 4
  for (int64_t column = threadIdx.x; column < columns; column += blockDim.x) {
    unpack(load<T, N>(x + column * N), values);
    float next = max;
#pragma unroll
    for (int i = 0; i < N; ++i) next = fmaxf(next, values[i]);
    // While every value was -inf the sum is 0, and a shift of 0 avoids -inf - -inf.
    const float shift = next == -INFINITY ? 0.0f : next;
    sum *= softmax_exp<T>(max - shift);
#pragma unroll
    for (int i = 0; i < N; ++i) sum += softmax_exp<T>(values[i] - shift);
    max = next;
  }
  const float row_max = group.template reduce<Max>(max);
  if (max != row_max) sum *= softmax_exp<T>(max - row_max);
  const float scale = 1.0f / group.template reduce<Sum>(sum);
#pragma unroll 4
  for (int64_t column = last_column(columns); column >= 0; column -= blockDim.x) {
    unpack(load<T, N>(x + column * N), values);
#pragma unroll
    for (int i = 0; i < N; ++i) values[i] = softmax_exp<T>(values[i] - row_max) * scale;
    store_whole(out + column * N, pack<T, N>(values));
  }
}

template <typename T, int N>
__global__ void __launch_bounds__(kStreamedThreads) softmax_backward_streamed_kernel(const Softmax p) {
  const RowGroup<kWholeBlock> group(p.extent.rows);
  const int64_t columns = p.extent.columns / N;  // in vectors
  const T* y = static_cast<const T*>(p.x.data) + group.row * p.x.stride;
  const T* grad_y = static_cast<const T*>(p.grad_y.data) + group.row * p.grad_y.stride;
  T* out = static_cast<T*>(p.out.data) + group.row * p.out.stride;
  float dot = 0.0f;
#pragma unroll 2
  for (int64_t column = threadIdx.x; column < columns; column += blockDim.x)
    dot = dot_product(load<T, N>(grad_y + column * N), load<T, N>(y + column * N), dot);
  dot = group.template reduce<Sum>(dot);
#pragma unroll 2
  for (int64_t column = last_column(columns); column >= 0; column -= blockDim.x) {
    Vec<T, N> vector = load<T, N>(y + column * N);
    softmax_grad(load<T, N>(grad_y + column * N), vector, dot);
    store_whole(out + column * N, vector);
  }
}

template <typename T, int N, int kLanes, int kVectors, bool kPeel>
void launch_softmax_register(const Softmax& p, int threads, cudaStream_t stream) {
  const int64_t rows_per_block = kLanes == kWholeBlock ? 1 : kSoftmaxThreads / kLanes;
  const unsigned blocks = static_cast<unsigned>((p.extent.rows + rows_per_block - 1) / rows_per_block);
  if (p.grad_y.data == nullptr) {
    softmax_register_kernel<T, N, kLanes, kVectors, kPeel><<<blocks, threads, 0, stream>>>(p);
  } else if constexpr (kVectors <= 4) {  // two tensors with more vectors do not fit into the registers
    softmax_backward_register_kernel<T, N, kLanes, kVectors, kPeel><<<blocks, threads, 0, stream>>>(p);
  }
}

// An upper bound of the vectors of N elements that overlap a row.
template <typename T, int N, bool kPeel>
int64_t max_row_vectors(const Softmax& p) {
  return kPeel ? (p.extent.columns + 2 * N - 2) / N : p.extent.columns / N;
}

inline constexpr int kShortVectors = 4;  // per thread, of a row in the registers of a block

// Rows of up to kShortVectors * kRegisterThreads vectors, in registers.
template <typename T, int N, bool kPeel>
void launch_softmax_short(const Softmax& p, cudaStream_t stream) {
  const int64_t vectors = max_row_vectors<T, N, kPeel>(p);
  if (vectors <= 4) {
    launch_softmax_register<T, N, 4, 1, kPeel>(p, kSoftmaxThreads, stream);
  } else if (vectors <= 8) {
    launch_softmax_register<T, N, 8, 1, kPeel>(p, kSoftmaxThreads, stream);
  } else if (vectors <= 16) {
    launch_softmax_register<T, N, 16, 1, kPeel>(p, kSoftmaxThreads, stream);
  } else if (vectors <= 32) {
    launch_softmax_register<T, N, 32, 1, kPeel>(p, kSoftmaxThreads, stream);
  } else if (vectors <= 32 * 4) {
    launch_softmax_register<T, N, 32, 4, kPeel>(p, kSoftmaxThreads, stream);
  } else {
    const int threads = static_cast<int>((vectors + 127) / 128) * 32;
    launch_softmax_register<T, N, kWholeBlock, kShortVectors, kPeel>(p, threads, stream);
  }
}

// Longer rows without shared memory. N > 1: in all operands, rows consist of whole aligned vectors.
template <typename T, int N>
void launch_softmax_long(const Softmax& p, cudaStream_t stream) {
  const int64_t vectors = p.extent.columns / N;
  const unsigned rows = static_cast<unsigned>(p.extent.rows);
  if (p.grad_y.data != nullptr) {
    softmax_backward_streamed_kernel<T, N><<<rows, kStreamedThreads, 0, stream>>>(p);
  } else if (vectors <= kRegisterThreads * 8) {
    const int threads = static_cast<int>((vectors + 255) / 256) * 32;
    launch_softmax_register<T, N, kWholeBlock, 8, false>(p, threads, stream);
  } else {
    softmax_streamed_kernel<T, N><<<rows, kStreamedThreads, 0, stream>>>(p);
  }
}

}  // namespace liger
