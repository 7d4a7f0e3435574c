// How a block of the RMSNorm backward keeps rows to come under way, and sums along a row.
//
// A row belongs to `lanes` neighbouring threads, each with `width` vectors of it; a block works on as many
// rows as it has room for. Blocks are persistent; every thread copies its own vectors of the next
// `stages` steps into its own slots of shared memory, so the ring needs no barrier, and a slot is refilled as
// soon as its thread has read it.
#pragma once

#include "common/reduce.cuh"
#include "kernels/rms_norm_backward_plan.cuh"

namespace liger {

// Sums R values over the lanes of a row; every lane gets the results. Lanes are a power of two up to 32, or
// whole warps; then the row's warps meet at a barrier of their own. Two scratch buffers in turn make one
// barrier per call enough. Unused warps count as zero, so the scratch must start as zeros.
template <int R>
struct RowSum {
  static constexpr int kMaxGroups = kMaxRowThreads / 64;  // of more than a warp each
  static constexpr int kScratch = 2 * kMaxGroups * R * kMaxRowWarps;
  float* scratch;
  int lanes;
  int turn = 0;

  __device__ RowSum(float* scratch, int lanes) : scratch(scratch), lanes(lanes) {
    for (int i = threadIdx.x; i < kScratch; i += blockDim.x) scratch[i] = 0.0f;
    __syncthreads();
  }

  __device__ __forceinline__ void operator()(float (&x)[R]) {
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) {
      if (2 * offset <= lanes) {
#pragma unroll
        for (int r = 0; r < R; ++r) x[r] += __shfl_xor_sync(0xffffffffu, x[r], offset);
      }
    }
    if (lanes <= 32) return;
    const int group = threadIdx.x / lanes;
    float* sums = scratch + (turn * kMaxGroups + group) * R * kMaxRowWarps;
    turn ^= 1;
    if (threadIdx.x % 32 == 0) {
#pragma unroll
      for (int r = 0; r < R; ++r) sums[r * kMaxRowWarps + (threadIdx.x - group * lanes) / 32] = x[r];
    }
    asm volatile("bar.sync %0, %1;" ::"r"(group + 1), "r"(lanes) : "memory");
#pragma unroll
    for (int r = 0; r < R; ++r)
      x[r] = warp_reduce<Sum, kMaxRowWarps>(sums[r * kMaxRowWarps + threadIdx.x % kMaxRowWarps]);
  }
};

// Dynamic shared memory beyond what every kernel may have: 48 KB less its static shared memory, a few KB
// here.
template <typename Kernel>
void allow_shared(Kernel kernel, int bytes) {
  if (bytes > 40 * 1024) cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
}

}  // namespace liger
