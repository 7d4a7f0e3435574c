// GroupNorm by persistent blocks with the current row, a group of channels of one sample, staged in shared
// memory (sm_90 and later, device/persistent_rows.cuh): forward and backward read every element once and
// write it once. A reduction over the cluster of a row (DSMEM) gives its moments, or the two sums of its
// gradient.
//
// Grid: clusters of plan.blocks blocks, at most as many clusters as rows. All tensors are contiguous and
// aligned to 16 bytes, and the spatial size is a multiple of kVec<T>, so no vector has elements of two
// channels.
#pragma once

#include "device/persistent_rows.cuh"
#include "norm/group_norm_backward.cuh"

namespace liger {

// Parameters as in norm/moment_norm.cuh, without chunks. Shape: a PersistentShape with the slot
// PartialMoments.
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
  Slice<T> current = slice_of(row);
  {
    const T* const rows[] = {current.row};
    slices.load_row(current, rows);
  }
  cluster_reduce.wait_peers();

  for (; row < p.rows; row += row_step) {
    RunningMoments<T, N> running;
    slices.first_pass(current, [&](auto count, const T* part, int) {
#pragma unroll
      for (int u = 0; u < count; ++u) running.add(load<T, N>(part + u * 32 * N));
    });
    __syncwarp();
    // If any lane has values, the first one has.
    const Moments thread_moments = running.result();
    MomentReduction warp_reduction(__shfl_sync(0xffffffffu, thread_moments.mean, 0));
    warp_reduction.add({running.count(), thread_moments.mean, thread_moments.squares});
    const float values = warp_reduce<Sum>(running.count());
    const Moments warp_moments = warp_reduction.reduce_warp(1.0f / fmaxf(values, 1.0f));
    const Moments moments =
        cluster_reduce.template reduce<3>(PartialMoments{values, warp_moments.mean, warp_moments.squares},
                                          [&](const PartialMoments* partials, int count) {
                                            MomentReduction reduction(partials[0].mean);
                                            for (int i = threadIdx.x; i < count; i += 32)
                                              reduction.add(partials[i]);
                                            return reduction.reduce_warp(p.inverse_hidden);
                                          });

    const float rstd = rsqrtf(fmaf(moments.squares, p.inverse_hidden, p.eps));
    if (rank == 0 && threadIdx.x == 0) p.mean[row] = moments.mean, p.rstd[row] = rstd;
    T* const y = static_cast<T*>(p.y) + row * p.hidden;
    const Slice<T> next = slice_of(row + row_step);
    const T* const rows[] = {next.row};
    slices.last_pass(current, next, rows, [&](auto count, const T* part, int column) {
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
    current = next;
  }
#endif
}

// The backward stages rows of x and grad_y. Each warp has sums for up to kMaxChannels channels of a group in
// shared memory, in two sets that alternate.
inline constexpr int kMaxChannels = 64;
template <int kThreads, int kBlocksPerSm>
using GroupNormBackwardShape = PersistentShape<kThreads, 2, float2, 2, kBlocksPerSm,
                                               2 * kThreads / 32 * kMaxChannels* int{sizeof(float2)}>;
// The minimum number of vectors per channel. A warp's part of a stage is not larger, so it has at most two
// channels.
inline constexpr int kMinChannelVectors = 64;

// Writes grad_x and p.sums (samples x plan.blocks, 2, channels), the partial sums of the parameter gradients.
// Requires at least kMinChannelVectors vectors per channel and at most kMaxChannels channels per group.
// p.by_channel divides by the vectors per channel.
template <typename T, typename Shape>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kBlocksPerSm)
    group_norm_backward_persistent_kernel(const GroupNormBackward p, const PersistentPlan plan) {
#if __CUDA_ARCH__ >= 900
  static_assert(Shape::kWarpVectors <= kMinChannelVectors);
  constexpr int N = kVec<T>, kSet = Shape::kWarps * kMaxChannels;
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
    const T* rows[2];
    __device__ __forceinline__ Sources(const GroupNormBackward& p, int64_t at)
        : rows{static_cast<const T*>(p.x) + at, static_cast<const T*>(p.grad_y) + at} {}
  };
  const auto slice_of = [&](int64_t row) {
    return Slice<T>(static_cast<const T*>(p.x) + row * hidden, columns, plan, rank, row < rows);
  };

  cluster_reduce.arrive_peers();
  int64_t row = blockIdx.x / plan.blocks;
  Slice<T> current = slice_of(row);
  {
    const Sources sources(p, row * hidden);
    slices.load_row(current, sources.rows);
  }
  for (int i = threadIdx.x; i < 2 * kSet; i += Shape::kThreads) sums[i] = {0.0f, 0.0f};
  float mean = p.mean[row], rstd = p.rstd[row];
  __syncthreads();
  cluster_reduce.wait_peers();

  for (int set = 0; row < rows; row += row_step, set ^= 1) {
    const int64_t sample = row / groups, channel = (row - sample * groups) * channels;
    const auto weight_of = [&](int channel_in_group) {
      float w[1];
      load_parameter<T, 1>(p.weight, p.float_weight, 0.0f, 1.0f, channel + channel_in_group, w);
      return w[0];
    };
    float2* const own = sums + set * kSet + slices.warp * kMaxChannels;
    float2 weighted = {0.0f, 0.0f};
    // Sums of the current part, by the parity of the channel: its channels, two at most, are consecutive.
    float2 parity_sums[2] = {};
    slices.first_pass(
        current,
        [&](auto count, const T* part, int column) {
#pragma unroll
          for (int u = 0; u < count; ++u) {
            float xs[N], gs[N];
            unpack(load<T, N>(part + u * 32 * N), xs);
            unpack(load<T, N>(part + step + u * 32 * N), gs);
            float2 vector_sums{};
#pragma unroll
            for (int k = 0; k < N; ++k) {
              vector_sums.x = fmaf(gs[k], xs[k] - mean, vector_sums.x);
              vector_sums.y += gs[k];
            }
            const bool odd = p.by_channel.quotient(column / N + u * 32) % 2 != 0;
            parity_sums[0].x += odd ? 0.0f : vector_sums.x, parity_sums[0].y += odd ? 0.0f : vector_sums.y;
            parity_sums[1].x += odd ? vector_sums.x : 0.0f, parity_sums[1].y += odd ? vector_sums.y : 0.0f;
          }
        },
        [&](int begin, int count) {
          __syncwarp();
          const int first = p.by_channel.quotient(current.begin + begin);
          const int last = p.by_channel.quotient(current.begin + begin + count - 1);
          for (int c = first; c <= last; ++c) {
            const float2 lane_sums = c % 2 != 0 ? parity_sums[1] : parity_sums[0];
            const float2 warp_sums = {warp_reduce<Sum>(lane_sums.x) * rstd, warp_reduce<Sum>(lane_sums.y)};
            const float w = weight_of(c);
            weighted.x = fmaf(w, warp_sums.x, weighted.x);
            weighted.y = fmaf(w, warp_sums.y, weighted.y);
            if (slices.lane == 0) own[c].x += warp_sums.x, own[c].y += warp_sums.y;
          }
          parity_sums[0] = parity_sums[1] = {0.0f, 0.0f};
        });
    const float2 total = cluster_reduce.template reduce<2>(weighted, [](const float2* partials, int count) {
      float2 all{};
      for (int i = threadIdx.x; i < count; i += 32) all.x += partials[i].x, all.y += partials[i].y;
      return float2{warp_reduce<Sum>(all.x), warp_reduce<Sum>(all.y)};
    });

    // The reduction ends with a block barrier: the sums of all warps are visible. This set is written again
    // only after the barrier of the next one.
    float* const partial = p.sums + (sample * plan.blocks + rank) * 2 * p.channels + channel;
    for (int c = threadIdx.x; c < channels; c += Shape::kThreads) {
      double2 block_sums{};
      for (int warp = 0; warp < Shape::kWarps; ++warp) {
        float2& warp_sums = sums[set * kSet + warp * kMaxChannels + c];
        block_sums.x += warp_sums.x, block_sums.y += warp_sums.y;
        warp_sums = {0.0f, 0.0f};
      }
      partial[c] = static_cast<float>(block_sums.x);
      partial[p.channels + c] = static_cast<float>(block_sums.y);
    }
    const RowGradient gradient(mean, rstd, total.y, total.x, inverse_hidden);
    const Slice<T> next = slice_of(row + row_step);
    if (next.valid) mean = p.mean[row + row_step], rstd = p.rstd[row + row_step];
    const Sources sources(p, (row + row_step) * hidden);
    T* const grad_x = static_cast<T*>(p.grad_x) + row * hidden;
    slices.last_pass(current, next, sources.rows, [&](auto count, const T* part, int column) {
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
    current = next;
  }
#endif
}

}  // namespace liger
