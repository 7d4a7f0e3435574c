// How the blocks of a row that stay on the device find out together what each of their warps knows a part of
// (sm_90 and later).
#pragma once

#include "device/cluster.cuh"

namespace liger {

// Where the warps of the blocks of a row leave what they have, in two sets of slots, used in turn: whoever is
// past a meeting knows that the slots of the one before have been read everywhere. So too the places of what
// comes of it. A cluster of blocks meets without a fence: what a warp has goes to each of them by stores that
// are counted where they arrive. A block that has its row alone meets by its own barrier.
template <typename Slot, int kWarps>
struct Meeting {
  static constexpr int kToldBytes = 32;  // of what comes of a meeting, at most

  Slot* slots;          // two for each warp of these blocks, at the same place in each block
  unsigned char* told;  // two places: what the first warp of this block tells the others
  uint64_t* barriers;   // of the two sets
  int rank, blocks, warp;
  uint32_t turn = 0;

  static constexpr int bytes(int blocks) {
    constexpr int kSlot = sizeof(Slot), kBarrier = sizeof(uint64_t);
    return 2 * (kWarps * blocks * kSlot + kToldBytes + kBarrier);
  }

  // memory: bytes() of shared memory, a multiple of 16.
  __device__ __forceinline__ Meeting(unsigned char* memory, int rank, int blocks, int warp)
      : slots(reinterpret_cast<Slot*>(memory)),
        told(memory + 2 * kWarps * blocks * sizeof(Slot)),
        barriers(reinterpret_cast<uint64_t*>(told + 2 * kToldBytes)),
        rank(rank),
        blocks(blocks),
        warp(warp) {
    if (threadIdx.x == 0 && blocks > 1) {
      mbarrier_init(&barriers[0]), mbarrier_init(&barriers[1]);
      mbarrier_init_fence();
    }
    __syncwarp();
  }

  // By all threads, before the first meeting: behind start() every block of the row has started, so that its
  // shared memory may be written. What is done between the two hides the wait.
  __device__ __forceinline__ void announce() const {
    if (blocks > 1) cluster_arrive_relaxed();
  }
  __device__ __forceinline__ void start() const {
    __syncwarp();
    if (blocks > 1) cluster_wait();
  }

  // Gives every thread what reduce(slots, count) returns to all lanes of the first warp of its block, given
  // what each warp has in all of its lanes. Other warps do nothing meanwhile, so that those of another block
  // can. kWords: of S, less padding.
  template <int kWords, typename S, typename Reduce>
  __device__ __forceinline__ auto meet(const S& s, const Reduce& reduce) {
    static_assert(sizeof(S) <= sizeof(Slot));
    static_assert(sizeof(S) % (kWords >= 4 ? 16 : kWords >= 2 ? 8 : 4) == 0, "as cluster_send() asks");
    const int lane = threadIdx.x % 32;
    const uint32_t set = turn % 2, phase = turn / 2 % 2;
    S* const left = reinterpret_cast<S*>(slots + set * kWarps * blocks);
    S* const own = &left[rank * kWarps + warp];
    ++turn;
    if (blocks == 1) {
      if (lane == 0) *own = s;
      __syncthreads();
    } else {
      if (lane < blocks)
        cluster_send<kWords>(own, &barriers[set], lane, reinterpret_cast<const uint32_t*>(&s));
      __syncwarp();
    }
    using Result = decltype(reduce(left, 0));
    static_assert(sizeof(Result) <= kToldBytes);
    auto* const result = reinterpret_cast<Result*>(told + set * kToldBytes);
    if (warp == 0) {
      if (blocks > 1) {
        if (lane == 0) mbarrier_arrive_expect(&barriers[set], kWarps * blocks * kWords * 4);
        mbarrier_wait_cluster(&barriers[set], phase);
      }
      const Result r = reduce(left, kWarps * blocks);
      if (lane == 0) *result = r;
    }
    __syncthreads();
    return *result;
  }
};

}  // namespace liger
