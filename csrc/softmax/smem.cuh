// SPDX-License-Identifier: BSD-3-Clause

// Softmax and its gradient for rows staged in shared memory (sm_90 and later): every element is read once
// from global memory. A row belongs to a block or to a cluster, and each warp loads its own part of every
// pipeline stage (device/smem_rows.cuh). Where a cluster has several rows, a warp starts the copy of its part
// of the next row as soon as it has stored the results of the same part of this row. Rows may start at any
// address, but equally far from a 16-byte boundary in all operands.
#pragma once

#include "device/smem_rows.cuh"
#include "softmax/softmax.cuh"

namespace liger {

// The row rule of the forward, y from x: the statistics of a row give the function that maps its vectors to
// results.
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

// The row rule of the backward, grad_x from y and grad_y.
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

// grid: clusters of plan.blocks blocks, at most as many clusters as rows. Shape: SmemRowShape.
template <typename T, typename Rule, typename Shape>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kBlocksPerSm)
    softmax_smem_kernel(const Softmax p, const SmemRowPlan plan) {
#if __CUDA_ARCH__ >= 900
  constexpr int N = kVec<T>, kTensors = Rule::kTensors;
  static_assert(Shape::kCopies == kTensors);
  using Stats = typename Rule::Stats;
  extern __shared__ __align__(128) unsigned char memory[];
  const int columns = static_cast<int>(p.extent.columns);
  const int rank = blockIdx.x % plan.blocks;
  const int64_t row_step = gridDim.x / plan.blocks;
  WarpSlices<T, Shape> slices(memory, plan);
  typename Shape::ClusterReduce cluster_reduce(memory + Shape::slices_bytes(plan), rank, plan.blocks,
                                               slices.warp);
  const int step = slices.copy_stride();

  Vec<T, 1> edge[kTensors] = {};
  const auto slice_of = [&](int64_t row) {
    return Slice<T>(row_of<T>(p.x, row), columns, plan, rank, row < p.extent.rows);
  };

  cluster_reduce.arrive_peers();
  int64_t row = blockIdx.x / plan.blocks;
  Slice<T> now = slice_of(row);
  int edge_column = now.edge_column(rank, columns);
  {
    const RuleRows<T, Rule> rows(p, row);
    slices.load_row(now, rows.data);
    if (edge_column >= 0) load_edge(edge, rows.data, edge_column);
  }
  cluster_reduce.wait_peers();

  for (; row < p.extent.rows; row += row_step) {
    Stats stats;
    slices.first_pass(now, [&](auto count, const T* part, int) {
      Vec<T, N> x[kTensors][count];
#pragma unroll
      for (int t = 0; t < kTensors; ++t) {
#pragma unroll
        for (int u = 0; u < count; ++u) x[t][u] = load<T, N>(part + t * step + u * 32 * N);
      }
      Rule::add(stats, x);
    });
    if (edge_column >= 0) add_edge<Rule>(stats, edge);
    __syncwarp();
    stats.merge_warp();
    const Rule result =
        cluster_reduce.template reduce<sizeof(Stats) / 4>(stats, [&](const Stats* partials, int count) {
          merge_slots(stats, partials, count);
          return Rule(stats);
        });

    T* const out = static_cast<T*>(p.out.data) + row * p.out.stride;
    if (edge_column >= 0) store(out + edge_column, result(edge));
    const Slice<T> next = slice_of(row + row_step);
    const RuleRows<T, Rule> rows(p, row + row_step);
    edge_column = next.valid ? next.edge_column(rank, columns) : -1;
    if (edge_column >= 0) load_edge(edge, rows.data, edge_column);
    slices.last_pass(now, next, rows.data, [&](auto count, const T* part, int column) {
      Vec<T, N> x[count][kTensors];
#pragma unroll
      for (int u = 0; u < count; ++u) {
#pragma unroll
        for (int t = 0; t < kTensors; ++t) x[u][t] = load<T, N>(part + t * step + u * 32 * N);
      }
#pragma unroll
      for (int u = 0; u < count; ++u) store_whole(out + column + u * 32 * N, result(x[u]));
    });
    now = next;
  }
#endif
}

}  // namespace liger
