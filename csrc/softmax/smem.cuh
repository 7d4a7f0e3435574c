// Softmax and its gradient of rows that a block keeps in shared memory (sm_90 and later): every element is
// read once. One block for a row, two or more of them on an SM, so that one computes while others
// load and store. Rows may start anywhere, those of all operands equally far from a 16-byte boundary.
#pragma once

#include "device/aligned_row.cuh"
#include "device/cluster.cuh"
#include "softmax/softmax.cuh"

namespace liger {

inline constexpr int kSmemThreads = 512;  // of a block, at most
inline constexpr int kSmemStages = 4;     // of a row, whose arrival is awaited one by one

// y from x.
template <typename T>
struct SoftmaxForward {
  static constexpr int kTensors = 1;
  using Stats = SoftmaxStats<T>;

  // Vectors of all tensors at once.
  template <int N, int U>
  static __device__ __forceinline__ void add(Stats& stats, const Vec<T, N> (&of)[kTensors][U]) {
    stats.add(of[0]);
  }

  float max, scale;

  __device__ __forceinline__ explicit SoftmaxForward(const Stats& stats)
      : max(stats.max), scale(1.0f / stats.sum) {}
  template <int N>
  __device__ __forceinline__ Vec<T, N> operator()(const Vec<T, N> (&of)[kTensors]) const {
    float values[N];
    unpack(of[0], values);
#pragma unroll
    for (int i = 0; i < N; ++i) values[i] = softmax_exp<T>(values[i] - max) * scale;
    return pack<T, N>(values);
  }
};

// grad_x from y and grad_y.
template <typename T>
struct SoftmaxBackward {
  static constexpr int kTensors = 2;
  using Stats = DotProduct;

  template <int N, int U>
  static __device__ __forceinline__ void add(Stats& stats, const Vec<T, N> (&of)[kTensors][U]) {
#pragma unroll
    for (int u = 0; u < U; ++u) stats.sum = dot_product(of[1][u], of[0][u], stats.sum);
  }

  float dot;

  __device__ __forceinline__ explicit SoftmaxBackward(const Stats& stats) : dot(stats.sum) {}
  template <int N>
  __device__ __forceinline__ Vec<T, N> operator()(const Vec<T, N> (&of)[kTensors]) const {
    Vec<T, N> y = of[0];
    softmax_grad(of[1], y, dot);
    return y;
  }
};

template <typename T>
__device__ __forceinline__ const T* row_of(const InputRows& rows, int64_t row) {
  return static_cast<const T*>(rows.data) + row * rows.stride;
}

// The same element of a row of each tensor.
template <typename T, int kTensors>
__device__ __forceinline__ void load_edge(Vec<T, 1> (&edge)[kTensors], const T* const (&rows)[kTensors],
                                          int column) {
#pragma unroll
  for (int t = 0; t < kTensors; ++t) edge[t].v[0] = rows[t][column];
}
template <typename Rule, typename T, int kTensors>
__device__ __forceinline__ void add_edge(typename Rule::Stats& stats, const Vec<T, 1> (&edge)[kTensors]) {
  Vec<T, 1> of[kTensors][1];
#pragma unroll
  for (int t = 0; t < kTensors; ++t) of[t][0] = edge[t];
  Rule::add(stats, of);
}
// The rows of all tensors of Rule.
template <typename T, typename Rule>
struct RuleRows {
  const T* of[Rule::kTensors];

  __device__ __forceinline__ RuleRows(const Softmax& p, int64_t row) {
    of[0] = row_of<T>(p.x, row);
    if constexpr (Rule::kTensors > 1) of[1] = row_of<T>(p.grad_y, row);
  }
};

// grid: rows. Any number of threads that is a multiple of 32. Dynamic shared memory: for each tensor `room`
// vectors, as many as a row touches at most.
template <typename T, typename Rule>
__global__ void __launch_bounds__(kSmemThreads, 3) softmax_smem_kernel(const Softmax p, int room) {
#if __CUDA_ARCH__ >= 900
  constexpr int N = kVec<T>, kTensors = Rule::kTensors;
  extern __shared__ __align__(128) unsigned char memory[];
  __shared__ typename Rule::Stats slots[kSmemThreads / 32];
  __shared__ uint64_t arrived[kSmemStages];
  const int columns = static_cast<int>(p.extent.columns), step = blockDim.x;
  const RuleRows<T, Rule> rows(p, blockIdx.x);
  const AlignedRow aligned = align_row(rows.of[0], columns);
  const int stage = (aligned.vectors + kSmemStages * step - 1) / (kSmemStages * step) * step;
  T* const kept = reinterpret_cast<T*>(memory);
  if (threadIdx.x == 0) {
#pragma unroll
    for (int i = 0; i < kSmemStages; ++i) mbarrier_init(&arrived[i]);
    mbarrier_init_fence();
    for (int i = 0; i * stage < aligned.vectors; ++i) {
      const int first = i * stage, bytes = min(aligned.vectors - first, stage) * 16;
      mbarrier_arrive_expect(&arrived[i], kTensors * bytes);
#pragma unroll
      for (int t = 0; t < kTensors; ++t) {
        bulk_load(kept + (t * room + first) * N, rows.of[t] + aligned.head + first * N, bytes, &arrived[i]);
      }
    }
  }
  const int at_edge =
      static_cast<int>(threadIdx.x) < aligned.edges() ? aligned.edge_column(threadIdx.x, columns) : -1;
  Vec<T, 1> edge[kTensors] = {};
  if (at_edge >= 0) load_edge(edge, rows.of, at_edge);
  __syncthreads();  // the barriers are initialised

  typename Rule::Stats stats;
  for (int i = 0; i * stage < aligned.vectors; ++i) {
    mbarrier_wait(&arrived[i], 0);
    const int stop = min(aligned.vectors, (i + 1) * stage);
#pragma unroll 2
    for (int v = i * stage + static_cast<int>(threadIdx.x); v < stop; v += step) {
      Vec<T, N> of[kTensors][1];
#pragma unroll
      for (int t = 0; t < kTensors; ++t) of[t][0] = load<T, N>(kept + (t * room + v) * N);
      Rule::add(stats, of);
    }
  }
  if (at_edge >= 0) add_edge<Rule>(stats, edge);
  __syncwarp();
  merge_block(stats, slots);

  const Rule result(stats);
  T* const out = static_cast<T*>(p.out.data) + int64_t{blockIdx.x} * p.out.stride;
#pragma unroll 2
  for (int v = threadIdx.x; v < aligned.vectors; v += step) {
    Vec<T, N> of[kTensors];
#pragma unroll
    for (int t = 0; t < kTensors; ++t) of[t] = load<T, N>(kept + (t * room + v) * N);
    store_whole(out + aligned.head + v * N, result(of));
  }
  if (at_edge >= 0) store(out + at_edge, result(edge));
#endif
}

}  // namespace liger
