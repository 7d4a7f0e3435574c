// SPDX-License-Identifier: BSD-3-Clause

// Second pass of a split reduction over rows: the gradients of a norm's parameters from the partial sums of
// blocks. The order of the additions is fixed, so the result is deterministic.
//
// Grid: (columns / 16, parameters). Partial sums are read as float4 if `hidden` is a multiple of 4; `partial`
// is aligned to 16 bytes then.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "device/vec.cuh"

namespace liger {

// Partial sums of K parameters: each parameter has `count` rows of `hidden` elements, `stride` elements
// apart.
template <typename W, int K>
struct PartialSums {
  const float* partial[K];
  int count[K];
  int64_t stride;
  W* out[K];
};

// out[k][h] = sum over b of partial[k][b][h]. A block sums 16 columns, 4 per thread, and reads 128 partials
// at a time.
inline constexpr int kSumColumns = 16, kSumThreads = 512;

template <typename W, int K>
__global__ void __launch_bounds__(kSumThreads)
    sum_partials_kernel(const PartialSums<W, K> sums, int64_t hidden) {
  constexpr int kLanes = kSumColumns / 4;
  __shared__ float4 warp_sums[kSumThreads / 32][kLanes];
  const int quad = threadIdx.x % kLanes;
  const int64_t column = int64_t{blockIdx.x} * kSumColumns + quad * 4;
  // An index into the arrays would move them to local memory.
  const bool other = K > 1 && blockIdx.y > 0;
  const float* const partial = other ? sums.partial[K - 1] : sums.partial[0];
  const int partials = other ? sums.count[K - 1] : sums.count[0];
  const bool vectorised = hidden % 4 == 0;
#if __CUDA_ARCH__ >= 900
  cudaGridDependencySynchronize();
#endif
  float4 sum{};
#pragma unroll 2
  for (int index = threadIdx.x / kLanes; index < partials; index += kSumThreads / kLanes) {
    const float* const from = partial + index * sums.stride + column;
    if (vectorised) {
      if (column < hidden) {
        const float4 v = *reinterpret_cast<const float4*>(from);
        sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w;
      }
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (column + i < hidden) (&sum.x)[i] += from[i];
      }
    }
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
#pragma unroll
    for (int offset = kLanes; offset < 32; offset *= 2)
      (&sum.x)[i] += __shfl_xor_sync(0xffffffffu, (&sum.x)[i], offset);
  }
  if (threadIdx.x % 32 < kLanes) warp_sums[threadIdx.x / 32][quad] = sum;
  __syncthreads();
  const int64_t own = int64_t{blockIdx.x} * kSumColumns + threadIdx.x;
  if (threadIdx.x >= kSumColumns || own >= hidden) return;
  float total = 0.0f;
#pragma unroll
  for (const float4(&of_warp)[kLanes] : warp_sums) total += (&of_warp[threadIdx.x / 4].x)[threadIdx.x % 4];
  static_assert(K <= 2);
  (other ? sums.out[K - 1] : sums.out[0])[own] = from_float<W>(total);
}

// parameters: at most K. overlap: programmatic dependent launch, which overlaps the launch with the end of
// the kernel before it (compute capability 9.0 and later).
template <typename W, int K>
void launch_sum_partials(const PartialSums<W, K>& sums, int parameters, int64_t hidden, bool overlap,
                         cudaStream_t stream) {
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>((hidden + kSumColumns - 1) / kSumColumns), parameters);
  config.blockDim = dim3(kSumThreads);
  config.stream = stream;
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &attribute;
  config.numAttrs = overlap ? 1 : 0;
  cudaLaunchKernelEx(&config, sum_partials_kernel<W, K>, sums, hidden);
}

}  // namespace liger
