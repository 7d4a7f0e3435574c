// SPDX-License-Identifier: BSD-3-Clause

// Rows staged in shared memory (sm_90 and later): loss and gradient with one read and one write of global
// memory.
//
// A row belongs to a block, or to a cluster if one block cannot hold it (device/smem_rows.cuh). Each warp
// waits for its own part of a pipeline stage and adds it to the statistics. After the cluster reduction it
// computes the gradient of that part and stores it. In a persistent launch it then starts the bulk copy of
// the same part of the next row: loads overlap with the gradient without a producer warp. Warps wait for each
// other only in the cluster reduction. There the first warp of each block merges the statistics and
// broadcasts the coefficients of the gradient.
#pragma once

#include "cross_entropy/rows.cuh"
#include "device/smem_rows.cuh"

namespace liger::ce {

// grid: clusters of plan.blocks blocks, at most as many clusters as rows. Shape: SmemRowShape.
template <typename T, bool kExtras, typename Shape>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kBlocksPerSm)
    rows_smem(const Problem p, const SmemRowPlan plan) {
#if __CUDA_ARCH__ >= 900
  constexpr int N = kVec<T>;
  extern __shared__ __align__(128) unsigned char memory[];
  const int rank = blockIdx.x % plan.blocks;
  const int64_t row_step = gridDim.x / plan.blocks;
  WarpSlices<T, Shape> slices(memory, plan);
  typename Shape::ClusterReduce cluster_reduce(memory + Shape::slices_bytes(plan), rank, plan.blocks,
                                               slices.warp);

  Vec<T, 1> edge = {};
  RowInputs<T> inputs = {};  // set in the first thread of the block
  const auto load_registers = [&](const Slice<T>& s, int64_t row, int64_t y) {
    if (threadIdx.x == 0) inputs = read_inputs(p, s.row, row, y);
    const int column = s.edge_column(rank, p.vocab);
    if (column >= 0) edge.v[0] = s.row[column];
  };
  const auto load_all = [&](const Slice<T>& s, int64_t row, int64_t y) {
    slices.load_row(s, {s.row});
    load_registers(s, row, y);
  };
  const auto slice_of = [&](int64_t row, int64_t y) {
    return Slice<T>(static_cast<const T*>(p.logits) + row * p.row_stride, p.vocab, plan, rank,
                    y != p.targets.ignore_index);
  };
  const auto target_of = [&](int64_t row) { return row < p.rows ? p.targets[row] : p.targets.ignore_index; };

  cluster_reduce.arrive_peers();
  int64_t row = blockIdx.x / plan.blocks;
  int64_t y = target_of(row), y_next = target_of(row + row_step);
  Slice<T> now = slice_of(row, y);
  if (now.valid) load_all(now, row, y);
  const float denominator = denominator_of(p);
  cluster_reduce.wait_peers();

  for (; row < p.rows; row += row_step) {
    const Slice<T> next = slice_of(row + row_step, y_next);
    const int64_t y_after = target_of(row + 2 * row_step);
    T* const out = static_cast<T*>(p.gradient) + row * p.gradient_stride;
    if (now.valid) {
      Stats<kExtras> stats = empty_stats<kExtras>();
      slices.first_pass(now, [&](auto count, const T* part, int column) {
        Vec<T, N> raw[count];
#pragma unroll
        for (int u = 0; u < count; ++u) raw[u] = load<T, N>(part + u * 32 * N);
        accumulate_all(stats, raw, column, 32 * N, p);
      });
      const int edge_column = now.edge_column(rank, p.vocab);
      if (edge_column >= 0) accumulate(stats, edge, edge_column, p);
      merge_warp(stats);
      Row row_data = {};
      if (slices.warp == 0) {
        row_data = make_row<kExtras>(p, inputs, row);
        // The shuffle waits for the load of the target's logit. If the gradient overwrites the logits,
        // another block may overwrite that logit as soon as the reduction is complete.
        row_data.z_target = __shfl_sync(0xffffffffu, row_data.z_target, 0);
      }
      const GradientCoefficients g = cluster_reduce.template reduce<kExtras ? 7 : 2>(
          stats, [&](const Stats<kExtras>* partials, int count) {
            merge_slots(stats, partials, count);
            return gradient_coefficients(p, row_data, row_data.token_weight / denominator, stats.max,
                                         stats.sum);
          });
      if (rank == 0 && threadIdx.x == 0) write_results(p, row_data, stats);
      if (edge_column >= 0) out[edge_column] = gradient<kExtras>(edge, edge_column, p, g).v[0];
      if (next.valid) load_registers(next, row + row_step, y_next);
      const bool out_aligned = same_alignment(now.row, out);
      slices.last_pass(now, next, {next.row}, [&](auto count, const T* part, int column) {
        const bool fast_path = out_aligned && !slices.has_column(g.target, count, column);
        if (fast_path) {
          Vec<T, N> raw[count];
#pragma unroll
          for (int u = 0; u < count; ++u) raw[u] = load<T, N>(part + u * 32 * N);
#pragma unroll
          for (int u = 0; u < count; ++u) {
            const int at = column + u * 32 * N;
            store_whole(out + at, gradient<kExtras, false>(raw[u], at, p, g));
          }
        } else {
#pragma unroll 1
          for (int u = 0; u < count; ++u, part += 32 * N, column += 32 * N) {
            const Vec<T, N> d = gradient<kExtras>(load<T, N>(part), column, p, g);
            out_aligned ? store_whole(out + column, d) : store_elements(out + column, d);
          }
        }
      });
    } else {
      if (next.valid) load_all(next, row + row_step, y_next);
      write_zeros(out, p.vocab, rank, plan.blocks);
      if (rank == 0 && threadIdx.x == 0) write_ignored(p, row);
    }
    now = next;
    y_next = y_after;
  }
#endif
}

}  // namespace liger::ce
