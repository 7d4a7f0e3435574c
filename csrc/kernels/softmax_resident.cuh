// Softmax of long rows, forward and backward, from shared memory: every element is read once. Rows may start
// anywhere, all operands at the same distance from a multiple of 16 bytes.
#pragma once

#include "kernels/resident.cuh"
#include "kernels/softmax.cuh"
#include "kernels/span.cuh"

namespace liger {

// Static shared memory of the kernels below, rounded up.
inline constexpr int kSoftmaxOwnBytes = 3072;

// The largest value so far, and the sum of exp(value - max). As long as there was nothing but -inf, it is 0.
struct alignas(8) SoftmaxStats {
  float max = -INFINITY, sum = 0.0f;

  template <typename T, int N>
  __device__ __forceinline__ void add(const Vec<T, N>& x) {
    float values[N], next = max;
    unpack(x, values);
#pragma unroll
    for (int i = 0; i < N; ++i) next = fmaxf(next, values[i]);
    const float shift = next == -INFINITY ? 0.0f : next;
    if (next != max) sum *= softmax_exp<T>(max - shift);  // rare after the first vectors
#pragma unroll
    for (int i = 0; i < N; ++i) sum += softmax_exp<T>(values[i] - shift);
    max = next;
  }
  template <typename T>
  __device__ __forceinline__ void merge(const SoftmaxStats& other) {
    const float next = fmaxf(max, other.max), shift = next == -INFINITY ? 0.0f : next;
    sum = sum * softmax_exp<T>(max - shift) + other.sum * softmax_exp<T>(other.max - shift);
    max = next;
  }
  template <typename T>
  __device__ __forceinline__ void merge_warp() {
    const float next = warp_reduce<Max>(max), shift = next == -INFINITY ? 0.0f : next;
    sum = warp_reduce<Sum>(sum * softmax_exp<T>(max - shift));
    max = next;
  }
};

#if __CUDA_ARCH__ >= 900
// One row as a block sees it: its slice [begin, begin + count) of the vectors behind `head` single elements,
// and with rank 0 in each of the first threads one of the single elements at both ends.
template <typename T>
struct RowSlice {
  Span span;
  int begin, count, edge;  // edge: a column, or -1

  __device__ __forceinline__ RowSlice(const T* row, int columns, int rank, int slice)
      : span(span_of(row, columns)),
        begin(min(rank * slice, span.vectors)),
        count(min(slice, span.vectors - begin)),
        edge(rank == 0 && static_cast<int>(threadIdx.x) < span.edges()
                 ? span.edge_column(threadIdx.x, columns)
                 : -1) {}
  __device__ __forceinline__ int first() const { return span.head + begin * kVec<T>; }
};
#endif

template <typename T>
__global__ void __launch_bounds__(kResidentThreads, 2)
    softmax_resident_kernel(const Softmax p, const Residence r) {
#if __CUDA_ARCH__ >= 900
  constexpr int N = kVec<T>;
  extern __shared__ __align__(128) unsigned char shared[];
  __shared__ SoftmaxStats slots[2][kResidentWarps * kResidentBlocks];
  __shared__ uint64_t arrived[kResidentStages];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  const int rank = blockIdx.x % r.blocks, step = blockDim.x, columns = static_cast<int>(p.extent.columns);
  const int64_t row_step = gridDim.x / r.blocks;
  ResidentSlice<T, 1> slice(r, shared, arrived);
  const auto row_of = [&](int64_t row) { return static_cast<const T*>(p.x.data) + row * p.x.stride; };
  const auto load_stage = [&](int i, int64_t row, const RowSlice<T>& part) {
    const T* const from[] = {row_of(row) + part.first()};
    slice.load(i, part.count, from);
  };

  int64_t row = blockIdx.x / r.blocks;
  RowSlice<T> part(row_of(row), columns, rank, r.slice);
  if (threadIdx.x == 0) {
    for (int i = 0; i < kResidentStages; ++i) load_stage(i, row, part);
  }
  start_together(r.blocks);

  for (int turn = 0; row < p.extent.rows; row += row_step, turn ^= 1) {
    Vec<T, 1> edge;
    if (part.edge >= 0) edge.v[0] = row_of(row)[part.edge];
    SoftmaxStats stats;
    for (int i = 0; i < kResidentStages; ++i) {
      slice.wait(i);
      const int stop = min(part.count, (i + 1) * r.stage);
#pragma unroll 2
      for (int v = i * r.stage + static_cast<int>(threadIdx.x); v < stop; v += step)
        stats.add(slice.kept[0][v]);
    }
    slice.next_row();
    if (part.edge >= 0) stats.add(edge);
    __syncwarp();
    stats.template merge_warp<T>();
    tell_blocks(stats, &slots[turn][rank * warps + warp], r.blocks);
    meet_blocks(r.blocks);
    stats = {};
    for (int i = lane; i < warps * r.blocks; i += 32) stats.template merge<T>(slots[turn][i]);
    stats.template merge_warp<T>();

    const float scale = 1.0f / stats.sum;
    T* const out = static_cast<T*>(p.out.data) + row * p.out.stride;
    const auto result = [&](auto x) {
      constexpr int n = sizeof(x) / sizeof(T);
      float values[n];
      unpack(x, values);
#pragma unroll
      for (int i = 0; i < n; ++i) values[i] = softmax_exp<T>(values[i] - stats.max) * scale;
      return pack<T, n>(values);
    };
    if (part.edge >= 0) store(out + part.edge, result(edge));
    const bool more = row + row_step < p.extent.rows;
    const RowSlice<T> next(row_of(row + row_step), columns, rank, r.slice);
    for (int i = 0; i < kResidentStages; ++i) {
      const int stop = min(part.count, (i + 1) * r.stage);
#pragma unroll 2
      for (int v = i * r.stage + static_cast<int>(threadIdx.x); v < stop; v += step)
        store(out + part.first() + v * N, result(slice.kept[0][v]));
      __syncthreads();  // all threads have read the stage
      if (threadIdx.x == 0 && more) load_stage(i, row + row_step, next);
    }
    part = next;
  }
#endif
}

template <typename T>
__global__ void __launch_bounds__(kResidentThreads, 2)
    softmax_backward_resident_kernel(const Softmax p, const Residence r) {
#if __CUDA_ARCH__ >= 900
  constexpr int N = kVec<T>;
  extern __shared__ __align__(128) unsigned char shared[];
  __shared__ float slots[2][kResidentWarps * kResidentBlocks];
  __shared__ uint64_t arrived[kResidentStages];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  const int rank = blockIdx.x % r.blocks, step = blockDim.x, columns = static_cast<int>(p.extent.columns);
  const int64_t row_step = gridDim.x / r.blocks;
  ResidentSlice<T, 2> slice(r, shared, arrived);
  const auto y_of = [&](int64_t row) { return static_cast<const T*>(p.x.data) + row * p.x.stride; };
  const auto grad_of = [&](int64_t row) {
    return static_cast<const T*>(p.grad_y.data) + row * p.grad_y.stride;
  };
  const auto load_stage = [&](int i, int64_t row, const RowSlice<T>& part) {
    const T* const from[] = {y_of(row) + part.first(), grad_of(row) + part.first()};
    slice.load(i, part.count, from);
  };

  int64_t row = blockIdx.x / r.blocks;
  RowSlice<T> part(y_of(row), columns, rank, r.slice);
  if (threadIdx.x == 0) {
    for (int i = 0; i < kResidentStages; ++i) load_stage(i, row, part);
  }
  start_together(r.blocks);

  for (int turn = 0; row < p.extent.rows; row += row_step, turn ^= 1) {
    Vec<T, 1> edge, edge_grad;
    if (part.edge >= 0) edge.v[0] = y_of(row)[part.edge], edge_grad.v[0] = grad_of(row)[part.edge];
    float dot = 0.0f;
    for (int i = 0; i < kResidentStages; ++i) {
      slice.wait(i);
      const int stop = min(part.count, (i + 1) * r.stage);
#pragma unroll 2
      for (int v = i * r.stage + static_cast<int>(threadIdx.x); v < stop; v += step)
        dot = dot_product(slice.kept[1][v], slice.kept[0][v], dot);
    }
    slice.next_row();
    if (part.edge >= 0) dot = dot_product(edge_grad, edge, dot);
    __syncwarp();
    tell_blocks(warp_reduce<Sum>(dot), &slots[turn][rank * warps + warp], r.blocks);
    meet_blocks(r.blocks);
    dot = 0.0f;
    for (int i = lane; i < warps * r.blocks; i += 32) dot += slots[turn][i];
    dot = warp_reduce<Sum>(dot);

    T* const out = static_cast<T*>(p.out.data) + row * p.out.stride;
    if (part.edge >= 0) {
      softmax_grad(edge_grad, edge, dot);
      store(out + part.edge, edge);
    }
    const bool more = row + row_step < p.extent.rows;
    const RowSlice<T> next(y_of(row + row_step), columns, rank, r.slice);
    for (int i = 0; i < kResidentStages; ++i) {
      const int stop = min(part.count, (i + 1) * r.stage);
#pragma unroll 2
      for (int v = i * r.stage + static_cast<int>(threadIdx.x); v < stop; v += step) {
        Vec<T, N> item = slice.kept[0][v];
        softmax_grad(slice.kept[1][v], item, dot);
        store(out + part.first() + v * N, item);
      }
      __syncthreads();  // all threads have read the stage
      if (threadIdx.x == 0 && more) load_stage(i, row + row_step, next);
    }
    part = next;
  }
#endif
}

}  // namespace liger
