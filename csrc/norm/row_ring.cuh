// How a block of the backward of a norm keeps rows to come under way, and sums along a row.
//
// A row belongs to `lanes` neighbouring threads, each with `width` vectors of it; a block works on as many
// rows as it has room for. Blocks are persistent; every thread copies its own vectors of the next
// `stages` steps into its own slots of shared memory, so the ring needs no barrier, and a slot is refilled as
// soon as its thread has read it.
#pragma once

#include "device/reduce.cuh"
#include "device/vec.cuh"
#include "host/shared_memory.h"
#include "norm/backward_plan.cuh"

namespace liger {

// This thread's place in its block: lane `lane` of the row that thread group `group` works on.
struct RowPlace {
  int lanes, groups, group, lane;
  int vectors;  // of a row

  __device__ __forceinline__ RowPlace(int lanes, int vectors)
      : lanes(lanes),
        groups(blockDim.x / lanes),
        group(threadIdx.x / lanes),
        lane(threadIdx.x % lanes),
        vectors(vectors) {}
};

// The ring: in every stage R rows, of each of them its part in `Streams` tensors.
template <typename T, int N, int V, int R, int Streams>
struct RowRing {
  using Vector = Vec<T, N>;
  Vector* own;

  __device__ __forceinline__ explicit RowRing(unsigned char* shared)
      : own(reinterpret_cast<Vector*>(shared) + threadIdx.x) {}

  __device__ __forceinline__ Vector& slot(int stage, int r, int stream, int j) const {
    return own[(((stage * R + r) * Streams + stream) * V + j) * blockDim.x];
  }

  // The shared memory behind the ring.
  __device__ __forceinline__ void* end(int stages) const { return &slot(stages, 0, 0, 0) - threadIdx.x; }

  // Rows first, first + groups, ... that exist; source(stream, row): where a row of a tensor begins.
  template <typename Source>
  __device__ __forceinline__ void fetch(const RowPlace& place, int stage, int64_t first, int64_t rows,
                                        const Source& source) const {
#pragma unroll
    for (int r = 0; r < R; ++r) {
      const int64_t row = first + r * place.groups;
      if (row >= rows) break;
      const T* from[Streams];
#pragma unroll
      for (int stream = 0; stream < Streams; ++stream) from[stream] = source(stream, row);
#pragma unroll
      for (int j = 0; j < V; ++j) {
        const int vector = place.lane + j * place.lanes;
        if (vector < place.vectors) {
#pragma unroll
          for (int stream = 0; stream < Streams; ++stream)
            copy_async(&slot(stage, r, stream, j), from[stream] + vector * N);
        }
      }
    }
    commit_async();
  }
};

// A float of every row. Each lane asks for that of another one of the next `span` steps: asked for step by
// step, they would wait behind the rows under way.
template <int R>
struct RowScalars {
  const float* values;
  float now[R], next[R];

  __device__ __forceinline__ explicit RowScalars(const float* values) : values(values) {}

  static __device__ __forceinline__ int span(const RowPlace& place) { return min(place.lanes, 32); }

  __device__ __forceinline__ void fetch(const RowPlace& place, int64_t first, int64_t step, int64_t rows) {
#pragma unroll
    for (int r = 0; r < R; ++r) {
      const int64_t row = first + place.lane % span(place) * step + r * place.groups;
      next[r] = row < rows ? values[row] : 0.0f;
    }
  }

  // At the first of `span` steps: what was asked for becomes now, and the next ones are asked for.
  __device__ __forceinline__ void advance(const RowPlace& place, int64_t first, int64_t step, int64_t rows) {
#pragma unroll
    for (int r = 0; r < R; ++r) now[r] = next[r];
    fetch(place, first + span(place) * step, step, rows);
  }

  // That of row r of step i of the `span`.
  __device__ __forceinline__ float at(const RowPlace& place, int r, int i) const {
    return __shfl_sync(0xffffffffu, now[r], i, span(place));
  }
};

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

// The sum over the rows of a block of what each thread has of `hidden` columns. The thread groups meet in
// shared memory, in their order: the ring's, which has to be empty.
template <int N, int V>
__device__ __forceinline__ void store_block_sum(const RowPlace& place, const float (&sums)[V][N],
                                                unsigned char* shared, int64_t hidden, float* out) {
  if (place.groups == 1) {
#pragma unroll
    for (int j = 0; j < V; ++j) {
      const int vector = place.lane + j * place.lanes;
      if (vector < place.vectors) store_floats<N>(out + vector * N, sums[j]);
    }
    return;
  }
  // Nothing is under way into the ring: the groups committed last were empty, but they must be seen to end
  // before it is used anew.
  wait_async(0);
  __syncthreads();
  float* of_groups = reinterpret_cast<float*>(shared);
#pragma unroll
  for (int j = 0; j < V; ++j) {
    const int vector = place.lane + j * place.lanes;
    if (vector < place.vectors)
      store_floats<N>(of_groups + (place.group * place.vectors + vector) * N, sums[j]);
  }
  __syncthreads();
  for (int column = threadIdx.x; column < hidden; column += blockDim.x) {
    float sum = 0.0f;
    for (int other = 0; other < place.groups; ++other) sum += of_groups[other * hidden + column];
    out[column] = sum;
  }
}

// For launches beyond what every kernel may have: 48 KB less its static shared memory, a few KB here. Where
// that fails, the launch does, too.
template <typename Kernel>
void allow_shared(Kernel kernel, int bytes) {
  if (bytes > 40 * 1024) allow_shared_memory(reinterpret_cast<const void*>(kernel), Carveout::kByDriver);
}

}  // namespace liger
