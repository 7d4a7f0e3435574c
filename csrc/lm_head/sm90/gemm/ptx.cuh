// SPDX-License-Identifier: BSD-3-Clause

// PTX wrappers for sm_90a (wgmma, TMA, mbarrier, stmatrix) and the shared memory layout of the GEMM.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>

#include "device/cluster.cuh"
#include "lm_head/sm90/sizes.h"

namespace liger::sm90 {

inline constexpr int kBox = 64;                          // rows and columns of a TMA box
inline constexpr int kConsumers = 2;                     // consumer warpgroups, which issue wgmma
inline constexpr int kThreads = 128 * (kConsumers + 1);  // with the producer warpgroup
inline constexpr int kBoxBytes = kBox * kBox * 2;
inline constexpr int kBoxesA = kTileM / kBox;
inline constexpr int kWarps = 4 * kConsumers;
// A thread's accumulators for 64 rows per warpgroup and kColumns columns.
template <int kColumns>
using Sums = float[kColumns / 2];

#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || !defined(__CUDA_ARCH__)
#define LIGER_SM90A 1
#endif

__device__ __forceinline__ void barrier_init(uint64_t* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals)
               : "memory");
}

// The shared::cluster address of this offset in block `rank` of the cluster.
__device__ __forceinline__ uint32_t cluster_address(const void* shared, uint32_t rank) {
  uint32_t remote;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
               : "=r"(remote)
               : "r"(shared_address(shared)), "r"(rank));
  return remote;
}
// Arrives at an mbarrier by its shared::cluster address. The arrive has no release semantics at cluster
// scope, which would cost a device-wide fence. The only accesses to order are wgmma reads before TMA writes,
// and the reads have completed.
__device__ __forceinline__ void cluster_barrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// TMA coordinates of a box; panel: for an operand in panels.
struct Corner {
  int column, row, panel;
};

// L2 eviction priorities, encoded as the cache-policy operand of a copy.
enum class CacheHint : uint64_t {
  kNormal = 0x1000000000000000,
  kEvictFirst = 0x12f0000000000000,
  kEvictLast = 0x14f0000000000000
};

__device__ __forceinline__ void load_box(void* destination, const CUtensorMap* map, Corner at,
                                         uint64_t* barrier, CacheHint keep) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(shared_address(destination)),
      "l"(map), "r"(shared_address(barrier)), "r"(at.column), "r"(at.row), "r"(at.panel),
      "l"(static_cast<uint64_t>(keep))
      : "memory");
}

// Multicast: the box goes to the same offset in every block of the cluster and completes on the mbarrier of
// each.
__device__ __forceinline__ void load_box_to_cluster(void* destination, const CUtensorMap* map, Corner at,
                                                    uint64_t* barrier, CacheHint keep) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster.L2::"
      "cache_hint"
      " [%0], [%1, {%3, %4, %5}], [%2], %6, %7;" ::"r"(shared_address(destination)),
      "l"(map), "r"(shared_address(barrier)), "r"(at.column), "r"(at.row), "r"(at.panel),
      "h"(static_cast<uint16_t>((1 << kCluster) - 1)), "l"(static_cast<uint64_t>(keep))
      : "memory");
}

__device__ __forceinline__ void prefetch_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Stores a box from shared memory to a tensor; elements out of bounds are not stored. After generic stores to
// the source, call async_fence() and a barrier first.
__device__ __forceinline__ void store_box(const CUtensorMap* map, const void* source, Corner at) {
  asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(map),
               "r"(shared_address(source)), "r"(at.column), "r"(at.row), "r"(at.panel)
               : "memory");
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
// The first waits until this thread's bulk stores have read their source, the second until they have
// completed.
__device__ __forceinline__ void bulk_store_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}
__device__ __forceinline__ void bulk_store_wait() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

// cp.async of 16 bytes from global to shared memory. The same thread reads them after copy_async_wait().
__device__ __forceinline__ void copy_async(void* destination, const void* source, CacheHint keep) {
  asm volatile(
      "cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(shared_address(destination)),
      "l"(source), "l"(static_cast<uint64_t>(keep))
      : "memory");
}
__device__ __forceinline__ void copy_async_wait() {
  asm volatile("cp.async.wait_all;" ::: "memory");
}
// Counters for blocks of one launch that wait for each other. Global writes of a thread, or of its warp
// before __syncwarp(), are visible to a thread that has waited for the count.
__device__ __forceinline__ void count_release(int* counter) {
  asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(counter) : "memory");
}
__device__ __forceinline__ void wait_for_count(const int* counter, int count) {
  int found;
  do {
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(found) : "l"(counter) : "memory");
  } while (found < count);
}

__device__ __forceinline__ uint4 load_with_hint(const uint4* p, CacheHint keep) {
  uint4 v;
  asm volatile("ld.global.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p), "l"(static_cast<uint64_t>(keep))
               : "memory");
  return v;
}
__device__ __forceinline__ void store_with_hint(uint4* p, uint4 v, CacheHint keep) {
  asm volatile("st.global.L2::cache_hint.v4.u32 [%0], {%1, %2, %3, %4}, %5;" ::"l"(p), "r"(v.x), "r"(v.y),
               "r"(v.z), "r"(v.w), "l"(static_cast<uint64_t>(keep))
               : "memory");
}

// stmatrix of four 8 x 8 matrices of 16-bit elements; lane 8m + r passes the address of row r of matrix m.
__device__ __forceinline__ void store_matrices(void* row, uint32_t m0, uint32_t m1, uint32_t m2,
                                               uint32_t m3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(row)),
               "r"(m0), "r"(m1), "r"(m2), "r"(m3)
               : "memory");
}

#ifdef LIGER_SM90A
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// The wgmma descriptor of a matrix in shared memory with the 128-byte swizzle (atoms of 8 x 128 bytes).
// K-major: rows of 128 bytes, stride between atoms 1024 bytes. MN-major: atoms 1024 bytes apart along K,
// boxes of 64 elements kBoxBytes apart along M or N.
inline constexpr uint32_t kDescriptorHigh = 1024 >> 4 | 1u << 30;
__device__ __forceinline__ uint32_t descriptor_low(const void* shared) {
  return (shared_address(shared) & 0x3ffff) >> 4 | kBoxBytes >> 4 << 16;
}

// Keeps the compiler from reading the accumulators before wgmma_wait().
template <int kColumns>
__device__ __forceinline__ void pin(Sums<kColumns>& d) {
#pragma unroll
  for (int i = 0; i < kColumns / 2; ++i) asm volatile("" : "+f"(d[i])::"memory");
}
// Sets the accumulators to 0. The asm statements keep the compiler from turning a branch around them into
// selections.
template <int kColumns>
__device__ __forceinline__ void clear(Sums<kColumns>& d) {
#pragma unroll
  for (int i = 0; i < kColumns / 2; ++i) asm volatile("mov.b32 %0, 0;" : "=f"(d[i]));
}
#endif

}  // namespace liger::sm90
