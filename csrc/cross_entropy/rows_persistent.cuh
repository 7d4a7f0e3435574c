// Rows of logits -> loss and gradient in one read and one write of memory (sm_90 and later), by blocks that
// stay on the device: for rows of which an SM keeps only one, or a part of one. Without extras,
// with which it is slower than rows_resident.
//
// A block, or a cluster of blocks where one cannot hold a row, takes row after row. The row lies in shared
// memory in pieces; a warp has a part of its own in every piece, with a barrier. It alone reads that part for
// the statistics, turns it into the gradient, stores that, and has the same part of the next row come to its
// place. So the copies of a row run beside the gradient of the row before, without a warp that only copies,
// and the warps wait for each other once per row, for its statistics. The first warp of a block merges these
// and tells the others what the gradient is made of.
#pragma once

#include "cross_entropy/rows.cuh"
#include "device/persistent_rows.cuh"

namespace liger::ce {

// grid: clusters of plan.blocks blocks, at most as many clusters as rows. Shape: PersistentShape.
template <typename T, typename Shape>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kBlocksPerSm)
    rows_persistent(const Problem p, const PersistentPlan plan) {
#if __CUDA_ARCH__ >= 900
  constexpr int N = kVec<T>;
  constexpr bool kExtras = false;
  extern __shared__ __align__(128) unsigned char memory[];
  const int rank = blockIdx.x % plan.blocks;
  const int64_t row_step = gridDim.x / plan.blocks;
  WarpSlices<T, Shape> slices(memory, plan);
  typename Shape::ClusterReduce cluster_reduce(memory + Shape::slices_bytes(plan), rank, plan.blocks,
                                               slices.warp);

  Vec<T, 1> edge = {};
  RowInputs<T> inputs = {};  // of the first thread
  const auto load_rest = [&](const Slice<T>& s, int64_t row, int64_t y) {
    if (threadIdx.x == 0) inputs = read_inputs(p, s.row, row, y);
    const int column = s.edge_column(rank, p.vocab);
    if (column >= 0) edge.v[0] = s.row[column];
  };
  const auto load_all = [&](const Slice<T>& s, int64_t row, int64_t y) {
    slices.load_row(s, {s.row});
    load_rest(s, row, y);
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
  const float denominator = *p.denominator;
  cluster_reduce.wait_peers();

  for (; row < p.rows; row += row_step) {
    const Slice<T> next = slice_of(row + row_step, y_next);
    const int64_t y_after = target_of(row + 2 * row_step);
    T* const out = static_cast<T*>(p.gradient) + row * p.gradient_stride;
    if (now.valid) {
      Stats<kExtras> stats = no_stats<kExtras>();
      slices.first_pass(now, [&](auto count, const T* part, int column) {
        Vec<T, N> raw[count];
#pragma unroll
        for (int u = 0; u < count; ++u) raw[u] = load<T, N>(part + u * 32 * N);
        accumulate_all(stats, raw, column, 32 * N, p);
      });
      const int at_edge = now.edge_column(rank, p.vocab);
      if (at_edge >= 0) accumulate(stats, edge, at_edge, p);
      merge_warp(stats);
      Row facts = {};
      if (slices.warp == 0) {
        facts = row_of<kExtras>(p, inputs, row);
        // Waits for the logit at the target, in the place of which another block may have the gradient once
        // they have met.
        facts.z_target = __shfl_sync(0xffffffffu, facts.z_target, 0);
      }
      const Gradient g =
          cluster_reduce.template reduce<2>(stats, [&](const Stats<kExtras>* of_warps, int count) {
            merge_slots(stats, of_warps, count);
            return gradient_weights(p, facts, stats.max + logf(stats.sum), facts.token_weight / denominator,
                                    stats.max, stats.sum);
          });
      if (rank == 0 && threadIdx.x == 0) write_results(p, facts, stats);
      if (at_edge >= 0) out[at_edge] = gradient<kExtras>(edge, at_edge, p, g).v[0];
      if (next.valid) load_rest(next, row + row_step, y_next);
      const bool out_aligned = aligned_alike(now.row, out);
      slices.last_pass(now, next, {next.row}, [&](auto count, const T* part, int column) {
        // Of the whole warp; a negative difference is a large one.
        const bool plain = out_aligned && static_cast<unsigned>(g.target - column + slices.lane * N) >=
                                              static_cast<unsigned>(count * 32 * N);
        if (plain) {
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
