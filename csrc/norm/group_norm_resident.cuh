// GroupNorm backward with the rows of x and grad_y, a group of channels of one sample, staged in shared
// memory (norm/resident.cuh): every element is read once. For the shapes that
// group_norm_backward_persistent_kernel does not take.
//
// Grid: persistent clusters of r.blocks blocks, or one block per row. All tensors are contiguous and aligned
// to 16 bytes, and the spatial size is a multiple of kVec<T>, so no vector has elements of two channels.
#pragma once

#include "norm/group_norm_backward.cuh"
#include "norm/resident.cuh"

namespace liger {

// A channel is split into segments of equal size; a few consecutive lanes reduce one.
struct ChannelSegments {
  int vectors;             // per segment
  int lanes;               // per segment: a power of two, at most 32
  FastDivide per_channel;  // divides by the segments per channel
};

// vectors == 0: the number of vectors per channel has no suitable divisor.
inline ChannelSegments channel_segments(int64_t channel_vectors) {
  constexpr int kMaxVectors = 128, kMinVectors = 8;
  for (int64_t count = (channel_vectors + kMaxVectors - 1) / kMaxVectors;
       count * kMinVectors <= channel_vectors; ++count) {
    if (channel_vectors % count != 0) continue;
    ChannelSegments segments{static_cast<int>(channel_vectors / count), 32,
                             FastDivide(static_cast<uint32_t>(count))};
    while (segments.lanes > segments.vectors) segments.lanes /= 2;
    return segments;
  }
  return {};
}

// Writes grad_x and p.sums (samples x r.blocks, 2, channels), the partial sums of the parameter gradients.
// Shared memory per segment of a slice: its sum(grad_y * xhat) and sum(grad_y).
template <typename T>
__global__ void __launch_bounds__(kResidentThreads, 1)
    group_norm_backward_resident_kernel(const GroupNormBackward p, const ChannelSegments segments,
                                        const SmemRowPlan r) {
#if __CUDA_ARCH__ >= 900
  constexpr int N = kVec<T>;
  extern __shared__ __align__(128) unsigned char shared[];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  const int rank = blockIdx.x % r.blocks, step = blockDim.x;
  const int64_t row_step = gridDim.x / r.blocks;
  const int64_t hidden = p.channels_per_group * p.spatial,
                rows = p.samples * p.channels / p.channels_per_group;
  const int groups = static_cast<int>(p.channels / p.channels_per_group);
  const int begin = rank * r.slice, count = max(0, min(r.slice, static_cast<int>(hidden / N) - begin));
  const int first_segment = begin / segments.vectors, block_segments = count / segments.vectors,
            max_segments = r.slice / segments.vectors;
  const float inverse_hidden = 1.0f / static_cast<float>(hidden);
  float2* const segment_sums = reinterpret_cast<float2*>(shared + 2 * r.slice * 16);
  SmemSlice<T, 2> slice(r, shared, max_segments * static_cast<int>(sizeof(float2)));
  const auto load_stage = [&](int i, int64_t row) {
    const int64_t at = row * hidden + int64_t{begin} * N;
    const T* const from[] = {static_cast<const T*>(p.x) + at, static_cast<const T*>(p.grad_y) + at};
    slice.load(i, count, from);
  };

  int64_t row = blockIdx.x / r.blocks;
  if (threadIdx.x == 0) {
    for (int i = 0; i < kResidentStages; ++i) load_stage(i, row);
  }
  float mean = p.mean[row], rstd = p.rstd[row];
  sync_cluster_start(r.blocks);

  for (int set = 0; row < rows; row += row_step, set ^= 1) {
    const int64_t sample = row / groups, channel = (row - sample * groups) * p.channels_per_group;
    const auto weight_of = [&](int segment) {
      float w[1];
      const int channel_in_group =
          static_cast<int>(segments.per_channel.quotient(static_cast<uint32_t>(first_segment + segment)));
      load_parameter<T, 1>(p.weight, p.float_weight, 0.0f, 1.0f, channel + channel_in_group, w);
      return w[0];
    };
    int waited = 0;
    const int per_warp = 32 / segments.lanes, warp_segment = lane / segments.lanes,
              segment_lane = lane % segments.lanes;
    // A warp reduces one segment per group of lanes. All lanes take part in the shuffles.
    for (int base = warp * per_warp; base < block_segments; base += warps * per_warp) {
      const int last = min(base + per_warp, block_segments) * segments.vectors - 1;
      while (waited < kResidentStages && waited * r.stage <= last) slice.wait(waited++);
      const int segment = base + warp_segment;
      float dot = 0.0f, sum = 0.0f;
      if (segment < block_segments) {
#pragma unroll 2
        for (int v = segment_lane; v < segments.vectors; v += segments.lanes) {
          float xs[N], gs[N];
          unpack(slice.data[0][segment * segments.vectors + v], xs);
          unpack(slice.data[1][segment * segments.vectors + v], gs);
#pragma unroll
          for (int k = 0; k < N; ++k) {
            dot = fmaf(gs[k], xs[k] - mean, dot);
            sum += gs[k];
          }
        }
      }
      for (int offset = segments.lanes / 2; offset > 0; offset /= 2) {
        dot += __shfl_xor_sync(0xffffffffu, dot, offset);
        sum += __shfl_xor_sync(0xffffffffu, sum, offset);
      }
      if (segment_lane == 0 && segment < block_segments) segment_sums[segment] = {dot * rstd, sum};
    }
    while (waited < kResidentStages) slice.wait(waited++);
    slice.next_row();
    __syncthreads();

    // Every warp adds the same sums in the same order, so all have the same result.
    float2 total{};
    for (int segment = lane; segment < block_segments; segment += 32) {
      const float w = weight_of(segment);
      total.x = fmaf(w, segment_sums[segment].x, total.x);
      total.y = fmaf(w, segment_sums[segment].y, total.y);
    }
    total = {warp_reduce<Sum>(total.x), warp_reduce<Sum>(total.y)};
    if (r.blocks > 1) {
      float2* const slots = slice.template slots<float2>() + set * r.blocks;
      if (warp == 0) broadcast_partial(total, &slots[rank], r.blocks);
      sync_cluster(r.blocks);
      total = {};
      for (int block = 0; block < r.blocks; ++block) {
        total.x += slots[block].x;
        total.y += slots[block].y;
      }
    }
    const RowGradient gradient(mean, rstd, total.y, total.x, inverse_hidden);
    const int per_channel = static_cast<int>(segments.per_channel.divisor);
    float* const partial = p.sums + (sample * r.blocks + rank) * 2 * p.channels + channel;
    // Adds the segments of channel c that this block has: one thread if they are few, else a warp.
    const auto add_segments = [&](int c, int first, int by) {
      float2 sums{};
      const int stop = min((c + 1) * per_channel - first_segment, block_segments);
      for (int segment = max(c * per_channel - first_segment, 0) + first; segment < stop; segment += by) {
        sums.x += segment_sums[segment].x;
        sums.y += segment_sums[segment].y;
      }
      return sums;
    };
    const auto write = [&](int c, float2 sums) {
      partial[c] = sums.x;
      partial[p.channels + c] = sums.y;
    };
    if (per_channel <= 4) {
      for (int c = threadIdx.x; c < p.channels_per_group; c += step) write(c, add_segments(c, 0, 1));
    } else {
      for (int c = warp; c < p.channels_per_group; c += warps) {
        const float2 sums = add_segments(c, lane, 32);
        const float2 all = {warp_reduce<Sum>(sums.x), warp_reduce<Sum>(sums.y)};
        if (lane == 0) write(c, all);
      }
    }
    const bool has_next = row + row_step < rows;
    if (has_next) mean = p.mean[row + row_step], rstd = p.rstd[row + row_step];

    T* const grad_x = static_cast<T*>(p.grad_x) + row * hidden + int64_t{begin} * N;
    for (int i = 0; i < kResidentStages; ++i) {
      const int stop = min(count, (i + 1) * r.stage);
#pragma unroll 2
      for (int v = i * r.stage + static_cast<int>(threadIdx.x); v < stop; v += step) {
        float weight[1], w[N];
        load_parameter<T, 1>(p.weight, p.float_weight, 0.0f, 1.0f, channel + p.by_channel.quotient(begin + v),
                             weight);
#pragma unroll
        for (int k = 0; k < N; ++k) w[k] = weight[0];
        store(grad_x + int64_t{v} * N, gradient(slice.data[0][v], slice.data[1][v], w));
      }
      if (!has_next) continue;
      __syncthreads();  // all threads have read the stage: it may be overwritten
      if (threadIdx.x == 0) load_stage(i, row + row_step);
    }
  }
#endif
}

}  // namespace liger
