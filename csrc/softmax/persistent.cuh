// Softmax and its gradient by persistent blocks or clusters (sm_90 and later), for rows that leave no room
// for two blocks of softmax/smem.cuh on an SM: every element is read once from global memory. Each warp loads
// its own part of every pipeline stage (device/persistent_rows.cuh). As soon as it has stored the results of
// a stage, it starts the copy of the same part of the next row, so loads overlap with the computation.
#pragma once

#include "device/persistent_rows.cuh"
#include "softmax/smem.cuh"

namespace liger {

// grid: clusters of plan.blocks blocks, at most as many clusters as rows. Shape: PersistentShape. Alignment
// as in softmax_smem_kernel.
template <typename T, typename Rule, typename Shape>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kBlocksPerSm)
    softmax_persistent_kernel(const Softmax p, const PersistentPlan plan) {
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
