// GroupNorm of groups that are kept in shared memory (sm_90 and later), by blocks that stay, as in
// cross_entropy_persistent.cuh: forward and backward read every element once. For groups of vectors of 16
// bytes that no channels share.
#pragma once

#include "device/persistent_rows.cuh"
#include "norm/group_norm_backward.cuh"

namespace liger {

// x, x_rows, y, y_rows, hidden and so on as in moment_norm.cuh. affine.vectors: vectors of a channel. grid:
// clusters of plan.blocks blocks, at most as many clusters as groups. Shape: PersistentShape of PartMoments.
template <typename T, typename Shape>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kBlocksPerSm)
    group_norm_persistent_kernel(const GroupNorm p, const PersistentPlan plan) {
#if __CUDA_ARCH__ >= 900
  constexpr int N = kVec<T>;
  extern __shared__ __align__(128) unsigned char memory[];
  const int columns = static_cast<int>(p.hidden), rank = blockIdx.x % plan.blocks;
  const int64_t row_step = gridDim.x / plan.blocks;
  WarpSlices<T, Shape> slices(memory, plan);
  typename Shape::ClusterReduce cluster_reduce(memory + Shape::slices_bytes(plan), rank, plan.blocks,
                                               slices.warp);

  const auto slice_of = [&](int64_t row) {
    const T* const x = static_cast<const T*>(p.x) + row * p.hidden;
    return Slice<T>(x, columns, plan, rank, row < p.rows);
  };

  cluster_reduce.arrive_peers();
  int64_t row = blockIdx.x / plan.blocks;
  Slice<T> now = slice_of(row);
  {
    const T* const rows[] = {now.row};
    slices.load_row(now, rows);
  }
  cluster_reduce.wait_peers();

  for (; row < p.rows; row += row_step) {
    RunningMoments<T, N> running;
    slices.first_pass(now, [&](auto count, const T* part, int) {
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
    const Moments moments = cluster_reduce.template reduce<3>(
        PartMoments{values, of_warp.mean, of_warp.squares}, [&](const PartMoments* of_warps, int count) {
          JoinedSums joined(of_warps[0].mean);
          for (int i = threadIdx.x; i < count; i += 32) joined.add(of_warps[i]);
          return joined.of_warp(p.inverse_hidden);
        });

    const float rstd = rsqrtf(fmaf(moments.squares, p.inverse_hidden, p.eps));
    if (rank == 0 && threadIdx.x == 0) p.mean[row] = moments.mean, p.rstd[row] = rstd;
    T* const y = static_cast<T*>(p.y) + row * p.hidden;
    const Slice<T> next = slice_of(row + row_step);
    const T* const rows[] = {next.row};
    slices.last_pass(now, next, rows, [&](auto count, const T* part, int column) {
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

// The backward keeps the upstream gradient, too, and the sums of up to so many channels of a group by each
// warp, in two sets used in turn.
inline constexpr int kMostChannels = 64;
template <int kThreads, int kBlocksPerSm>
using GroupBackwardShape = PersistentShape<kThreads, 2, float2, 2, kBlocksPerSm,
                                           2 * kThreads / 32 * kMostChannels* int{sizeof(float2)}>;
// Vectors of a channel that a warp's part of a piece has at most, so that no part has more than two channels.
inline constexpr int kFewestOfChannel = 64;

// Also writes p.sums: (samples x blocks of a group, 2, channels), the slices of the gradients of the
// parameters. p.by_channel: vectors of a channel, kFewestOfChannel at least; up to kMostChannels of them in a
// group.
template <typename T, typename Shape>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kBlocksPerSm)
    group_norm_backward_persistent_kernel(const GroupNormBackward p, const PersistentPlan plan) {
#if __CUDA_ARCH__ >= 900
  static_assert(Shape::kWarpVectors <= kFewestOfChannel);
  constexpr int N = kVec<T>, kSet = Shape::kWarps * kMostChannels;
  extern __shared__ __align__(128) unsigned char memory[];
  const int64_t hidden = p.channels_per_group * p.spatial;
  const int channels = static_cast<int>(p.channels_per_group),
            groups = static_cast<int>(p.channels / channels);
  const int64_t rows = p.samples * groups;
  const int columns = static_cast<int>(hidden), rank = blockIdx.x % plan.blocks;
  const int64_t row_step = gridDim.x / plan.blocks;
  const float inverse_hidden = 1.0f / static_cast<float>(hidden);
  WarpSlices<T, Shape> slices(memory, plan);
  typename Shape::ClusterReduce cluster_reduce(memory + Shape::slices_bytes(plan), rank, plan.blocks,
                                               slices.warp);
  float2* const sums = reinterpret_cast<float2*>(memory + Shape::extra_offset(plan));
  const int step = slices.copy_stride();

  struct Sources {
    const T* of[2];
    __device__ __forceinline__ Sources(const GroupNormBackward& p, int64_t at)
        : of{static_cast<const T*>(p.x) + at, static_cast<const T*>(p.grad_y) + at} {}
  };
  const auto slice_of = [&](int64_t row) {
    return Slice<T>(static_cast<const T*>(p.x) + row * hidden, columns, plan, rank, row < rows);
  };

  cluster_reduce.arrive_peers();
  int64_t row = blockIdx.x / plan.blocks;
  Slice<T> now = slice_of(row);
  {
    const Sources sources(p, row * hidden);
    slices.load_row(now, sources.of);
  }
  for (int i = threadIdx.x; i < 2 * kSet; i += Shape::kThreads) sums[i] = {0.0f, 0.0f};
  float mean = p.mean[row], rstd = p.rstd[row];
  __syncthreads();
  cluster_reduce.wait_peers();

  for (int set = 0; row < rows; row += row_step, set ^= 1) {
    const int64_t sample = row / groups, channel = (row - sample * groups) * channels;
    const auto weight_of = [&](int of_group) {
      float w[1];
      load_parameter<T, 1>(p.weight, p.float_weight, 0.0f, 1.0f, channel + of_group, w);
      return w[0];
    };
    float2* const own = sums + set * kSet + slices.warp * kMostChannels;
    float2 weighted = {0.0f, 0.0f};
    // Of the part at hand, whose one or two channels are neighbours: one is even.
    float2 of_parity[2] = {};
    slices.first_pass(
        now,
        [&](auto count, const T* part, int column) {
#pragma unroll
          for (int u = 0; u < count; ++u) {
            float xs[N], gs[N];
            unpack(load<T, N>(part + u * 32 * N), xs);
            unpack(load<T, N>(part + step + u * 32 * N), gs);
            float2 of{};
#pragma unroll
            for (int k = 0; k < N; ++k) {
              of.x = fmaf(gs[k], xs[k] - mean, of.x);
              of.y += gs[k];
            }
            const bool odd = p.by_channel.quotient(column / N + u * 32) % 2 != 0;
            of_parity[0].x += odd ? 0.0f : of.x, of_parity[0].y += odd ? 0.0f : of.y;
            of_parity[1].x += odd ? of.x : 0.0f, of_parity[1].y += odd ? of.y : 0.0f;
          }
        },
        [&](int begin, int count) {
          __syncwarp();
          const int first = p.by_channel.quotient(now.begin + begin);
          const int last = p.by_channel.quotient(now.begin + begin + count - 1);
          for (int c = first; c <= last; ++c) {
            const float2 of = c % 2 != 0 ? of_parity[1] : of_parity[0];
            const float2 all = {warp_reduce<Sum>(of.x) * rstd, warp_reduce<Sum>(of.y)};
            const float w = weight_of(c);
            weighted.x = fmaf(w, all.x, weighted.x);
            weighted.y = fmaf(w, all.y, weighted.y);
            if (slices.lane == 0) own[c].x += all.x, own[c].y += all.y;
          }
          of_parity[0] = of_parity[1] = {0.0f, 0.0f};
        });
    const float2 total = cluster_reduce.template reduce<2>(weighted, [](const float2* of_warps, int count) {
      float2 all{};
      for (int i = threadIdx.x; i < count; i += 32) all.x += of_warps[i].x, all.y += of_warps[i].y;
      return float2{warp_reduce<Sum>(all.x), warp_reduce<Sum>(all.y)};
    });

    // The meeting has brought the sums of all warps; this set is used again after the next one.
    float* const part = p.sums + (sample * plan.blocks + rank) * 2 * p.channels + channel;
    for (int c = threadIdx.x; c < channels; c += Shape::kThreads) {
      double2 all{};
      for (int warp = 0; warp < Shape::kWarps; ++warp) {
        float2& of_warp = sums[set * kSet + warp * kMostChannels + c];
        all.x += of_warp.x, all.y += of_warp.y;
        of_warp = {0.0f, 0.0f};
      }
      part[c] = static_cast<float>(all.x);
      part[p.channels + c] = static_cast<float>(all.y);
    }
    const RowGradient gradient(mean, rstd, total.y, total.x, inverse_hidden);
    const Slice<T> next = slice_of(row + row_step);
    if (next.valid) mean = p.mean[row + row_step], rstd = p.rstd[row + row_step];
    const Sources sources(p, (row + row_step) * hidden);
    T* const grad_x = static_cast<T*>(p.grad_x) + row * hidden;
    slices.last_pass(now, next, sources.of, [&](auto count, const T* part, int column) {
#pragma unroll
      for (int u = 0; u < count; ++u) {
        const float weight = weight_of(p.by_channel.quotient(column / N + u * 32));
        float w[N];
#pragma unroll
        for (int k = 0; k < N; ++k) w[k] = weight;
        const T* const at = part + u * 32 * N;
        store_whole(grad_x + column + u * 32 * N, gradient(load<T, N>(at), load<T, N>(at + step), w));
      }
    });
    now = next;
  }
#endif
}

}  // namespace liger
