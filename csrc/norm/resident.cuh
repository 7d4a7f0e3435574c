// Rows staged in shared memory, for kernels whose outputs depend on a reduction over the whole row: a block
// or a cluster of blocks holds a row, so that global memory is read once. Compute capability 9.0 and later.
//
// Persistent launches (clusters, and blocks of which an SM holds one) overlap rows: as soon as a stage of the
// current row has been read for the last time, the bulk copy of the same stage of the next row starts.
#pragma once

#include "device/cluster.cuh"
#include "device/vec.cuh"

namespace liger {

inline constexpr int kResidentStages = 4;      // pipeline stages per slice, with one mbarrier each
inline constexpr int kResidentThreads = 1024;  // maximum block size, at 64 registers per thread
inline constexpr int kResidentWarps = kResidentThreads / 32;

// Dynamic shared memory of a block, in this order: its slices, the kernel's data per segment of a slice, the
// mbarriers of the stages, and two sets of slots for the partial results that the blocks of a row exchange.
struct SmemRowPlan {
  int blocks;       // per row: the cluster size; 0: a row does not fit
  bool persistent;  // a block processes several rows
  int slice;        // vectors of a row per block
  int stage;        // vectors per stage
  int threads;
  int shared;  // bytes
};

#if __CUDA_ARCH__ >= 900
// This block's slices of a row of kStreams tensors.
template <typename T, int kStreams>
struct SmemSlice {
  using Vector = Vec<T, kVec<T>>;
  const Vector* data[kStreams];
  uint64_t* arrived;  // kResidentStages mbarriers
  int stage;
  uint32_t phase = 0;

  // extra_bytes: shared memory between the slices and the mbarriers. Other threads may wait on the mbarriers
  // after sync_cluster_start().
  __device__ __forceinline__ SmemSlice(const SmemRowPlan& r, unsigned char* shared, int extra_bytes)
      : arrived(reinterpret_cast<uint64_t*>(shared + kStreams * r.slice * 16 + extra_bytes)), stage(r.stage) {
#pragma unroll
    for (int s = 0; s < kStreams; ++s) data[s] = reinterpret_cast<const Vector*>(shared) + s * r.slice;
    if (threadIdx.x == 0) {
      for (int i = 0; i < kResidentStages; ++i) mbarrier_init(&arrived[i]);
      mbarrier_init_fence();
    }
  }

  // Starts the bulk copies of stage i of a slice of `count` vectors. Called by one thread. The mbarrier of an
  // empty stage completes as well, so that all have the same phase.
  __device__ __forceinline__ void load(int i, int count, const T* const (&from)[kStreams]) const {
    const int first = i * stage, vectors = max(0, min(count - first, stage));
    mbarrier_arrive_expect(&arrived[i], vectors * 16 * kStreams);
    if (vectors == 0) return;
#pragma unroll
    for (int s = 0; s < kStreams; ++s) {
      bulk_load(const_cast<Vector*>(data[s]) + first, from[s] + int64_t{first} * kVec<T>, vectors * 16,
                &arrived[i]);
    }
  }
  template <typename Slot>
  __device__ __forceinline__ Slot* slots() const {
    return reinterpret_cast<Slot*>(arrived + kResidentStages);
  }
  __device__ __forceinline__ void wait(int i) const { mbarrier_wait(&arrived[i], phase); }
  // Called after wait() for all stages of a row.
  __device__ __forceinline__ void next_row() { phase ^= 1; }
};

// After it the mbarriers of this block are initialised, and every block of the cluster has started, so its
// shared memory may be written.
__device__ __forceinline__ void sync_cluster_start(int blocks) {
  __syncthreads();
  if (blocks > 1) {
    cluster_arrive_relaxed();
    cluster_wait();
  }
}

// Stores the partial result of a warp, a few words, to every block of the cluster through DSMEM: lane i
// stores to block i. `slot` has the same offset in each block. All blocks must have started.
template <typename Words>
__device__ __forceinline__ void broadcast_partial(const Words& words, Words* slot, int blocks) {
  static_assert(sizeof(Words) % sizeof(uint32_t) == 0);
  const int lane = threadIdx.x % 32;
  if (lane < blocks) {
    const uint32_t* const from = reinterpret_cast<const uint32_t*>(&words);
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof(Words) / sizeof(uint32_t)); ++i)
      cluster_store(reinterpret_cast<uint32_t*>(slot) + i, lane, from[i]);
  }
  __syncwarp();
}
// Cluster barrier: after it the partial results of all blocks are visible. Two sets of slots alternate, so
// that one barrier per row is enough: a block that has passed it knows that all threads have read the slots
// of the row before.
__device__ __forceinline__ void sync_cluster(int blocks) {
  if (blocks == 1) {
    __syncthreads();
  } else {
    __syncwarp();
    cluster_arrive();
    cluster_wait();
  }
}
#endif

}  // namespace liger
