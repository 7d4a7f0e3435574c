// The gradient of a norm's weight from the parts that blocks have of it.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/vec.cuh"

namespace liger {

// out[h] = sum of partial[b][h] over the blocks b. A block takes 16 columns, 4 to a thread, and reads 128
// parts at a time.
inline constexpr int kSumColumns = 16, kSumThreads = 512;

template <typename W>
__global__ void __launch_bounds__(kSumThreads)
    sum_partials_kernel(const float* partial, W* out, int64_t hidden, int parts) {
  constexpr int kLanes = kSumColumns / 4;
  __shared__ float4 warp_sums[kSumThreads / 32][kLanes];
  const int quad = threadIdx.x % kLanes;
  const int64_t column = int64_t{blockIdx.x} * kSumColumns + quad * 4;
  const bool whole = hidden % 4 == 0;
#if __CUDA_ARCH__ >= 900
  cudaGridDependencySynchronize();
#endif
  float4 sum{};
#pragma unroll 2
  for (int part = threadIdx.x / kLanes; part < parts; part += kSumThreads / kLanes) {
    const float* const from = partial + part * hidden + column;
    if (whole) {
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
  for (const float4(&sums)[kLanes] : warp_sums) total += (&sums[threadIdx.x / 4].x)[threadIdx.x % 4];
  out[own] = from_float<W>(total);
}

// overlap: the launch itself runs beside the end of the kernel before it (compute capability 9.0 and later).
template <typename W>
void launch_sum_partials(const float* partial, W* out, int64_t hidden, int parts, bool overlap,
                         cudaStream_t stream) {
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>((hidden + kSumColumns - 1) / kSumColumns));
  config.blockDim = dim3(kSumThreads);
  config.stream = stream;
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &attribute;
  config.numAttrs = overlap ? 1 : 0;
  cudaLaunchKernelEx(&config, sum_partials_kernel<W>, partial, out, hidden, parts);
}

}  // namespace liger
