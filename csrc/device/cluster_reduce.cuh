// SPDX-License-Identifier: BSD-3-Clause

// Reduction over a thread-block cluster through distributed shared memory (DSMEM), for kernels of sm_90 and
// later that reduce once per row: every warp contributes a partial result, every thread gets the reduced one.
#pragma once

#include "device/cluster.cuh"

namespace liger {

// Two sets of slots alternate. A block that has returned from one reduction knows that every block has read
// the slots of the reduction before it, so those may be overwritten without another barrier. The result is
// double-buffered for the same reason.
//
// Within a cluster, a warp writes its partial to every block with st.async, whose bytes an mbarrier of the
// receiving block counts: one DSMEM round trip, and no fence. A block that is alone uses __syncthreads().
template <typename Slot, int kWarps>
struct ClusterReduce {
  static constexpr int kResultBytes = 32;  // maximum size of a result

  Slot* slots;             // two sets, each with one slot per warp of the cluster; same offset in each block
  unsigned char* results;  // two: written by the first warp of this block, read by all of its threads
  uint64_t* barriers;      // one per set
  int rank, blocks, warp;
  uint32_t round = 0;

  static constexpr int bytes(int blocks) {
    constexpr int kSlot = sizeof(Slot), kBarrier = sizeof(uint64_t);
    return 2 * (kWarps * blocks * kSlot + kResultBytes + kBarrier);
  }

  // memory: bytes() of shared memory, a multiple of 16.
  __device__ __forceinline__ ClusterReduce(unsigned char* memory, int rank, int blocks, int warp)
      : slots(reinterpret_cast<Slot*>(memory)),
        results(memory + 2 * kWarps * blocks * sizeof(Slot)),
        barriers(reinterpret_cast<uint64_t*>(results + 2 * kResultBytes)),
        rank(rank),
        blocks(blocks),
        warp(warp) {
    if (threadIdx.x == 0 && blocks > 1) {
      mbarrier_init(&barriers[0]), mbarrier_init(&barriers[1]);
      mbarrier_init_fence();
    }
    __syncwarp();
  }

  // Called once by all threads before the first reduce(). After wait_peers() every block of the cluster has
  // started, so its shared memory may be written. Work between the two calls hides the latency.
  __device__ __forceinline__ void arrive_peers() const {
    if (blocks > 1) cluster_arrive_relaxed();
  }
  __device__ __forceinline__ void wait_peers() const {
    __syncwarp();
    if (blocks > 1) cluster_wait();
  }

  // partial: the contribution of this warp, the same in all lanes. The first warp of each block calls
  // op(partials, count) with the partials of all warps of the cluster; every thread gets the result. The
  // other warps issue nothing meanwhile, which leaves the SM to other blocks. kWords: 32-bit words of S to
  // send, less its padding.
  template <int kWords, typename S, typename Op>
  __device__ __forceinline__ auto reduce(const S& partial, const Op& op) {
    static_assert(sizeof(S) <= sizeof(Slot));
    static_assert(sizeof(S) % (kWords >= 4   ? 16
                               : kWords >= 2 ? 8
                                             : 4) ==
                      0,
                  "alignment of cluster_store_async");
    const int lane = threadIdx.x % 32;
    const uint32_t set = round % 2, phase = round / 2 % 2;
    S* const partials = reinterpret_cast<S*>(slots + set * kWarps * blocks);
    S* const own = &partials[rank * kWarps + warp];
    ++round;
    if (blocks == 1) {
      if (lane == 0) *own = partial;
      __syncthreads();
    } else {
      if (lane < blocks)
        cluster_store_async<kWords>(own, &barriers[set], lane, reinterpret_cast<const uint32_t*>(&partial));
      __syncwarp();
    }
    using Result = decltype(op(partials, 0));
    static_assert(sizeof(Result) <= kResultBytes);
    auto* const result = reinterpret_cast<Result*>(results + set * kResultBytes);
    if (warp == 0) {
      if (blocks > 1) {
        if (lane == 0) mbarrier_arrive_expect(&barriers[set], kWarps * blocks * kWords * 4);
        mbarrier_wait_cluster(&barriers[set], phase);
      }
      const Result r = op(partials, kWarps * blocks);
      if (lane == 0) *result = r;
    }
    __syncthreads();
    return *result;
  }
};

}  // namespace liger
