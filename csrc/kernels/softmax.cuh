// Softmax over rows, in float, and its gradient y * (grad_y - sum(grad_y * y)).
//
// A row that fits is held in the registers of a few lanes, a warp or a block, and read once. A longer one is
// read twice by its block: the second time from its end, which the caches still have.
#pragma once

#include "common/reduce.cuh"
#include "kernels/elementwise.cuh"

namespace liger {

struct Softmax {
  InputRows x, grad_y;  // x: y in the backward; grad_y: backward only
  OutputRows out;       // y or grad_x
  Extent extent;        // columns in vectors
};

inline constexpr int kSoftmaxThreads = 128;  // of blocks that have several rows
inline constexpr int kHeldThreads = 512;     // at most, of blocks that hold one: half the register file
inline constexpr int kLongThreads = 1024;    // of blocks that read theirs twice
inline constexpr int kWholeBlock = 0;

template <typename T>
__device__ __forceinline__ float softmax_exp(float x) {
  return sizeof(T) == 4 ? expf(x) : __expf(x);
}

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

// What one thread holds of a row.
template <typename T, int N, int kItems>
struct Held {
  Vec<T, N> items[kItems];

  template <typename Group>
  __device__ __forceinline__ Held(const Group& at, const InputRows& x, int64_t columns, float padding) {
    const T* row = static_cast<const T*>(x.data) + at.row * x.stride;
#pragma unroll
    for (int k = 0; k < kItems; ++k) {
      const int column = at.lane + k * at.lanes;
      if (at.live && column < columns) {
        items[k] = load<T, N>(row + int64_t{column} * N);
      } else {
#pragma unroll
        for (int i = 0; i < N; ++i) items[k].v[i] = from_float<T>(padding);
      }
    }
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
  __device__ __forceinline__ void write(const Group& at, const OutputRows& out, int64_t columns,
                                        int k) const {
    T* row = static_cast<T*>(out.data) + at.row * out.stride;
    const int column = at.lane + k * at.lanes;
    if (at.live && column < columns) store(row + int64_t{column} * N, items[k]);
  }
};

template <typename T, int N, int kLanes, int kItems>
__global__ void __launch_bounds__(kLanes == kWholeBlock ? kHeldThreads : kSoftmaxThreads)
    softmax_held_kernel(const Softmax p) {
  const RowGroup<kLanes> at(p.extent.rows);
  Held<T, N, kItems> x(at, p.x, p.extent.columns, -INFINITY);
  float max = -INFINITY, sum = 0.0f, values[N];
#pragma unroll
  for (int k = 0; k < kItems; ++k) {
    unpack(x.items[k], values);
#pragma unroll
    for (int i = 0; i < N; ++i) max = fmaxf(max, values[i]);
  }
  max = at.template reduce<Max>(max);
#pragma unroll
  for (int k = 0; k < kItems; ++k) {
    unpack(x.again(k), values);
#pragma unroll
    for (int i = 0; i < N; ++i) sum += softmax_exp<T>(values[i] - max);
  }
  const float scale = 1.0f / at.template reduce<Sum>(sum);
#pragma unroll
  for (int k = 0; k < kItems; ++k) {
    unpack(x.again(k), values);
#pragma unroll
    for (int i = 0; i < N; ++i) values[i] = softmax_exp<T>(values[i] - max) * scale;
    x.items[k] = pack<T, N>(values);
    x.write(at, p.out, p.extent.columns, k);
  }
}

template <typename T, int N>
__device__ __forceinline__ void softmax_grad(const Vec<T, N>& grad_y, Vec<T, N>& y, float dot) {
  float g[N], v[N];
  unpack(grad_y, g);
  unpack(y, v);
#pragma unroll
  for (int i = 0; i < N; ++i) v[i] *= g[i] - dot;
  y = pack<T, N>(v);
}

template <typename T, int N>
__device__ __forceinline__ float dot_product(const Vec<T, N>& a, const Vec<T, N>& b, float sum) {
  float u[N], v[N];
  unpack(a, u);
  unpack(b, v);
#pragma unroll
  for (int i = 0; i < N; ++i) sum = fmaf(u[i], v[i], sum);
  return sum;
}

template <typename T, int N, int kLanes, int kItems>
__global__ void __launch_bounds__(kLanes == kWholeBlock ? kHeldThreads : kSoftmaxThreads)
    softmax_backward_held_kernel(const Softmax p) {
  const RowGroup<kLanes> at(p.extent.rows);
  Held<T, N, kItems> y(at, p.x, p.extent.columns, 0.0f);
  Held<T, N, kItems> grad_y(at, p.grad_y, p.extent.columns, 0.0f);
  float dot = 0.0f;
#pragma unroll
  for (int k = 0; k < kItems; ++k) dot = dot_product(grad_y.items[k], y.items[k], dot);
  dot = at.template reduce<Sum>(dot);
#pragma unroll
  for (int k = 0; k < kItems; ++k) {
    softmax_grad(grad_y.again(k), y.again(k), dot);
    y.write(at, p.out, p.extent.columns, k);
  }
}

// The last column of this thread: a second walk begins there.
__device__ __forceinline__ int64_t last_column(int64_t columns) {
  return columns <= threadIdx.x ? -1 : threadIdx.x + (columns - 1 - threadIdx.x) / blockDim.x * blockDim.x;
}

template <typename T, int N>
__global__ void __launch_bounds__(kLongThreads) softmax_long_kernel(const Softmax p) {
  const RowGroup<kWholeBlock> at(p.extent.rows);
  const T* x = static_cast<const T*>(p.x.data) + at.row * p.x.stride;
  T* out = static_cast<T*>(p.out.data) + at.row * p.out.stride;
  float max = -INFINITY, sum = 0.0f, values[N];
#pragma unroll 4
  for (int64_t column = threadIdx.x; column < p.extent.columns; column += blockDim.x) {
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
  for (int64_t column = last_column(p.extent.columns); column >= 0; column -= blockDim.x) {
    unpack(load<T, N>(x + column * N), values);
#pragma unroll
    for (int i = 0; i < N; ++i) values[i] = softmax_exp<T>(values[i] - whole) * scale;
    store(out + column * N, pack<T, N>(values));
  }
}

template <typename T, int N>
__global__ void __launch_bounds__(kLongThreads) softmax_backward_long_kernel(const Softmax p) {
  const RowGroup<kWholeBlock> at(p.extent.rows);
  const T* y = static_cast<const T*>(p.x.data) + at.row * p.x.stride;
  const T* grad_y = static_cast<const T*>(p.grad_y.data) + at.row * p.grad_y.stride;
  T* out = static_cast<T*>(p.out.data) + at.row * p.out.stride;
  float dot = 0.0f;
#pragma unroll 2
  for (int64_t column = threadIdx.x; column < p.extent.columns; column += blockDim.x)
    dot = dot_product(load<T, N>(grad_y + column * N), load<T, N>(y + column * N), dot);
  dot = at.template reduce<Sum>(dot);
#pragma unroll 2
  for (int64_t column = last_column(p.extent.columns); column >= 0; column -= blockDim.x) {
    Vec<T, N> item = load<T, N>(y + column * N);
    softmax_grad(load<T, N>(grad_y + column * N), item, dot);
    store(out + column * N, item);
  }
}

template <typename T, int N, int kLanes, int kItems>
void launch_softmax_held(const Softmax& p, int threads, cudaStream_t stream) {
  const int64_t rows_per_block = kLanes == kWholeBlock ? 1 : kSoftmaxThreads / kLanes;
  const unsigned blocks = static_cast<unsigned>((p.extent.rows + rows_per_block - 1) / rows_per_block);
  if (p.grad_y.data == nullptr) {
    softmax_held_kernel<T, N, kLanes, kItems><<<blocks, threads, 0, stream>>>(p);
  } else if constexpr (kItems <= 4) {  // more of two tensors would not fit
    softmax_backward_held_kernel<T, N, kLanes, kItems><<<blocks, threads, 0, stream>>>(p);
  }
}

// Columns in vectors of N.
template <typename T, int N>
void launch_softmax(const Softmax& p, cudaStream_t stream) {
  const int64_t columns = p.extent.columns;
  const bool backward = p.grad_y.data != nullptr;
  const auto warps_of = [&](int items) {
    return static_cast<int>((columns + 32 * items - 1) / (32 * items)) * 32;
  };
  if (columns <= 4) {
    launch_softmax_held<T, N, 4, 1>(p, kSoftmaxThreads, stream);
  } else if (columns <= 32) {
    launch_softmax_held<T, N, 32, 1>(p, kSoftmaxThreads, stream);
  } else if (columns <= 32 * 4) {
    launch_softmax_held<T, N, 32, 4>(p, kSoftmaxThreads, stream);
  } else if (columns <= kHeldThreads * 4) {
    launch_softmax_held<T, N, kWholeBlock, 4>(p, warps_of(4), stream);
  } else if (columns <= kHeldThreads * 8 && !backward) {
    launch_softmax_held<T, N, kWholeBlock, 8>(p, warps_of(8), stream);
  } else if (columns <= kHeldThreads * 16 && !backward) {
    launch_softmax_held<T, N, kWholeBlock, 16>(p, warps_of(16), stream);
  } else if (backward) {
    softmax_backward_long_kernel<T, N><<<static_cast<unsigned>(p.extent.rows), kLongThreads, 0, stream>>>(p);
  } else {
    softmax_long_kernel<T, N><<<static_cast<unsigned>(p.extent.rows), kLongThreads, 0, stream>>>(p);
  }
}

}  // namespace liger
