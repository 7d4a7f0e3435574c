// How the row kernels spread rows over threads, keep rows to come under way, and sum along a row.
//
// A row belongs to `lanes` neighbouring threads, each with `width` vectors of it; a block works on as many
// rows as it has room for. Blocks are persistent; every thread copies its own vectors of the next
// `stages` steps into its own slots of shared memory, so the ring needs no barrier, and a slot is refilled as
// soon as its thread has read it.
#pragma once

#include <algorithm>

#include "common/reduce.cuh"
#include "common/vec.cuh"

namespace liger {

inline constexpr int kMaxRowThreads = 512;
inline constexpr int kMaxRowWarps = kMaxRowThreads / 32;

struct RowPlan {
  int width;    // vectors per thread; 0: the row is too wide for one block to hold
  int rows;     // rows per thread group and step
  int lanes;    // threads per row
  int threads;  // threads per block
  int stages;   // steps under way
  int blocks;
  int shared;  // bytes of dynamic shared memory
  int groups() const { return threads / lanes; }
};

// One block per multiprocessor, as large as its registers allow: every block writes a partial result.
inline RowPlan plan_rows(int64_t rows, int64_t vectors, int vector_bytes, bool vectorised, int streams,
                         int multiprocessors, int shared_limit) {
  RowPlan plan{};
  if (!vectorised) {
    plan.width = vectors <= 8 * kMaxRowThreads ? 8 : 0;
  } else if (vectors <= 128) {
    plan.width = vectors <= 32 ? 1 : vectors <= 64 ? 2 : 4;
  } else {
    plan.width = vectors <= 256 ? 1 : vectors <= 1024 ? 2 : vectors <= 2048 ? 4 : 0;
  }
  if (plan.width == 0) return plan;

  const int lanes = static_cast<int>((vectors + plan.width - 1) / plan.width);
  if (lanes <= 32) {
    plan.lanes = 1;
    while (plan.lanes < lanes) plan.lanes *= 2;
  } else {
    plan.lanes = (lanes + 31) / 32 * 32;
  }
  plan.threads = kMaxRowThreads / plan.lanes * plan.lanes;
  // Two rows at once where a thread holds little of one: their reductions overlap.
  plan.rows = plan.width == 1 ? 2 : 1;
  const int64_t steps = (rows + plan.groups() * plan.rows - 1) / (plan.groups() * plan.rows);
  plan.blocks = static_cast<int>(std::min<int64_t>(steps, multiprocessors));

  // Enough bytes under way per multiprocessor to cover the latency of memory, with room for slower moments.
  constexpr int kInFlight = 96 * 1024;
  const int stage_bytes = plan.threads * plan.width * plan.rows * streams * vector_bytes;
  plan.stages = std::clamp(kInFlight / stage_bytes, 2, 4);
  while (plan.stages > 1 && plan.stages * stage_bytes > shared_limit - 4096) --plan.stages;
  plan.shared = plan.stages * stage_bytes;
  return plan;
}

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
