// SPDX-License-Identifier: BSD-3-Clause

// GroupNorm with rows, a group of channels of one sample, staged in shared memory (sm_90 and later,
// device/smem_rows.cuh): forward and backward read every element once and write it once. A reduction over the
// cluster of a row (DSMEM) gives its moments, or the two sums of its gradient.
//
// Grid: clusters of plan.blocks blocks, at most as many clusters as rows. All tensors are contiguous and
// aligned to 16 bytes, and the spatial size is a multiple of kVec<T>, so no vector has elements of two
// channels.
#pragma once

#include "device/smem_rows.cuh"
#include "norm/group_norm_backward.cuh"

namespace liger {

// Parameters as in norm/moment_norm.cuh, without chunks. Shape: a SmemRowShape with the slot
// PartialMoments.
template <typename T, typename Shape>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kBlocksPerSm)
    group_norm_smem_kernel(const GroupNorm p, const SmemRowPlan plan) {
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
    // If any lane has values, the first lane has.
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

// The backward stages rows of x and grad_y.
template <int kThreads, int kBlocksPerSm>
using GroupNormBackwardShape = SmemRowShape<kThreads, 2, float2, 2, kBlocksPerSm>;

// The largest number of channels with elements in a part of a stage (at most 64 vectors).
__host__ __device__ constexpr int part_channels(int64_t channel_vectors) {
  return static_cast<int>((62 + channel_vectors) / channel_vectors) + 1;
}
// Shared memory per part: two sets, which alternate, of sum(grad_y * xhat) and sum(grad_y) of each channel.
constexpr int backward_part_bytes(int64_t channel_vectors) {
  return 2 * part_channels(channel_vectors) * static_cast<int>(sizeof(float2));
}

// Adds up x and y of the lanes that belong to one channel; the first lane gets the sums. `after`: number of
// later lanes of the channel, in this warp or beyond it.
__device__ __forceinline__ void add_channel_lanes(float2& sums, int after) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const float x = __shfl_down_sync(0xffffffffu, sums.x, offset);
    const float y = __shfl_down_sync(0xffffffffu, sums.y, offset);
    if (offset <= after && lane + offset < 32) sums.x += x, sums.y += y;
  }
}

// Writes grad_x and p.sums (samples x plan.blocks, 2, channels), the partial sums of the parameter gradients.
// p.by_channel divides by the vectors per channel.
//
// Each part of a stage has the sums of its channels in shared memory. A reduction over the cluster computes
// the row's two sums from them, and additions in a fixed order the sums of the channels. Without atomics the
// results are deterministic.
template <typename T, typename Shape>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kBlocksPerSm)
    group_norm_backward_smem_kernel(const GroupNormBackward p, const SmemRowPlan plan) {
#if __CUDA_ARCH__ >= 900
  static_assert(Shape::kWarpVectors == 64, "part_channels()");
  constexpr int N = kVec<T>;
  extern __shared__ __align__(128) unsigned char memory[];
  const int64_t hidden = p.channels_per_group * p.spatial;
  const int channels = static_cast<int>(p.channels_per_group),
            groups = static_cast<int>(p.channels / channels);
  const int64_t rows = p.samples * groups;
  const int columns = static_cast<int>(hidden), rank = blockIdx.x % plan.blocks;
  const int channel_vectors = static_cast<int>(p.by_channel.divisor);
  const int64_t row_step = gridDim.x / plan.blocks;
  const float inverse_hidden = 1.0f / static_cast<float>(hidden);
  WarpSlices<T, Shape> slices(memory, plan);
  typename Shape::ClusterReduce cluster_reduce(memory + Shape::slices_bytes(plan), rank, plan.blocks,
                                               slices.warp);
  // Two sets of (stages, warps, per_part).
  float2* const part_sums = reinterpret_cast<float2*>(memory + Shape::extra_offset(plan));
  const int per_part = part_channels(channel_vectors), set_size = plan.stages * Shape::kWarps * per_part;
  const int step = slices.copy_stride(), lane = slices.lane;

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
  float mean = p.mean[row], rstd = p.rstd[row];
  cluster_reduce.wait_peers();

  for (int set = 0; row < rows; row += row_step, set ^= 1) {
    const int64_t sample = row / groups, channel = (row - sample * groups) * channels;
    const auto weight_of = [&](int channel_in_group) {
      float w[1];
      load_parameter<T, 1>(p.weight, p.float_weight, 0.0f, 1.0f, channel + channel_in_group, w);
      return w[0];
    };
    float2* const sums = part_sums + set * set_size;
    float2 weighted = {0.0f, 0.0f};
    slices.first_pass_by_part(current, [&](int k, int begin, int count, const T* part) {
      float2* const own = sums + (k * Shape::kWarps + slices.warp) * per_part;
      const int first_vector = current.begin + begin, first = p.by_channel.quotient(first_vector);
      // The sums of this lane's vector among the 32 vectors from `at` on.
      const auto vector_sums = [&](int at) {
        float2 lane_sums = {0.0f, 0.0f};
        if (at + lane >= count) return lane_sums;
        float xs[N], gs[N];
        unpack(load<T, N>(part + (at + lane) * N), xs);
        unpack(load<T, N>(part + step + (at + lane) * N), gs);
#pragma unroll
        for (int i = 0; i < N; ++i) {
          lane_sums.x = fmaf(gs[i], xs[i] - mean, lane_sums.x);
          lane_sums.y += gs[i];
        }
        return lane_sums;
      };
      // Writes the part's entry of a channel, or of the rest of a channel, and adds to the row's sums.
      const auto add_channel = [&](int c, float w, float2 channel_sums, bool continues) {
        channel_sums.x *= rstd;
        weighted.x = fmaf(w, channel_sums.x, weighted.x);
        weighted.y = fmaf(w, channel_sums.y, weighted.y);
        float2& entry = own[c - first];
        entry.x = channel_sums.x + (continues ? entry.x : 0.0f);
        entry.y = channel_sums.y + (continues ? entry.y : 0.0f);
      };
      if (p.by_channel.quotient(first_vector + count - 1) == first) {
        const float w = weight_of(first);
        float2 lane_sums = {0.0f, 0.0f};
#pragma unroll
        for (int at = 0; at < Shape::kWarpVectors; at += 32) {
          const float2 more = vector_sums(at);
          lane_sums.x += more.x, lane_sums.y += more.y;
        }
        lane_sums = {warp_reduce<Sum>(lane_sums.x), warp_reduce<Sum>(lane_sums.y)};
        if (lane == 0) add_channel(first, w, lane_sums, false);
        __syncwarp();
        return;
      }
#pragma unroll 1
      for (int at = 0; at < count; at += 32) {
        const int vector = first_vector + at + lane, c = p.by_channel.quotient(vector);
        const int from_first = vector - c * channel_vectors;
        const bool inside = at + lane < count, head = inside && (lane == 0 || from_first == 0);
        const float w = head ? weight_of(c) : 0.0f;
        float2 channel_sums = vector_sums(at);
        add_channel_lanes(channel_sums, channel_vectors - 1 - from_first);
        // Lane 0 continues the channel of the previous 32 vectors.
        if (head) add_channel(c, w, channel_sums, at > 0 && from_first > 0);
        __syncwarp();
      }
    });
    weighted = {warp_reduce<Sum>(weighted.x), warp_reduce<Sum>(weighted.y)};
    const float2 total = cluster_reduce.template reduce<2>(weighted, [](const float2* partials, int count) {
      float2 all{};
      for (int i = threadIdx.x; i < count; i += 32) all.x += partials[i].x, all.y += partials[i].y;
      return float2{warp_reduce<Sum>(all.x), warp_reduce<Sum>(all.y)};
    });

    // The reduction ends with a block barrier: the sums of all parts are visible. This set is written again
    // only after the barrier of the next reduction.
    float* const partial = p.sums + (sample * plan.blocks + rank) * 2 * p.channels + channel;
    // The sums of channel c over every `by`th part from `from` on.
    const auto add_parts = [&](int c, int from, int by) {
      const int begin = max(c * channel_vectors - current.begin, 0),
                stop = min((c + 1) * channel_vectors - current.begin, current.count);
      float2 channel_sums{};
      if (begin >= stop) return channel_sums;
      const int last = slices.part_with(stop - 1);
      for (int part = slices.part_with(begin) + from; part <= last; part += by) {
        const int first = p.by_channel.quotient(current.begin + slices.part_begin(part));
        const float2 entry = sums[part * per_part + c - first];
        channel_sums.x += entry.x, channel_sums.y += entry.y;
      }
      return channel_sums;
    };
    const auto write = [&](int c, float2 channel_sums) {
      partial[c] = channel_sums.x;
      partial[p.channels + c] = channel_sums.y;
    };
    if (channel_vectors <= 4 * Shape::kWarpVectors) {
      for (int c = threadIdx.x; c < channels; c += Shape::kThreads) write(c, add_parts(c, 0, 1));
    } else {
      for (int c = slices.warp; c < channels; c += Shape::kWarps) {
        const float2 lane_sums = add_parts(c, lane, 32);
        const float2 warp_sums = {warp_reduce<Sum>(lane_sums.x), warp_reduce<Sum>(lane_sums.y)};
        if (lane == 0) write(c, warp_sums);
      }
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
