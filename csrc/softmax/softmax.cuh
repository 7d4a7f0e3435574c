// Softmax over rows, in float, and its gradient y * (grad_y - sum(grad_y * y)).
//
// A row that fits is held in the registers of a few lanes, a warp or a block, and read once. A longer one is
// kept in shared memory (softmax_kept.cuh, softmax_persistent.cuh) or, before compute capability 9.0, read
// twice by its block: the second time from its end, which the caches still have.
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

inline constexpr int kSoftmaxThreads = 128;  // of blocks that have several rows
inline constexpr int kHeldThreads = 512;     // at most, of blocks that hold one: half the register file
inline constexpr int kLongThreads = 1024;    // of blocks that read theirs twice
inline constexpr int kWholeBlock = 0;

// The threads that share a row: kLanes neighbours, a power of two up to 32, or the whole block. Groups past
// the last row go on with no elements, because their lanes take part in shuffles.
template <int kLanes>
struct RowGroup {
  int64_t row;
  int lane, lanes;
  bool live;

  __device__ __forceinline__ explicit RowGroup(int64_t rows) {
    if constexpr (kLanes == kWholeBlock) {
      row = blockIdx.x, lane = threadIdx.x, lanes = blockDim.x, live = true;
    } else {
      row = int64_t{blockIdx.x} * (kSoftmaxThreads / kLanes) + threadIdx.x / kLanes;
      lane = threadIdx.x % kLanes, lanes = kLanes, live = row < rows;
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

// What one thread holds of a row. kPeel: rows start anywhere, all operands at the same distance from a
// multiple of 16 bytes; the vectors lie at such multiples, and the first and the last one are partly outside.
template <typename T, int N, int kItems, bool kPeel>
struct Held {
  Vec<T, N> items[kItems];
  int columns, before = 0;  // before: elements between the multiple of 16 bytes and the row

  template <typename Group>
  __device__ __forceinline__ Held(const Group& at, const InputRows& x, int64_t columns, float padding)
      : columns(at.live ? static_cast<int>(columns) : 0) {
    const T* row = static_cast<const T*>(x.data) + at.row * x.stride;
    if constexpr (kPeel) before = static_cast<int>(reinterpret_cast<uintptr_t>(row) % 16 / sizeof(T));
#pragma unroll
    for (int k = 0; k < kItems; ++k) {
      const int at_element = element_of(at, k);
      if (whole(at_element)) {
        items[k] = load<T, N>(row + at_element);
        continue;
      }
#pragma unroll
      for (int i = 0; i < N; ++i) {
        const bool inside = kPeel && inside_row(at_element + i);
        items[k].v[i] = inside ? row[at_element + i] : from_float<T>(padding);
      }
    }
  }
  template <typename Group>
  __device__ __forceinline__ int element_of(const Group& at, int k) const {
    return (at.lane + k * at.lanes) * N - (kPeel ? before : 0);
  }
  __device__ __forceinline__ bool inside_row(int element) const { return element >= 0 && element < columns; }
  __device__ __forceinline__ bool whole(int element) const {
    return kPeel ? element >= 0 && element + N <= columns : element < columns;
  }
  // The compiler would carry the floats of one pass over to the next, which takes twice the registers of the
  // packed half types: this makes it unpack the item again, and not before an earlier one has been written.
  __device__ __forceinline__ Vec<T, N>& again(int k) {
    if constexpr (kPaired<T, N>) {
      uint32_t* words = reinterpret_cast<uint32_t*>(&items[k]);
#pragma unroll
      for (int i = 0; i < N / 2; ++i) asm volatile("" : "+r"(words[i])::"memory");
    }
    return items[k];
  }
  template <typename Group>
  __device__ __forceinline__ void write(const Group& at, const OutputRows& out, int k) const {
    T* row = static_cast<T*>(out.data) + at.row * out.stride;
    const int at_element = element_of(at, k);
    if (whole(at_element)) {
      kPeel ? store_whole(row + at_element, items[k]) : store(row + at_element, items[k]);
    } else if constexpr (kPeel) {
#pragma unroll
      for (int i = 0; i < N; ++i) {
        if (inside_row(at_element + i)) row[at_element + i] = items[k].v[i];
      }
    }
  }
};

template <typename T, int N, int kLanes, int kItems, bool kPeel>
__global__ void __launch_bounds__(kLanes == kWholeBlock ? kHeldThreads : kSoftmaxThreads)
    softmax_held_kernel(const Softmax p) {
  const RowGroup<kLanes> at(p.extent.rows);
  Held<T, N, kItems, kPeel> x(at, p.x, p.extent.columns, -INFINITY);
  SoftmaxStats<T> stats;
  float max = -INFINITY, values[N];
#pragma unroll
  for (int k = 0; k < kItems; ++k) {
    unpack(x.items[k], values);
#pragma unroll
    for (int i = 0; i < N; ++i) max = fmaxf(max, values[i]);
  }
  // The threads of a block sum from maxima of their own, so that they meet only once.
  if constexpr (kLanes != kWholeBlock) max = warp_reduce<Max, kLanes>(max);
  stats.raise(max);
  const float shift = stats.reference();
#pragma unroll
  for (int k = 0; k < kItems; ++k) {
    if constexpr (kItems > 1) unpack(x.again(k), values);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      values[i] = softmax_exp<T>(values[i] - shift);
      stats.sum += values[i];
    }
  }
  if constexpr (kLanes == kWholeBlock) {
    __shared__ SoftmaxStats<T> slots[kHeldThreads / 32];
    merge_block(stats, slots);
  } else {
    stats.sum = warp_reduce<Sum, kLanes>(stats.sum);
  }
  const float scale = 1.0f / stats.sum;
#pragma unroll
  for (int k = 0; k < kItems; ++k) {
    // There are registers for the exponentials of one item; those of more are computed again.
    if constexpr (kItems > 1) unpack(x.again(k), values);
#pragma unroll
    for (int i = 0; i < N; ++i)
      values[i] = (kItems > 1 ? softmax_exp<T>(values[i] - stats.max) : values[i]) * scale;
    x.items[k] = pack<T, N>(values);
    x.write(at, p.out, k);
  }
}

template <typename T, int N, int kLanes, int kItems, bool kPeel>
__global__ void __launch_bounds__(kLanes == kWholeBlock ? kHeldThreads : kSoftmaxThreads)
    softmax_backward_held_kernel(const Softmax p) {
  const RowGroup<kLanes> at(p.extent.rows);
  Held<T, N, kItems, kPeel> y(at, p.x, p.extent.columns, 0.0f);
  Held<T, N, kItems, kPeel> grad_y(at, p.grad_y, p.extent.columns, 0.0f);
  float dot = 0.0f;
#pragma unroll
  for (int k = 0; k < kItems; ++k) dot = dot_product(grad_y.items[k], y.items[k], dot);
  dot = at.template reduce<Sum>(dot);
#pragma unroll
  for (int k = 0; k < kItems; ++k) {
    softmax_grad(grad_y.again(k), y.again(k), dot);
    y.write(at, p.out, k);
  }
}

// The last column of this thread: a second walk begins there.
__device__ __forceinline__ int64_t last_column(int64_t columns) {
  return columns <= threadIdx.x ? -1 : threadIdx.x + (columns - 1 - threadIdx.x) / blockDim.x * blockDim.x;
}

template <typename T, int N>
__global__ void __launch_bounds__(kLongThreads) softmax_long_kernel(const Softmax p) {
  const RowGroup<kWholeBlock> at(p.extent.rows);
  const int64_t columns = p.extent.columns / N;  // in vectors
  const T* x = static_cast<const T*>(p.x.data) + at.row * p.x.stride;
  T* out = static_cast<T*>(p.out.data) + at.row * p.out.stride;
  float max = -INFINITY, sum = 0.0f, values[N];
#pragma unroll 4
  for (int64_t column = threadIdx.x; column < columns; column += blockDim.x) {
    unpack(load<T, N>(x + column * N), values);
    float next = max;
#pragma unroll
    for (int i = 0; i < N; ++i) next = fmaxf(next, values[i]);
    // As long as there was nothing but -inf, the sum is 0.
    const float shift = next == -INFINITY ? 0.0f : next;
    sum *= softmax_exp<T>(max - shift);
#pragma unroll
    for (int i = 0; i < N; ++i) sum += softmax_exp<T>(values[i] - shift);
    max = next;
  }
  const float whole = at.template reduce<Max>(max);
  if (max != whole) sum *= softmax_exp<T>(max - whole);
  const float scale = 1.0f / at.template reduce<Sum>(sum);
#pragma unroll 4
  for (int64_t column = last_column(columns); column >= 0; column -= blockDim.x) {
    unpack(load<T, N>(x + column * N), values);
#pragma unroll
    for (int i = 0; i < N; ++i) values[i] = softmax_exp<T>(values[i] - whole) * scale;
    store_whole(out + column * N, pack<T, N>(values));
  }
}

template <typename T, int N>
__global__ void __launch_bounds__(kLongThreads) softmax_backward_long_kernel(const Softmax p) {
  const RowGroup<kWholeBlock> at(p.extent.rows);
  const int64_t columns = p.extent.columns / N;  // in vectors
  const T* y = static_cast<const T*>(p.x.data) + at.row * p.x.stride;
  const T* grad_y = static_cast<const T*>(p.grad_y.data) + at.row * p.grad_y.stride;
  T* out = static_cast<T*>(p.out.data) + at.row * p.out.stride;
  float dot = 0.0f;
#pragma unroll 2
  for (int64_t column = threadIdx.x; column < columns; column += blockDim.x)
    dot = dot_product(load<T, N>(grad_y + column * N), load<T, N>(y + column * N), dot);
  dot = at.template reduce<Sum>(dot);
#pragma unroll 2
  for (int64_t column = last_column(columns); column >= 0; column -= blockDim.x) {
    Vec<T, N> item = load<T, N>(y + column * N);
    softmax_grad(load<T, N>(grad_y + column * N), item, dot);
    store_whole(out + column * N, item);
  }
}

template <typename T, int N, int kLanes, int kItems, bool kPeel>
void launch_softmax_held(const Softmax& p, int threads, cudaStream_t stream) {
  const int64_t rows_per_block = kLanes == kWholeBlock ? 1 : kSoftmaxThreads / kLanes;
  const unsigned blocks = static_cast<unsigned>((p.extent.rows + rows_per_block - 1) / rows_per_block);
  if (p.grad_y.data == nullptr) {
    softmax_held_kernel<T, N, kLanes, kItems, kPeel><<<blocks, threads, 0, stream>>>(p);
  } else if constexpr (kItems <= 4) {  // more of two tensors would not fit
    softmax_backward_held_kernel<T, N, kLanes, kItems, kPeel><<<blocks, threads, 0, stream>>>(p);
  }
}

// Vectors of N that a row touches at most.
template <typename T, int N, bool kPeel>
int64_t touched_vectors(const Softmax& p) {
  return kPeel ? (p.extent.columns + 2 * N - 2) / N : p.extent.columns / N;
}

inline constexpr int kShortItems = 4;  // vectors of a thread

// Rows of up to kShortItems vectors for each of kHeldThreads.
template <typename T, int N, bool kPeel>
void launch_softmax_short(const Softmax& p, cudaStream_t stream) {
  const int64_t vectors = touched_vectors<T, N, kPeel>(p);
  if (vectors <= 4) {
    launch_softmax_held<T, N, 4, 1, kPeel>(p, kSoftmaxThreads, stream);
  } else if (vectors <= 8) {
    launch_softmax_held<T, N, 8, 1, kPeel>(p, kSoftmaxThreads, stream);
  } else if (vectors <= 16) {
    launch_softmax_held<T, N, 16, 1, kPeel>(p, kSoftmaxThreads, stream);
  } else if (vectors <= 32) {
    launch_softmax_held<T, N, 32, 1, kPeel>(p, kSoftmaxThreads, stream);
  } else if (vectors <= 32 * 4) {
    launch_softmax_held<T, N, 32, 4, kPeel>(p, kSoftmaxThreads, stream);
  } else {
    const int threads = static_cast<int>((vectors + 127) / 128) * 32;
    launch_softmax_held<T, N, kWholeBlock, kShortItems, kPeel>(p, threads, stream);
  }
}

// Longer rows. N > 1: all of them, and all of their operands, are whole vectors.
template <typename T, int N>
void launch_softmax_long(const Softmax& p, cudaStream_t stream) {
  const int64_t vectors = p.extent.columns / N;
  const unsigned rows = static_cast<unsigned>(p.extent.rows);
  if (p.grad_y.data != nullptr) {
    softmax_backward_long_kernel<T, N><<<rows, kLongThreads, 0, stream>>>(p);
  } else if (vectors <= kHeldThreads * 8) {
    const int threads = static_cast<int>((vectors + 255) / 256) * 32;
    launch_softmax_held<T, N, kWholeBlock, 8, false>(p, threads, stream);
  } else {
    softmax_long_kernel<T, N><<<rows, kLongThreads, 0, stream>>>(p);
  }
}

}  // namespace liger
