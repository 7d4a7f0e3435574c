// SPDX-License-Identifier: BSD-3-Clause

// Rows staged in shared memory: the layout and the loop that kernels of cross_entropy, divergence, softmax
// and group_norm share.
//
// A row belongs to one block, or to a cluster of blocks if one block cannot hold it; each block has a slice
// of the row. A slice is cut into pipeline stages, and a stage into one part per warp. Each warp loads its
// own part by a bulk copy (cp.async.bulk) that completes on its own mbarrier, and only this warp reads the
// part, so no block-wide barrier is needed. In a full stage every lane has kVectors vectors; the last stage
// divides the rest among all warps.
//
// A launch has one cluster per row, or persistent clusters that loop over rows (host/launch/smem_row.h). The
// kernels are the same: with one row per cluster the loop runs once and loads no next row.
#pragma once

#include "device/aligned_row.cuh"
#include "device/cluster_reduce.cuh"
#include "device/integers.h"

namespace liger {

// How a row is split over a cluster. stages == 0: no cluster size holds the row.
struct SmemRowPlan {
  int blocks;        // per row: the cluster size
  int slice;         // 16-byte vectors of a row per block
  int warp_vectors;  // vectors of a row per warp, at most
  int stages;        // of a slice
  int part_bytes;    // additional shared memory per part, for the kernel
};

// The compile-time shape of a kernel.
//   kThreads      block size
//   kVectors      16-byte vectors per lane in a full stage
//   Slot          the partial result of a warp, for ClusterReduce
//   kCopies       vectors of shared memory per vector of a row: for instance one for each tensor that is read
//   kBlocksPerSm  resident blocks per SM that the shared memory is divided among
template <int kThreads_, int kVectors_, typename Slot_, int kCopies_, int kBlocksPerSm_>
struct SmemRowShape {
  static constexpr int kThreads = kThreads_, kVectors = kVectors_, kWarps = kThreads / 32;
  static constexpr int kCopies = kCopies_, kBlocksPerSm = kBlocksPerSm_;
  // Sizes of a full stage, in vectors.
  static constexpr int kWarpVectors = 32 * kVectors, kStageVectors = kThreads * kVectors;
  using ClusterReduce = liger::ClusterReduce<Slot_, kWarps>;

  // Dynamic shared memory, in this order: slices of the warps, ClusterReduce, part_bytes per part, mbarriers.
  static constexpr int slices_bytes(const SmemRowPlan& plan) {
    return kWarps * plan.warp_vectors * kCopies * 16;
  }
  static constexpr int extra_offset(const SmemRowPlan& plan) {
    return slices_bytes(plan) + ClusterReduce::bytes(plan.blocks);
  }
  static constexpr int shared_bytes(const SmemRowPlan& plan) {
    return extra_offset(plan) + kWarps * plan.stages * (plan.part_bytes + static_cast<int>(sizeof(uint64_t)));
  }

  // The smallest cluster in [min_blocks, max_blocks] whose shared memory holds a row. Odd sizes above one are
  // excluded: they measured 2 to 8 % slower (docs/lab/cross_entropy.md). The driver reserves 1 KB of
  // shared memory per resident block. part_bytes: a multiple of 8.
  static constexpr SmemRowPlan plan(int64_t row_vectors, int min_blocks, int max_blocks,
                                    int shared_memory_optin, int part_bytes = 0) {
    const int available = (shared_memory_optin + 1024) / kBlocksPerSm - 1024;
    for (int blocks = min_blocks; blocks <= max_blocks; ++blocks) {
      if (blocks > 1 && blocks % 2 != 0) continue;
      const int64_t slice = ceil_div(row_vectors, blocks);
      if (slice * kCopies * 16 > available) continue;
      const int vectors = static_cast<int>(slice);
      const int full = vectors / kStageVectors, rest = vectors % kStageVectors;
      const int per_warp = ceil_div(rest, kWarps);
      // If there is room, the last stage is divided in multiples of 32 vectors, and fewer warps have work in
      // it.
      for (const int last : {round_up(per_warp, 32), per_warp}) {
        const SmemRowPlan plan{blocks, vectors, full * kWarpVectors + last, full + (rest > 0), part_bytes};
        if (shared_bytes(plan) <= available) return plan;
      }
    }
    return {};
  }
};

#if __CUDA_ARCH__ >= 900
// The slice of a row that belongs to one block of its cluster.
template <typename T>
struct Slice {
  const T* row;
  AlignedRow aligned;
  int begin, count;
  bool valid;  // false: the row is not to be read

  __device__ __forceinline__ Slice(const T* row, int columns, const SmemRowPlan& plan, int rank, bool valid)
      : row(row),
        aligned(align_row(row, columns)),
        begin(min(rank * plan.slice, aligned.vectors)),
        count(min(begin + plan.slice, aligned.vectors) - begin),
        valid(valid) {}

  __device__ __forceinline__ int column(int vector) const {
    return aligned.head + (begin + vector) * kVec<T>;
  }
  // The column of this thread's single element before or after the vectors, or -1.
  __device__ __forceinline__ int edge_column(int rank, int columns) const {
    return rank == 0 && threadIdx.x < aligned.edges() ? aligned.edge_column(threadIdx.x, columns) : -1;
  }
};

// The shared memory of one warp: its parts of all stages of the first tensor, then its parts of the next
// tensor, and so on for Shape::kCopies. A pass calls body(count, part, column) for the vectors of this lane
// in each stage, count vectors at a time, 32 vectors apart: all at once in a full stage, else two and then
// one. part points to the first of these vectors in shared memory.
template <typename T, typename Shape>
struct WarpSlices {
  static constexpr int N = kVec<T>, kWarpVectors = Shape::kWarpVectors, kStageVectors = Shape::kStageVectors;
  T* first;           // the first vector of this warp
  uint64_t* arrived;  // one mbarrier per stage
  int warp_vectors, stages, lane, warp;
  uint32_t phase = 0;

  // memory: Shape::shared_bytes(plan).
  __device__ __forceinline__ WarpSlices(unsigned char* memory, const SmemRowPlan& plan)
      : warp_vectors(plan.warp_vectors), stages(plan.stages), lane(threadIdx.x % 32) {
    // The shuffle tells the compiler that the warp index is uniform: bulk copies need no loop over lanes.
    warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
    first = reinterpret_cast<T*>(memory) + warp * Shape::kCopies * copy_stride();
    const int barriers = Shape::shared_bytes(plan) - Shape::kWarps * stages * int{sizeof(uint64_t)};
    arrived = reinterpret_cast<uint64_t*>(memory + barriers) + warp * stages;
    if (lane == 0) {
      for (int k = 0; k < stages; ++k) mbarrier_init(&arrived[k]);
      mbarrier_init_fence();
    }
    __syncwarp();
  }
  // Elements between the copies of two tensors.
  __device__ __forceinline__ int copy_stride() const { return warp_vectors * N; }

  // For body(count, part, column) of a pass: true in all lanes if any lane of this warp has the column
  // `wanted`. As unsigned, a negative difference is large.
  __device__ __forceinline__ bool has_column(int wanted, int count, int column) const {
    return static_cast<unsigned>(wanted - column + lane * N) < static_cast<unsigned>(count * 32 * N);
  }

  // Starts the bulk copies of rows that are equally far from a 16-byte boundary.
  template <int kTensors>
  __device__ __forceinline__ void load_row(const Slice<T>& s, const T* const (&rows)[kTensors]) const {
    if (lane == 0) {
      for (int k = 0; k < stages; ++k) load_part(s, rows, k);
    }
  }
  // The first pass over a row waits for each stage.
  template <typename Body>
  __device__ __forceinline__ void first_pass(const Slice<T>& s, const Body& body) {
    over_stages(s, [&](int k) { mbarrier_wait(&arrived[k], phase); }, body, [](int) {});
    phase ^= 1;
  }
  // The same for passes with exchanges between lanes: all lanes call body(k, begin, count, part) for each
  // stage in which this warp has vectors, `count` vectors of the slice from `begin` on. part points to the
  // first vector.
  template <typename Body>
  __device__ __forceinline__ void first_pass_by_part(const Slice<T>& s, const Body& body) {
#pragma unroll 1
    for (int k = 0; k < stages; ++k) {
      mbarrier_wait(&arrived[k], phase);
      const auto [begin, count] = part_of(s, k);
      if (count > 0) body(k, begin, count, first + k * kWarpVectors * N);
    }
    phase ^= 1;
  }
  // The parts of a slice, of all warps, are numbered in the order of their vectors: stage * kWarps + warp.
  __device__ __forceinline__ int part_with(int vector) const {
    const int k = vector / kStageVectors;
    return k * Shape::kWarps + (vector - k * kStageVectors) / part_size(k);
  }
  __device__ __forceinline__ int part_begin(int part) const {
    const int k = part / Shape::kWarps;
    return k * kStageVectors + (part - k * Shape::kWarps) * part_size(k);
  }
  template <typename Body>
  __device__ __forceinline__ void pass(const Slice<T>& s, const Body& body) const {
    over_stages(s, [](int) {}, body, [](int) {});
  }
  // The last pass refills each stage with the next rows as soon as all lanes have read it.
  template <int kTensors, typename Body>
  __device__ __forceinline__ void last_pass(const Slice<T>& s, const Slice<T>& next,
                                            const T* const (&rows)[kTensors], const Body& body) const {
    over_stages(
        s, [](int) {}, body,
        [&](int k) {
          __syncwarp();
          if (lane == 0 && next.valid) load_part(next, rows, k);
        });
  }

 private:
  // Vectors per part of stage k.
  __device__ __forceinline__ int part_size(int k) const {
    return min(kWarpVectors, warp_vectors - k * kWarpVectors);
  }
  // This warp's part of a stage: its first vector and the number of vectors, which may be zero or negative.
  __device__ __forceinline__ int2 part_of(const Slice<T>& s, int k) const {
    const int size = part_size(k), begin = k * kStageVectors + warp * size;
    return make_int2(begin, min(size, s.count - begin));
  }
  // Called by one lane.
  template <int kTensors>
  __device__ __forceinline__ void load_part(const Slice<T>& s, const T* const (&rows)[kTensors],
                                            int k) const {
    const auto [begin, count] = part_of(s, k);
    const int bytes = max(count, 0) * 16;
    // The mbarrier of an empty part also completes, so all mbarriers have the same phase.
    mbarrier_arrive_expect(&arrived[k], kTensors * bytes);
    if (bytes == 0) return;
    T* const part = first + k * kWarpVectors * N;
    const int column = s.column(begin);
#pragma unroll
    for (int t = 0; t < kTensors; ++t)
      bulk_load(part + t * copy_stride(), rows[t] + column, bytes, &arrived[k]);
  }
  template <typename Start, typename Body, typename Done>
  __device__ __forceinline__ void over_stages(const Slice<T>& s, const Start& start, const Body& body,
                                              const Done& done) const {
    // Stages in which this warp has a full part.
    const int full = min(warp_vectors / kWarpVectors,
                         (s.count + kStageVectors - (warp + 1) * kWarpVectors) / kStageVectors);
    T* part = first + lane * N;
    int k = 0, column = s.column(warp * kWarpVectors + lane);
#pragma unroll 1
    for (; k < full; ++k, part += kWarpVectors * N, column += kStageVectors * N) {
      start(k);
      body(std::integral_constant<int, Shape::kVectors>{}, part, column);
      done(k);
    }
#pragma unroll 1
    for (; k < stages; ++k, part += kWarpVectors * N) {
      start(k);
      const auto [begin, count] = part_of(s, k);
      const int column = s.column(begin + lane);
      int at = 0;
      if constexpr (Shape::kVectors > 2) {
        static_assert(Shape::kVectors == 4);
        if (count >= 64) {
          body(std::integral_constant<int, 2>{}, part, column);
          at = 64;
        }
      }
#pragma unroll 1
      for (; at + lane < count; at += 32) {
        body(std::integral_constant<int, 1>{}, part + at * N, column + at * N);
      }
      done(k);
    }
  }
};
#endif

}  // namespace liger
