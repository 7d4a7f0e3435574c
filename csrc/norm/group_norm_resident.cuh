// GroupNorm backward of groups that are kept in shared memory, with their upstream gradient: every element is
// read once. For groups of vectors of 16 bytes that no channels share.
#pragma once

#include "norm/group_norm_backward.cuh"
#include "norm/resident.cuh"

namespace liger {

// The unit of the backward: vectors of one channel whose sums a few neighbouring lanes take.
struct ChannelUnits {
  int vectors;         // of a unit
  int lanes;           // a power of two, at most a warp
  FastDivide channel;  // by the units of a channel
};

// Nothing (vectors == 0) where a channel has no divisor of a suitable size.
inline ChannelUnits channel_units(int64_t channel_vectors) {
  constexpr int kMost = 128, kLeast = 8;
  for (int64_t pieces = (channel_vectors + kMost - 1) / kMost; pieces * kLeast <= channel_vectors; ++pieces) {
    if (channel_vectors % pieces != 0) continue;
    ChannelUnits units{static_cast<int>(channel_vectors / pieces), 32,
                       FastDivide(static_cast<uint32_t>(pieces))};
    while (units.lanes > units.vectors) units.lanes /= 2;
    return units;
  }
  return {};
}

// Also writes p.sums: (samples x blocks of a row, 2, channels), the parts of the gradients of the parameters.
// Dynamic shared memory: the slices of x and grad_y, then two floats for each unit of a slice.
template <typename T>
__global__ void __launch_bounds__(kResidentThreads, 1)
    group_norm_backward_resident_kernel(const GroupNormBackward p, const ChannelUnits units,
                                        const Residence r) {
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
  const int first_unit = begin / units.vectors, own_units = count / units.vectors,
            most_units = r.slice / units.vectors;
  const float inverse_hidden = 1.0f / static_cast<float>(hidden);
  float2* const unit_sums = reinterpret_cast<float2*>(shared + 2 * r.slice * 16);
  ResidentSlice<T, 2> slice(r, shared, most_units * static_cast<int>(sizeof(float2)));
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
  start_together(r.blocks);

  for (int turn = 0; row < rows; row += row_step, turn ^= 1) {
    const int64_t sample = row / groups, channel = (row - sample * groups) * p.channels_per_group;
    const auto weight_of = [&](int unit) {
      float w[1];
      const int of_group = static_cast<int>(units.channel.quotient(static_cast<uint32_t>(first_unit + unit)));
      load_parameter<T, 1>(p.weight, p.float_weight, 0.0f, 1.0f, channel + of_group, w);
      return w[0];
    };
    int waited = 0;
    const int per_warp = 32 / units.lanes, in_warp = lane / units.lanes, at_lane = lane % units.lanes;
    // A warp takes as many units as it has groups of lanes; all lanes meet in the shuffles.
    for (int base = warp * per_warp; base < own_units; base += warps * per_warp) {
      const int last = min(base + per_warp, own_units) * units.vectors - 1;
      while (waited < kResidentStages && waited * r.stage <= last) slice.wait(waited++);
      const int unit = base + in_warp;
      float dot = 0.0f, sum = 0.0f;
      if (unit < own_units) {
#pragma unroll 2
        for (int v = at_lane; v < units.vectors; v += units.lanes) {
          float xs[N], gs[N];
          unpack(slice.kept[0][unit * units.vectors + v], xs);
          unpack(slice.kept[1][unit * units.vectors + v], gs);
#pragma unroll
          for (int k = 0; k < N; ++k) {
            dot = fmaf(gs[k], xs[k] - mean, dot);
            sum += gs[k];
          }
        }
      }
      for (int offset = units.lanes / 2; offset > 0; offset /= 2) {
        dot += __shfl_xor_sync(0xffffffffu, dot, offset);
        sum += __shfl_xor_sync(0xffffffffu, sum, offset);
      }
      if (at_lane == 0 && unit < own_units) unit_sums[unit] = {dot * rstd, sum};
    }
    while (waited < kResidentStages) slice.wait(waited++);
    slice.next_row();
    __syncthreads();

    // Every warp takes the same sums in the same order.
    float2 total{};
    for (int unit = lane; unit < own_units; unit += 32) {
      const float w = weight_of(unit);
      total.x = fmaf(w, unit_sums[unit].x, total.x);
      total.y = fmaf(w, unit_sums[unit].y, total.y);
    }
    total = {warp_reduce<Sum>(total.x), warp_reduce<Sum>(total.y)};
    if (r.blocks > 1) {
      float2* const slots = slice.template slots<float2>() + turn * r.blocks;
      if (warp == 0) tell_blocks(total, &slots[rank], r.blocks);
      meet_blocks(r.blocks);
      total = {};
      for (int block = 0; block < r.blocks; ++block) {
        total.x += slots[block].x;
        total.y += slots[block].y;
      }
    }
    const RowGradient gradient(mean, rstd, total.y, total.x, inverse_hidden);
    const int per_channel = static_cast<int>(units.channel.divisor);
    float* const part = p.sums + (sample * r.blocks + rank) * 2 * p.channels + channel;
    // The units of a channel that are here: a few by one thread, many by a warp.
    const auto add_units = [&](int c, int first, int by) {
      float2 sums{};
      const int stop = min((c + 1) * per_channel - first_unit, own_units);
      for (int unit = max(c * per_channel - first_unit, 0) + first; unit < stop; unit += by) {
        sums.x += unit_sums[unit].x;
        sums.y += unit_sums[unit].y;
      }
      return sums;
    };
    const auto write = [&](int c, float2 sums) {
      part[c] = sums.x;
      part[p.channels + c] = sums.y;
    };
    if (per_channel <= 4) {
      for (int c = threadIdx.x; c < p.channels_per_group; c += step) write(c, add_units(c, 0, 1));
    } else {
      for (int c = warp; c < p.channels_per_group; c += warps) {
        const float2 sums = add_units(c, lane, 32);
        const float2 all = {warp_reduce<Sum>(sums.x), warp_reduce<Sum>(sums.y)};
        if (lane == 0) write(c, all);
      }
    }
    const bool more = row + row_step < rows;
    if (more) mean = p.mean[row + row_step], rstd = p.rstd[row + row_step];

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
        store(grad_x + int64_t{v} * N, gradient(slice.kept[0][v], slice.kept[1][v], w));
      }
      if (!more) continue;
      __syncthreads();  // all threads have read the stage
      if (threadIdx.x == 0) load_stage(i, row + row_step);
    }
  }
#endif
}

}  // namespace liger
