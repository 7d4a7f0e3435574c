// GroupNorm forward of groups that are kept in shared memory (sm_90 and later), by blocks that stay, as in
// cross_entropy_persistent.cuh: every element is read once. For groups of vectors of 16 bytes that no
// channels share.
#pragma once

#include "kernels/group_norm.cuh"
#include "kernels/persistent_rows.cuh"

namespace liger {

// x, x_rows, y, y_rows, hidden and so on as in moment_norm.cuh. affine.vectors: vectors of a channel. grid:
// clusters of plan.blocks blocks, at most as many clusters as groups. Shape: PersistentShape of PartMoments.
template <typename T, typename Shape>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kResident)
    group_norm_persistent_kernel(const GroupNorm p, const PersistentPlan plan) {
#if __CUDA_ARCH__ >= 900
  constexpr int N = kVec<T>;
  extern __shared__ __align__(128) unsigned char memory[];
  const int columns = static_cast<int>(p.hidden), rank = blockIdx.x % plan.blocks;
  const int64_t row_step = gridDim.x / plan.blocks;
  KeptParts<T, Shape> parts(memory, plan);
  typename Shape::Meeting meeting(memory + Shape::kept_bytes(plan), rank, plan.blocks, parts.warp);

  const auto slice_of = [&](int64_t row) {
    const T* const x = static_cast<const T*>(p.x) + row * p.hidden;
    return Slice<T>(x, columns, plan, rank, row < p.rows);
  };

  meeting.announce();
  int64_t row = blockIdx.x / plan.blocks;
  Slice<T> now = slice_of(row);
  {
    const T* const rows[] = {now.row};
    parts.load_row(now, rows);
  }
  meeting.start();

  for (; row < p.rows; row += row_step) {
    RunningMoments<T, N> running;
    parts.first_pass(now, [&](auto count, const T* part, int) {
#pragma unroll
      for (int u = 0; u < count; ++u) running.add(load<T, N>(part + u * 32 * N));
    });
    __syncwarp();
    // The first lane has values where any has.
    const Moments of_thread = running.result();
    JoinedSums in_warp(__shfl_sync(0xffffffffu, of_thread.mean, 0));
    in_warp.add({running.count(), of_thread.mean, of_thread.squares});
    const float values = warp_reduce<Sum>(running.count());
    const Moments of_warp = in_warp.of_warp(1.0f / fmaxf(values, 1.0f));
    const Moments moments = meeting.template meet<3>(PartMoments{values, of_warp.mean, of_warp.squares},
                                                     [&](const PartMoments* of_warps, int count) {
                                                       JoinedSums joined(of_warps[0].mean);
                                                       for (int i = threadIdx.x; i < count; i += 32)
                                                         joined.add(of_warps[i]);
                                                       return joined.of_warp(p.inverse_hidden);
                                                     });

    const float rstd = rsqrtf(fmaf(moments.squares, p.inverse_hidden, p.eps));
    if (rank == 0 && threadIdx.x == 0) p.mean[row] = moments.mean, p.rstd[row] = rstd;
    T* const y = static_cast<T*>(p.y) + row * p.hidden;
    const Slice<T> next = slice_of(row + row_step);
    const T* const rows[] = {next.row};
    parts.last_pass(now, next, rows, [&](auto count, const T* part, int column) {
#pragma unroll
      for (int u = 0; u < count; ++u) {
        const float2 affine = p.affine.template at<T>(row, column / N + u * 32);
        const float scale = rstd * affine.x;
        float values[N];
        unpack(load<T, N>(part + u * 32 * N), values);
#pragma unroll
        for (int k = 0; k < N; ++k) values[k] = fmaf(values[k] - moments.mean, scale, affine.y);
        store_whole(y + column + u * 32 * N, pack<T>(values));
      }
    });
    now = next;
  }
#endif
}

}  // namespace liger
