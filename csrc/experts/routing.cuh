// SPDX-License-Identifier: BSD-3-Clause

// The sort of the slots of a call by expert: a stable counting sort in two launches.
//
// Each block of count_slots counts the slots of each expert in a chunk of consecutive slots. Each block of
// sort_slots adds up the counts of the chunks before its own, and gives every slot of its chunk, in order,
// the next row of its expert. Only counts are added, so the result does not depend on the order of blocks.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <limits>

namespace liger::experts {

inline constexpr int kRouteThreads = 256, kRouteWarps = kRouteThreads / 32;
inline constexpr int kMaxRoutedExperts = 1024, kMaxBins = kMaxRoutedExperts + 1;
inline constexpr unsigned kAllLanes = 0xffffffffu;

// The experts of slots. The last bin has the sentinels.
struct Slots {
  const void* indices;
  bool wide;  // int64, else int32
  int count, choices, experts;
  int chunk;  // the slots of a block, a multiple of kRouteThreads

  __device__ __forceinline__ int bins() const { return experts + 1; }
  __device__ __forceinline__ long long index(int slot) const {
    return wide ? __ldg(static_cast<const long long*>(indices) + slot)
                : __ldg(static_cast<const int*>(indices) + slot);
  }
  __device__ __forceinline__ int bin(long long index) const {
    return index < 0 ? 0 : index < experts ? static_cast<int>(index) : experts;
  }
};

// As python/liger/ops/grouped_experts/routing.py describes them.
struct SortedSlots {
  int* ends;
  long long *order, *tokens, *experts, *inverse;
  float* weights;  // or null
};

// counts: (chunks, bins).
__global__ void __launch_bounds__(kRouteThreads) count_slots(const Slots slots, int* counts) {
  __shared__ int own[kMaxBins];
  for (int bin = threadIdx.x; bin < slots.bins(); bin += kRouteThreads) own[bin] = 0;
  __syncthreads();
  const int begin = blockIdx.x * slots.chunk, end = min(begin + slots.chunk, slots.count);
  for (int slot = begin + threadIdx.x; slot < end; slot += kRouteThreads)
    atomicAdd(&own[slots.bin(slots.index(slot))], 1);
  __syncthreads();
  for (int bin = threadIdx.x; bin < slots.bins(); bin += kRouteThreads)
    counts[blockIdx.x * slots.bins() + bin] = own[bin];
}

// The sum of `value` over the threads up to this one, and over all threads. sums: shared memory.
__device__ __forceinline__ int sum_before(int value, int (&sums)[kRouteWarps], int& total) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int sum = value;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(kAllLanes, sum, step);
    if (lane >= step) sum += other;
  }
  if (lane == 31) sums[warp] = sum;
  __syncthreads();
  total = 0;
#pragma unroll
  for (int i = 0; i < kRouteWarps; ++i) {
    if (i < warp) sum += sums[i];
    total += sums[i];
  }
  __syncthreads();
  return sum;
}

template <typename W>
__global__ void __launch_bounds__(kRouteThreads)
    sort_slots(const Slots slots, const W* weights, const int* counts, int chunks, const SortedSlots out) {
  // Of each warp: first the number of its slots in each bin, then the next row of the bin.
  __shared__ int rows[kRouteWarps][kMaxBins];
  __shared__ int sums[kRouteWarps];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, bins = slots.bins();
  for (int i = 0; i < kRouteWarps; ++i)
    for (int bin = threadIdx.x; bin < bins; bin += kRouteThreads) rows[i][bin] = 0;
  __syncthreads();
  const int part = slots.chunk / kRouteWarps, begin = blockIdx.x * slots.chunk + warp * part;
  const int end = min(begin + part, slots.count);
  for (int slot = begin + lane; slot < end; slot += 32)
    atomicAdd(&rows[warp][slots.bin(slots.index(slot))], 1);
  __syncthreads();

  int before_bins = 0;
  for (int first = 0; first < bins; first += kRouteThreads) {
    const int bin = first + threadIdx.x;
    int before = 0, after = 0;
    if (bin < bins) {
#pragma unroll 8
      for (int chunk = 0; chunk < chunks; ++chunk) {
        const int count = __ldg(counts + chunk * bins + bin);
        (chunk < static_cast<int>(blockIdx.x) ? before : after) += count;
      }
    }
    int total;
    const int last = before_bins + sum_before(before + after, sums, total);
    before_bins += total;
    if (bin < bins) {
      if (blockIdx.x == 0 && bin < slots.experts) out.ends[bin] = last;
      int row = last - after;
#pragma unroll
      for (int i = 0; i < kRouteWarps; ++i) {
        const int count = rows[i][bin];
        rows[i][bin] = row;
        row += count;
      }
    }
  }
  __syncthreads();

  for (int first = begin; first < end; first += 32) {
    const int slot = first + lane;
    const bool inside = slot < end;
    const long long index = inside ? slots.index(slot) : 0;
    const int bin = inside ? slots.bin(index) : bins;
    const unsigned equal = __match_any_sync(kAllLanes, bin), earlier = equal & ((1u << lane) - 1);
    const int row = inside ? rows[warp][bin] + __popc(earlier) : 0;
    __syncwarp();
    if (inside && earlier == 0) rows[warp][bin] += __popc(equal);
    __syncwarp();
    if (!inside) continue;
    const bool valid = bin < slots.experts;
    out.order[row] = slot;
    out.tokens[row] = slot / slots.choices;
    out.experts[row] = valid ? bin : slots.experts - 1;
    out.inverse[slot] = valid ? row : slots.count;
    if (out.weights != nullptr)
      out.weights[row] =
          index < 0 ? std::numeric_limits<float>::quiet_NaN() : static_cast<float>(weights[slot]);
  }
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    // The pad.
    out.tokens[slots.count] = 0, out.experts[slots.count] = 0;
    if (out.weights != nullptr) out.weights[slots.count] = 0.0f;
  }
}

}  // namespace liger::experts
