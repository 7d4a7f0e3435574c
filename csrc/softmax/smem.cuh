// Softmax and its gradient for rows staged in shared memory (sm_90 and later): every element is read once
// from global memory. One block per row; two or more blocks per SM, so that one computes while others load
// and store. Rows may start at any address, but equally far from a 16-byte boundary in all operands.
#pragma once

#include "device/aligned_row.cuh"
#include "device/cluster.cuh"
#include "softmax/softmax.cuh"

namespace liger {

inline constexpr int kSmemThreads = 512;  // maximum block size
inline constexpr int kSmemStages = 4;     // pipeline stages of a row: bulk copies with one mbarrier each

// y from x: the row rule of the forward. Stats of a row -> the function that maps its vectors to results.
template <typename T>
struct SoftmaxForward {
  static constexpr int kTensors = 1;
  using Stats = SoftmaxStats<T>;

  // Adds U vectors of each tensor.
  template <int N, int U>
  static __device__ __forceinline__ void add(Stats& stats, const Vec<T, N> (&x)[kTensors][U]) {
    stats.add(x[0]);
  }

  float max, scale;

  __device__ __forceinline__ explicit SoftmaxForward(const Stats& stats)
      : max(stats.max), scale(1.0f / stats.sum) {}
  template <int N>
  __device__ __forceinline__ Vec<T, N> operator()(const Vec<T, N> (&x)[kTensors]) const {
    float values[N];
    unpack(x[0], values);
#pragma unroll
    for (int i = 0; i < N; ++i) values[i] = softmax_exp<T>(values[i] - max) * scale;
    return pack<T, N>(values);
  }
};

// grad_x from y and grad_y: the row rule of the backward.
template <typename T>
struct SoftmaxBackward {
  static constexpr int kTensors = 2;
  using Stats = DotProduct;

  template <int N, int U>
  static __device__ __forceinline__ void add(Stats& stats, const Vec<T, N> (&x)[kTensors][U]) {
#pragma unroll
    for (int u = 0; u < U; ++u) stats.sum = dot_product(x[1][u], x[0][u], stats.sum);
  }

  float dot;

  __device__ __forceinline__ explicit SoftmaxBackward(const Stats& stats) : dot(stats.sum) {}
  template <int N>
  __device__ __forceinline__ Vec<T, N> operator()(const Vec<T, N> (&x)[kTensors]) const {
    Vec<T, N> y = x[0];
    softmax_grad(x[1], y, dot);
    return y;
  }
};

template <typename T>
__device__ __forceinline__ const T* row_of(const InputRows& rows, int64_t row) {
  return static_cast<const T*>(rows.data) + row * rows.stride;
}

// Loads the element at `column` of the row of each tensor.
template <typename T, int kTensors>
__device__ __forceinline__ void load_edge(Vec<T, 1> (&edge)[kTensors], const T* const (&rows)[kTensors],
                                          int column) {
#pragma unroll
  for (int t = 0; t < kTensors; ++t) edge[t].v[0] = rows[t][column];
}
template <typename Rule, typename T, int kTensors>
__device__ __forceinline__ void add_edge(typename Rule::Stats& stats, const Vec<T, 1> (&edge)[kTensors]) {
  Vec<T, 1> x[kTensors][1];
#pragma unroll
  for (int t = 0; t < kTensors; ++t) x[t][0] = edge[t];
  Rule::add(stats, x);
}
// Row `row` of each input tensor of Rule.
template <typename T, typename Rule>
struct RuleRows {
  const T* data[Rule::kTensors];

  __device__ __forceinline__ RuleRows(const Softmax& p, int64_t row) {
    data[0] = row_of<T>(p.x, row);
    if constexpr (Rule::kTensors > 1) data[1] = row_of<T>(p.grad_y, row);
  }
};

// grid: rows. Block size: any multiple of 32 up to kSmemThreads. Dynamic shared memory: `capacity` vectors
// per tensor, at least as many as a row has between its edge elements.
template <typename T, typename Rule>
__global__ void __launch_bounds__(kSmemThreads, 3) softmax_smem_kernel(const Softmax p, int capacity) {
#if __CUDA_ARCH__ >= 900
  constexpr int N = kVec<T>, kTensors = Rule::kTensors;
  extern __shared__ __align__(128) unsigned char memory[];
  __shared__ typename Rule::Stats slots[kSmemThreads / 32];
  __shared__ uint64_t arrived[kSmemStages];
  const int columns = static_cast<int>(p.extent.columns), step = blockDim.x;
  const RuleRows<T, Rule> rows(p, blockIdx.x);
  const AlignedRow aligned = align_row(rows.data[0], columns);
  const int stage = (aligned.vectors + kSmemStages * step - 1) / (kSmemStages * step) * step;
  T* const smem_row = reinterpret_cast<T*>(memory);
  if (threadIdx.x == 0) {
#pragma unroll
    for (int i = 0; i < kSmemStages; ++i) mbarrier_init(&arrived[i]);
    mbarrier_init_fence();
    for (int i = 0; i * stage < aligned.vectors; ++i) {
      const int first = i * stage, bytes = min(aligned.vectors - first, stage) * 16;
      mbarrier_arrive_expect(&arrived[i], kTensors * bytes);
#pragma unroll
      for (int t = 0; t < kTensors; ++t) {
        bulk_load(smem_row + (t * capacity + first) * N, rows.data[t] + aligned.head + first * N, bytes,
                  &arrived[i]);
      }
    }
  }
  const int edge_column =
      static_cast<int>(threadIdx.x) < aligned.edges() ? aligned.edge_column(threadIdx.x, columns) : -1;
  Vec<T, 1> edge[kTensors] = {};
  if (edge_column >= 0) load_edge(edge, rows.data, edge_column);
  __syncthreads();  // makes the initialised mbarriers visible to all threads

  typename Rule::Stats stats;
  for (int i = 0; i * stage < aligned.vectors; ++i) {
    mbarrier_wait(&arrived[i], 0);
    const int stop = min(aligned.vectors, (i + 1) * stage);
#pragma unroll 2
    for (int v = i * stage + static_cast<int>(threadIdx.x); v < stop; v += step) {
      Vec<T, N> x[kTensors][1];
#pragma unroll
      for (int t = 0; t < kTensors; ++t) x[t][0] = load<T, N>(smem_row + (t * capacity + v) * N);
      Rule::add(stats, x);
    }
  }
  if (edge_column >= 0) add_edge<Rule>(stats, edge);
  __syncwarp();
  merge_block(stats, slots);

  const Rule result(stats);
  T* const out = static_cast<T*>(p.out.data) + int64_t{blockIdx.x} * p.out.stride;
#pragma unroll 2
  for (int v = threadIdx.x; v < aligned.vectors; v += step) {
    Vec<T, N> x[kTensors];
#pragma unroll
    for (int t = 0; t < kTensors; ++t) x[t] = load<T, N>(smem_row + (t * capacity + v) * N);
    store_whole(out + aligned.head + v * N, result(x));
  }
  if (edge_column >= 0) store(out + edge_column, result(edge));
#endif
}

}  // namespace liger
