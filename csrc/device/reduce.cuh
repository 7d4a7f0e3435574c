// SPDX-License-Identifier: BSD-3-Clause

// Deterministic warp and block reductions in float.
#pragma once

#include <cuda_runtime.h>

namespace liger {

struct Sum {
  static __device__ __forceinline__ float apply(float a, float b) { return a + b; }
  static __device__ __forceinline__ float identity() { return 0.0f; }
};
struct Max {
  static __device__ __forceinline__ float apply(float a, float b) { return fmaxf(a, b); }
  static __device__ __forceinline__ float identity() { return -INFINITY; }
};

// Width: consecutive lanes that are reduced together, a power of two up to 32. Every lane gets the result.
// All lanes of the warp must call it.
template <typename Op, int Width = 32>
__device__ __forceinline__ float warp_reduce(float x) {
#pragma unroll
  for (int offset = Width / 2; offset > 0; offset /= 2)
    x = Op::apply(x, __shfl_xor_sync(0xffffffffu, x, offset));
  return x;
}

// Every thread gets the result. scratch: 32 floats of shared memory; the
// first barrier guards the reads of an earlier reduction in the same scratch.
template <typename Op>
__device__ __forceinline__ float block_reduce(float x, float* scratch) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = (blockDim.x + 31) / 32;
  x = warp_reduce<Op>(x);
  if (warps == 1) return x;
  __syncthreads();
  if (lane == 0) scratch[warp] = x;
  __syncthreads();
  x = lane < warps ? scratch[lane] : Op::identity();
  return warp_reduce<Op>(x);
}

}  // namespace liger
