// PTX wrappers for sm_90a (wgmma, TMA, mbarrier, stmatrix) and the shared memory layout of the GEMM.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>

#include "device/cluster.cuh"
#include "linear_ce/sm90/tile.h"

namespace liger::sm90 {

inline constexpr int kBox = 64;  // rows and columns of a TMA box
inline constexpr int kStages = 4;
inline constexpr int kCluster = 2;
inline constexpr int kConsumers = 2;                     // consumer warpgroups, which issue wgmma
inline constexpr int kThreads = 128 * (kConsumers + 1);  // with the producer warpgroup
inline constexpr int kBoxBytes = kBox * kBox * 2;
inline constexpr int kBoxesA = kTileM / kBox, kBoxesB = kTileN / kBox;
inline constexpr int kStageBytes = (kBoxesA + kBoxesB) * kBoxBytes;
inline constexpr int kEpilogueSmemBytes = 4096;  // per consumer warp
inline constexpr int kWarps = 4 * kConsumers;
// 1024 bytes to align the boxes, as the 128-byte swizzle requires.
inline constexpr int kSharedBytes = kStages * kStageBytes + kWarps * kEpilogueSmemBytes + 1024;
inline constexpr int kSums = kTileM / kConsumers * kTileN / 128;  // accumulators per thread

#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || !defined(__CUDA_ARCH__)
#define LIGER_SM90A 1
#endif

__device__ __forceinline__ void barrier_init(uint64_t* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals)
               : "memory");
}

// Arrives at the mbarrier at the same offset in block `rank` of the cluster. Without release semantics at
// cluster scope, which would cost a device-wide fence: the only accesses to order are wgmma reads, which have
// completed, before TMA writes.
__device__ __forceinline__ void cluster_barrier_arrive(uint64_t* barrier, uint32_t rank) {
  asm volatile(
      "{\n"
      ".reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [remote];\n"
      "}\n" ::"r"(shared_address(barrier)),
      "r"(rank)
      : "memory");
}

// The TMA coordinates of a box: column, row and, for an operand in panels, panel.
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

// cp.async.bulk from shared to global memory; addresses and size are multiples of 16 bytes. Generic stores to
// the source need async_fence() and a barrier before.
__device__ __forceinline__ void bulk_store(void* destination, const void* source, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(destination),
               "r"(shared_address(source)), "r"(bytes)
               : "memory");
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
// Wait until the bulk stores of this thread have read their source, or have completed.
__device__ __forceinline__ void bulk_store_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}
__device__ __forceinline__ void bulk_store_wait() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

// cp.async of 16 bytes from global to shared memory, for the thread that reads them after copy_async_wait().
__device__ __forceinline__ void copy_async(void* destination, const void* source, CacheHint keep) {
  asm volatile(
      "cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(shared_address(destination)),
      "l"(source), "l"(static_cast<uint64_t>(keep))
      : "memory");
}
__device__ __forceinline__ void copy_async_wait() {
  asm volatile("cp.async.wait_all;" ::: "memory");
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

// stmatrix of four 8 x 8 matrices of 16-bit elements; lane 8m + r has the address of row r of matrix m.
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
__device__ __forceinline__ uint64_t descriptor(const void* shared) {
  uint64_t d = (shared_address(shared) & 0x3ffff) >> 4;
  d |= static_cast<uint64_t>(kBoxBytes >> 4) << 16;
  d |= static_cast<uint64_t>(1024 >> 4) << 32;
  return d | (uint64_t{1} << 62);
}

// sums (64 x kColumns, this warpgroup's) = a (64 x 16) b (16 x kColumns) + (keep ? sums : 0)
template <int kColumns, bool kAMn, bool kBMn>
__device__ __forceinline__ void wgmma(float (&d)[kSums], uint64_t a, uint64_t b, int keep) {
  static_assert(kColumns == kTileN || kColumns == kTileN / 2);
  if constexpr (kColumns == kTileN) {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "setp.ne.b32 p, %130, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {\n"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, \n"
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, \n"
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, \n"
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, \n"
        "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, \n"
        "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, \n"
        "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, \n"
        "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127\n"
        "}, %128, %129, p, 1, 1, %131, %132;\n"
        "}\n"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
          "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]),
          "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]),
          "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]),
          "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]),
          "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]), "+f"(d[42]),
          "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]), "+f"(d[49]),
          "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), "+f"(d[56]),
          "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63]),
          "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67]), "+f"(d[68]), "+f"(d[69]), "+f"(d[70]),
          "+f"(d[71]), "+f"(d[72]), "+f"(d[73]), "+f"(d[74]), "+f"(d[75]), "+f"(d[76]), "+f"(d[77]),
          "+f"(d[78]), "+f"(d[79]), "+f"(d[80]), "+f"(d[81]), "+f"(d[82]), "+f"(d[83]), "+f"(d[84]),
          "+f"(d[85]), "+f"(d[86]), "+f"(d[87]), "+f"(d[88]), "+f"(d[89]), "+f"(d[90]), "+f"(d[91]),
          "+f"(d[92]), "+f"(d[93]), "+f"(d[94]), "+f"(d[95]), "+f"(d[96]), "+f"(d[97]), "+f"(d[98]),
          "+f"(d[99]), "+f"(d[100]), "+f"(d[101]), "+f"(d[102]), "+f"(d[103]), "+f"(d[104]), "+f"(d[105]),
          "+f"(d[106]), "+f"(d[107]), "+f"(d[108]), "+f"(d[109]), "+f"(d[110]), "+f"(d[111]), "+f"(d[112]),
          "+f"(d[113]), "+f"(d[114]), "+f"(d[115]), "+f"(d[116]), "+f"(d[117]), "+f"(d[118]), "+f"(d[119]),
          "+f"(d[120]), "+f"(d[121]), "+f"(d[122]), "+f"(d[123]), "+f"(d[124]), "+f"(d[125]), "+f"(d[126]),
          "+f"(d[127])
        : "l"(a), "l"(b), "r"(keep), "n"(int{kAMn}), "n"(int{kBMn}));
  } else {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "setp.ne.b32 p, %66, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {\n"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, \n"
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, \n"
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, \n"
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63\n"
        "}, %64, %65, p, 1, 1, %67, %68;\n"
        "}\n"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
          "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]),
          "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]),
          "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]),
          "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]),
          "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]), "+f"(d[42]),
          "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]), "+f"(d[49]),
          "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), "+f"(d[56]),
          "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
        : "l"(a), "l"(b), "r"(keep), "n"(int{kAMn}), "n"(int{kBMn}));
  }
}

// Keeps the compiler from reading the accumulators before wgmma_wait().
__device__ __forceinline__ void pin(float (&d)[kSums]) {
#pragma unroll
  for (int i = 0; i < kSums; ++i) asm volatile("" : "+f"(d[i])::"memory");
}
#endif

}  // namespace liger::sm90
