// SPDX-License-Identifier: BSD-3-Clause

// Multistage pipeline and row reductions of the norm backwards.
//
// A thread group of `lanes` consecutive threads processes a row, with up to `width` vectors per thread. A
// block has `groups` such groups and is persistent. Each thread copies (cp.async) its own vectors of the next
// `stages` steps to its own slots of a ring in shared memory. Only that thread reads them, so the ring needs
// no barrier, and a slot is refilled as soon as its thread has read it.
#pragma once

#include "device/async.cuh"
#include "device/reduce.cuh"
#include "host/launch/shared_memory.h"
#include "norm/backward_plan.cuh"
#include "norm/parameter_grads.cuh"

namespace liger {

// The coordinate of this thread in its block: lane `lane` of thread group `group`.
struct ThreadCoord {
  int lanes, groups, group, lane;
  int vectors;  // per row

  __device__ __forceinline__ ThreadCoord(int lanes, int vectors)
      : lanes(lanes),
        groups(blockDim.x / lanes),
        group(threadIdx.x / lanes),
        lane(threadIdx.x % lanes),
        vectors(vectors) {}
};

// The ring of stages. A stage of a thread has V vectors of N elements for each of R rows of `Streams`
// tensors.
template <typename T, int N, int V, int R, int Streams>
struct RowRing {
  using Vector = Vec<T, N>;
  Vector* own;

  __device__ __forceinline__ explicit RowRing(unsigned char* shared)
      : own(reinterpret_cast<Vector*>(shared) + threadIdx.x) {}

  __device__ __forceinline__ Vector& slot(int stage, int r, int stream, int j) const {
    return own[(((stage * R + r) * Streams + stream) * V + j) * blockDim.x];
  }

  // The first address after the ring.
  __device__ __forceinline__ void* end(int stages) const { return &slot(stages, 0, 0, 0) - threadIdx.x; }

  // Starts the copies of the rows first, first + groups, ... that are below `rows`, and commits them as one
  // group. source(stream, row): the address of a row of a tensor.
  template <typename Source>
  __device__ __forceinline__ void load_stage(const ThreadCoord& coord, int stage, int64_t first, int64_t rows,
                                             const Source& source) const {
#pragma unroll
    for (int r = 0; r < R; ++r) {
      const int64_t row = first + r * coord.groups;
      if (row >= rows) break;
      const T* from[Streams];
#pragma unroll
      for (int stream = 0; stream < Streams; ++stream) from[stream] = source(stream, row);
#pragma unroll
      for (int j = 0; j < V; ++j) {
        const int vector = coord.lane + j * coord.lanes;
        if (vector < coord.vectors) {
#pragma unroll
          for (int stream = 0; stream < Streams; ++stream)
            copy_async(&slot(stage, r, stream, j), from[stream] + vector * N);
        }
      }
    }
    commit_async();
  }
};

// One float per row, for instance rstd. A group loads the values of the next `lookahead` steps at once, one
// per lane: a load in every step would wait for the row copies in flight.
template <int R>
struct RowScalars {
  const float* values;
  int stride;  // from one row to the next
  float current[R], next[R];

  __device__ __forceinline__ explicit RowScalars(const float* values, int stride = 1)
      : values(values), stride(stride) {}

  static __device__ __forceinline__ int lookahead(const ThreadCoord& coord) { return min(coord.lanes, 32); }

  __device__ __forceinline__ void prefetch(const ThreadCoord& coord, int64_t first, int64_t step,
                                           int64_t rows) {
#pragma unroll
    for (int r = 0; r < R; ++r) {
      const int64_t row = first + coord.lane % lookahead(coord) * step + r * coord.groups;
      next[r] = row < rows ? values[row * stride] : 0.0f;
    }
  }

  // Called at the first of every `lookahead` steps: the loaded values become current, and the next loads
  // start.
  __device__ __forceinline__ void advance(const ThreadCoord& coord, int64_t first, int64_t step,
                                          int64_t rows) {
#pragma unroll
    for (int r = 0; r < R; ++r) current[r] = next[r];
    prefetch(coord, first + lookahead(coord) * step, step, rows);
  }

  // The value of row r in step i, i < lookahead.
  __device__ __forceinline__ float at(const ThreadCoord& coord, int r, int i) const {
    return __shfl_sync(0xffffffffu, current[r], i, lookahead(coord));
  }
};

// Sums R values over the lanes of a group; every lane gets the results. `lanes` is a power of two up to 32,
// or a multiple of 32; then the warps of the group synchronise through a named barrier. Two scratch buffers
// alternate, so one barrier per call is enough. Sums of absent warps are also read, so the scratch is
// initialised to zero.
template <int R>
struct RowSum {
  static constexpr int kMaxGroups = kMaxRowThreads / 64;  // groups of two warps or more
  static constexpr int kScratch = 2 * kMaxGroups * R * kMaxRowWarps;
  float* scratch;
  int lanes;
  int buffer = 0;

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
    float* sums = scratch + (buffer * kMaxGroups + group) * R * kMaxRowWarps;
    buffer ^= 1;
    if (threadIdx.x % 32 == 0) {
#pragma unroll
      for (int r = 0; r < R; ++r) sums[r * kMaxRowWarps + (threadIdx.x - group * lanes) / 32] = x[r];
    }
    sync_threads(group + 1, lanes);
#pragma unroll
    for (int r = 0; r < R; ++r)
      x[r] = warp_reduce<Sum, kMaxRowWarps>(sums[r * kMaxRowWarps + threadIdx.x % kMaxRowWarps]);
  }
};

// Sums `sums`, this thread's columns of a row, over the thread groups of a block, and stores the results from
// `first` on as sums of parameter k, if its gradient is needed. The groups exchange their sums through the
// shared memory of the ring, which must have no copies in flight. The order of additions is fixed.
template <typename T, int N, int V, int K>
__device__ __forceinline__ void store_block_sum(const ThreadCoord& coord, const float (&sums)[V][N],
                                                unsigned char* shared, int64_t hidden,
                                                const ParameterGrads<K>& grads, int k, int64_t first) {
  if (!grads.data[k]) return;
  if (coord.groups == 1) {
#pragma unroll
    for (int j = 0; j < V; ++j) {
      const int vector = coord.lane + j * coord.lanes;
      if (vector < coord.vectors) grads.template store<T>(k, first + vector * N, sums[j]);
    }
    return;
  }
  // The copy groups committed last are empty, but the ring's memory may be reused only after they complete.
  wait_async(0);
  __syncthreads();
  float* group_sums = reinterpret_cast<float*>(shared);
#pragma unroll
  for (int j = 0; j < V; ++j) {
    const int vector = coord.lane + j * coord.lanes;
    if (vector < coord.vectors)
      store_floats<N>(group_sums + (coord.group * coord.vectors + vector) * N, sums[j]);
  }
  __syncthreads();
  for (int column = threadIdx.x; column < hidden; column += blockDim.x) {
    float sum[1] = {};
    for (int other = 0; other < coord.groups; ++other) sum[0] += group_sums[other * hidden + column];
    grads.template store<T>(k, first + column, sum);
  }
}

// Raises the limit of dynamic shared memory if a launch may exceed the default limit: 48 KB minus the static
// shared memory of the kernel, a few KB here. If that fails, the launch reports the error.
template <typename Kernel>
void allow_shared(Kernel kernel, int bytes) {
  if (bytes > 40 * 1024) allow_shared_memory(reinterpret_cast<const void*>(kernel), Carveout::kByDriver);
}

}  // namespace liger
