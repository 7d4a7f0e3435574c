// Rows in shared memory, for kernels that need the whole of a row before they can write any of it: a block,
// or a cluster of blocks, keeps a row, so that it is read once. Clusters, and blocks that an SM
// has room for one of, stay: while a row is written, stage by stage, the next one arrives in its place.
// Compute capability 9.0 and later.
#pragma once

#include "device/cluster.cuh"
#include "device/vec.cuh"

namespace liger {

inline constexpr int kResidentStages = 4;      // of a slice: what arrives, and is replaced, at once
inline constexpr int kResidentThreads = 1024;  // of a block at most, with 64 registers each
inline constexpr int kResidentWarps = kResidentThreads / 32;

// Dynamic shared memory of a block: its slices, what the kernel has for each unit of them, the barriers of
// the stages, and two sets of slots for what the warps of a row leave for each other.
struct Residence {
  int blocks;  // of a row, a cluster; 0 where rows are too long
  bool stay;   // whether blocks take row after row
  int slice;   // vectors of a row that a block keeps
  int stage;   // vectors
  int threads;
  int shared;  // bytes
};

#if __CUDA_ARCH__ >= 900
// This block's slices of the rows of so many tensors.
template <typename T, int kStreams>
struct ResidentSlice {
  using Vector = Vec<T, kVec<T>>;
  const Vector* kept[kStreams];
  uint64_t* arrived;  // kResidentStages of them in shared memory
  int stage;
  uint32_t phase = 0;

  // unit_bytes: what lies between the slices and the barriers. The other threads may wait for these after
  // start_together().
  __device__ __forceinline__ ResidentSlice(const Residence& r, unsigned char* shared, int unit_bytes)
      : arrived(reinterpret_cast<uint64_t*>(shared + kStreams * r.slice * 16 + unit_bytes)), stage(r.stage) {
#pragma unroll
    for (int s = 0; s < kStreams; ++s) kept[s] = reinterpret_cast<const Vector*>(shared) + s * r.slice;
    if (threadIdx.x == 0) {
      for (int i = 0; i < kResidentStages; ++i) mbarrier_init(&arrived[i]);
      mbarrier_init_fence();
    }
  }

  // By one thread: stage i of a slice of `count` vectors. The barrier of an empty stage completes too, so
  // that all are in the same phase.
  __device__ __forceinline__ void load(int i, int count, const T* const (&from)[kStreams]) const {
    const int first = i * stage, vectors = max(0, min(count - first, stage));
    mbarrier_arrive_expect(&arrived[i], vectors * 16 * kStreams);
    if (vectors == 0) return;
#pragma unroll
    for (int s = 0; s < kStreams; ++s) {
      bulk_load(const_cast<Vector*>(kept[s]) + first, from[s] + int64_t{first} * kVec<T>, vectors * 16,
                &arrived[i]);
    }
  }
  template <typename Slot>
  __device__ __forceinline__ Slot* slots() const {
    return reinterpret_cast<Slot*>(arrived + kResidentStages);
  }
  __device__ __forceinline__ void wait(int i) const { mbarrier_wait(&arrived[i], phase); }
  // After all stages of a row have been waited for.
  __device__ __forceinline__ void next_row() { phase ^= 1; }
};

// Behind it the barriers are initialised, and every block of the row has started: its shared memory may be
// written.
__device__ __forceinline__ void start_together(int blocks) {
  __syncthreads();
  if (blocks > 1) {
    cluster_arrive_relaxed();
    cluster_wait();
  }
}

// What a warp has found out about its part of a row, a few words, to all blocks of the row: by lanes 0 to
// blocks - 1, each to the block of its number. `slot` lies at the same place in each block, all of which have
// started.
template <typename Words>
__device__ __forceinline__ void tell_blocks(const Words& words, Words* slot, int blocks) {
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
// Waits until all blocks of the row have been told. Two sets of slots in turn make one wait per row enough:
// whoever is past that of a row knows that all threads have read the slots of the row before.
__device__ __forceinline__ void meet_blocks(int blocks) {
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
