// Matrix products of bf16 on the matrix units of compute capability 9.0 (sm_90a only).
//
// A product is a persistent kernel, launched as clusters of kCluster blocks: pairs of blocks walk over tiles
// of 2 x 128 rows and 256 columns. One warp of a block copies operands into a ring of shared memory (the
// tensor copy engine; the half of B that each block of a pair loads goes to both); two warpgroups multiply,
// 64 rows each, and hand their sums, still in registers, to the epilogue of the job. An operand may lie in
// memory with the summed dimension inside ("K-major") or outside ("MN-major"); boxes of 64 x 64 elements with
// the 128-byte swizzle serve both.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>

#include "common/cluster.cuh"

namespace liger::sm90 {

inline constexpr int kTileM = 128, kTileN = 256, kTileK = 64;
inline constexpr int kBox = 64;     // rows and columns of what one copy brings
inline constexpr int kPanel = 128;  // columns of a panel
inline constexpr int kStages = 4;
inline constexpr int kCluster = 2;
inline constexpr int kConsumers = 2;                     // warpgroups that multiply
inline constexpr int kThreads = 128 * (kConsumers + 1);  // and the one that copies
inline constexpr int kBoxBytes = kBox * kBox * 2;
inline constexpr int kBoxesA = kTileM / kBox, kBoxesB = kTileN / kBox;
inline constexpr int kStageBytes = (kBoxesA + kBoxesB) * kBoxBytes;
inline constexpr int kDeskBytes = 4096;  // of shared memory that each multiplying warp has for its epilogue
inline constexpr int kWarps = 4 * kConsumers;
// 1024: boxes start at multiples of that
inline constexpr int kSharedBytes = kStages * kStageBytes + kWarps * kDeskBytes + 1024;
inline constexpr int kSums = kTileM / kConsumers * kTileN / 128;  // per thread

// Where a tile lies: rows m0.. (this block's) and columns n0.. of the result, k_blocks x 64 summed from k0
// on.
struct Tile {
  int m0, n0, k0, k_blocks;
  int part;  // which of the parts that the summed dimension is split into
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || !defined(__CUDA_ARCH__)
#define LIGER_SM90A 1
#endif

// --- PTX
// ----------------------------------------------------------------------------------------------------------

__device__ __forceinline__ void barrier_init(uint64_t* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals)
               : "memory");
}

// Arrives at the barrier that has the same place in the shared memory of block `rank` of the cluster. No
// cluster scope: it would cost a fence of the whole device, and all that is ordered here are reads by the
// matrix units, which have been waited for, before writes by the copy engine.
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

// Where a box begins in the memory of an operand: its columns, rows, and (for an operand in panels) panel.
struct Corner {
  int column, row, panel;
};

// What the L2 cache should do with what is moved: codes of the copy engine's cache policies.
enum class Keep : uint64_t {
  kNormal = 0x1000000000000000,
  kShort = 0x12f0000000000000,
  kLong = 0x14f0000000000000
};

__device__ __forceinline__ void load_box(void* destination, const CUtensorMap* map, Corner at,
                                         uint64_t* barrier, Keep keep) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(shared_address(destination)),
      "l"(map), "r"(shared_address(barrier)), "r"(at.column), "r"(at.row), "r"(at.panel),
      "l"(static_cast<uint64_t>(keep))
      : "memory");
}

// The box goes to the same place in every block of the cluster, and its bytes count at the barrier of each.
__device__ __forceinline__ void load_box_to_cluster(void* destination, const CUtensorMap* map, Corner at,
                                                    uint64_t* barrier, Keep keep) {
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

// Shared to global memory; addresses and size are multiples of 16 bytes. Ordinary stores to the source need
// async_fence() and a barrier before.
__device__ __forceinline__ void bulk_store(void* destination, const void* source, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(destination),
               "r"(shared_address(source)), "r"(bytes)
               : "memory");
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
// Until the stores of this thread have read their source, or have ended.
__device__ __forceinline__ void bulk_store_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}
__device__ __forceinline__ void bulk_store_wait() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}
__device__ __forceinline__ void async_fence() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// 16 bytes of global to shared memory, by the thread that will read them after copy_async_wait().
__device__ __forceinline__ void copy_async(void* destination, const void* source, Keep keep) {
  asm volatile(
      "cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(shared_address(destination)),
      "l"(source), "l"(static_cast<uint64_t>(keep))
      : "memory");
}
__device__ __forceinline__ void copy_async_wait() {
  asm volatile("cp.async.wait_all;" ::: "memory");
}

__device__ __forceinline__ uint4 load_keeping(const uint4* p, Keep keep) {
  uint4 v;
  asm volatile("ld.global.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p), "l"(static_cast<uint64_t>(keep))
               : "memory");
  return v;
}
__device__ __forceinline__ void store_keeping(uint4* p, uint4 v, Keep keep) {
  asm volatile("st.global.L2::cache_hint.v4.u32 [%0], {%1, %2, %3, %4}, %5;" ::"l"(p), "r"(v.x), "r"(v.y),
               "r"(v.z), "r"(v.w), "l"(static_cast<uint64_t>(keep))
               : "memory");
}

// Four 8 x 8 matrices of 16-bit elements; lane 8m + r has the address of row r of matrix m.
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

// A matrix in shared memory, swizzled in atoms of 8 x 128 bytes. K-major: rows of 128 bytes, atoms 1024 bytes
// apart. MN-major: atoms 1024 bytes apart along the summed dimension, boxes of 64 elements kBoxBytes apart
// along the other.
__device__ __forceinline__ uint64_t descriptor(const void* shared) {
  uint64_t d = (shared_address(shared) & 0x3ffff) >> 4;
  d |= static_cast<uint64_t>(kBoxBytes >> 4) << 16;
  d |= static_cast<uint64_t>(1024 >> 4) << 32;
  return d | (uint64_t{1} << 62);
}

// sums (64 x 256, this warpgroup's) = a (64 x 16) b (16 x 256) + (keep ? sums : 0)
template <bool kAMn, bool kBMn>
__device__ __forceinline__ void wgmma(float (&d)[kSums], uint64_t a, uint64_t b, int keep) {
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
        "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
        "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]),
        "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]),
        "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]),
        "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]),
        "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]), "+f"(d[49]), "+f"(d[50]),
        "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), "+f"(d[56]), "+f"(d[57]),
        "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63]), "+f"(d[64]),
        "+f"(d[65]), "+f"(d[66]), "+f"(d[67]), "+f"(d[68]), "+f"(d[69]), "+f"(d[70]), "+f"(d[71]),
        "+f"(d[72]), "+f"(d[73]), "+f"(d[74]), "+f"(d[75]), "+f"(d[76]), "+f"(d[77]), "+f"(d[78]),
        "+f"(d[79]), "+f"(d[80]), "+f"(d[81]), "+f"(d[82]), "+f"(d[83]), "+f"(d[84]), "+f"(d[85]),
        "+f"(d[86]), "+f"(d[87]), "+f"(d[88]), "+f"(d[89]), "+f"(d[90]), "+f"(d[91]), "+f"(d[92]),
        "+f"(d[93]), "+f"(d[94]), "+f"(d[95]), "+f"(d[96]), "+f"(d[97]), "+f"(d[98]), "+f"(d[99]),
        "+f"(d[100]), "+f"(d[101]), "+f"(d[102]), "+f"(d[103]), "+f"(d[104]), "+f"(d[105]), "+f"(d[106]),
        "+f"(d[107]), "+f"(d[108]), "+f"(d[109]), "+f"(d[110]), "+f"(d[111]), "+f"(d[112]), "+f"(d[113]),
        "+f"(d[114]), "+f"(d[115]), "+f"(d[116]), "+f"(d[117]), "+f"(d[118]), "+f"(d[119]), "+f"(d[120]),
        "+f"(d[121]), "+f"(d[122]), "+f"(d[123]), "+f"(d[124]), "+f"(d[125]), "+f"(d[126]), "+f"(d[127])
      : "l"(a), "l"(b), "r"(keep), "n"(int{kAMn}), "n"(int{kBMn}));
}

// The compiler must not read the sums before the products that make them have been waited for.
__device__ __forceinline__ void pin(float (&d)[kSums]) {
#pragma unroll
  for (int i = 0; i < kSums; ++i) asm volatile("" : "+f"(d[i])::"memory");
}
#endif

// --- the product
// ------------------------------------------------------------------------------------------------------

// What a multiplying warp has to itself.
struct Desk {
  unsigned char* memory;
};

struct Ring {
  int stage = 0;
  uint32_t phase = 0;
  __device__ __forceinline__ void next() {
    if (++stage == kStages) stage = 0, phase ^= 1;
  }
};

// The first operand of a product may lie in panels of 128 columns, and in two places: rows from
// `rows_in_first` on are in the second.
struct Maps {
  CUtensorMap a[2], b;
};

// A Job says what the tiles are and what becomes of their sums:
//   static constexpr bool kAMn, kBMn     the layouts of the operands
//   static constexpr Keep kKeepA, kKeepB
//   static constexpr bool kPanels        of a; then int rows_in_first is a member
//   int tiles() const                    how many pairs of tiles; the same for all threads
//   Tile tile(int t, int rank) const
//       without any blocks of the summed dimension, the sums are undefined
//   void fetch(Tile, int row, int lane, Desk) const
//       starts copies to the desk shortly before the end; earlier, they would delay the operands
//   Early early(Tile, int row, int lane) const
//       reads what finish() wants from memory, while the last block of products is being computed
//   void finish(float (&sums)[kSums], Early, Tile, int row, int lane, const Desk&) const
//       row: of the tile, the first of the 16 that this warp has. In lane l, sums[4j + 2h + i] belongs to row
//       l / 4 + 8h of these and to column 8j + 2 (l % 4) + i of the tile. All warps of a block have passed
//       the arrival of all operands of the tile.
template <class Job>
__global__ void __launch_bounds__(kThreads, 1)
    product(const __grid_constant__ Maps maps, const __grid_constant__ Job job) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ unsigned char shared_memory[];
  __shared__ alignas(8) uint64_t full[kStages], empty[kStages];
  unsigned char* const ring_memory = reinterpret_cast<unsigned char*>(
      (reinterpret_cast<uintptr_t>(shared_memory) + 1023) & ~uintptr_t{1023});
  const int warpgroup = threadIdx.x / 128, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int rank = blockIdx.x % kCluster, cluster = blockIdx.x / kCluster, clusters = gridDim.x / kCluster;
  const auto box_a = [&](int stage, int i) { return ring_memory + stage * kStageBytes + i * kBoxBytes; };
  unsigned char* const desks = ring_memory + kStages * kStageBytes;
  const auto box_b = [&](int stage, int i) { return box_a(stage, kBoxesA + i); };

  if (threadIdx.x == 0) {
    for (const CUtensorMap& map : maps.a) prefetch_map(&map);
    prefetch_map(&maps.b);
    for (int i = 0; i < kStages; ++i) {
      barrier_init(&full[i], 1);
      barrier_init(&empty[i], kCluster * kConsumers);
    }
    mbarrier_init_fence();
  }
  cluster_arrive();
  cluster_wait();
  const int tiles = job.tiles();

  if (warpgroup == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (warp == 0) {
      Ring ring;
      for (int t = cluster; t < tiles; t += clusters) {
        const Tile tile = job.tile(t, rank);
        if (lane == 0) {
          for (int i = 0; i < tile.k_blocks; ++i, ring.next()) {
            mbarrier_wait(&empty[ring.stage], ring.phase ^ 1);
            uint64_t* const arrived = &full[ring.stage];
            mbarrier_arrive_expect(arrived, kStageBytes);
            const int k = tile.k0 + i * kTileK;
            const int row_a = Job::kAMn ? k : tile.m0;  // of the memory of a
            bool second = false;
            if constexpr (Job::kPanels) second = row_a >= job.rows_in_first;
            const CUtensorMap* const map_a = &maps.a[second];
            int skipped = 0;
            if constexpr (Job::kPanels) skipped = second ? job.rows_in_first : 0;
#pragma unroll
            for (int box = 0; box < kBoxesA; ++box) {
              const int m = tile.m0 + box * kBox;
              Corner at = Job::kAMn ? Corner{m, k - skipped, 0} : Corner{k, m - skipped, 0};
              if constexpr (Job::kPanels) at = {at.column % kPanel, at.row, at.column / kPanel};
              load_box(box_a(ring.stage, box), map_a, at, arrived, Job::kKeepA);
            }
#pragma unroll
            for (int half = 0; half < kBoxesB / kCluster; ++half) {
              const int box = rank * (kBoxesB / kCluster) + half, n = tile.n0 + box * kBox;
              load_box_to_cluster(box_b(ring.stage, box), &maps.b,
                                  Job::kBMn ? Corner{n, k, 0} : Corner{k, n, 0}, arrived, Job::kKeepB);
            }
          }
        }
        __syncwarp();
      }
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    const int group = warpgroup - 1;
    // Within a box, 16 of the summed dimension further: along its rows, or down 16 of them.
    constexpr int kStepA = (Job::kAMn ? 16 * 128 : 32) >> 4, kStepB = (Job::kBMn ? 16 * 128 : 32) >> 4;
    const auto release = [&](int stage) {
      if (threadIdx.x % 128 < kCluster) cluster_barrier_arrive(&empty[stage], threadIdx.x % 128);
    };
    const int own_row = group * kBox + warp % 4 * 16, own_warp = warp - 4;
    const Desk desk{desks + own_warp * kDeskBytes};
    Ring ring;
    float sums[kSums];
    for (int t = cluster; t < tiles; t += clusters) {
      const Tile tile = job.tile(t, rank);
      typename Job::Early early;
      if (tile.k_blocks == 0) {
        job.fetch(tile, own_row, lane, desk);
        early = job.early(tile, own_row, lane);
      }
      int previous = -1;
      for (int i = 0; i < tile.k_blocks; ++i, ring.next()) {
        mbarrier_wait(&full[ring.stage], ring.phase);
        if (i == max(tile.k_blocks - 2, 0)) job.fetch(tile, own_row, lane, desk);
        if (i == tile.k_blocks - 1) early = job.early(tile, own_row, lane);
        const uint64_t da = descriptor(box_a(ring.stage, group)), db = descriptor(box_b(ring.stage, 0));
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < kTileK / 16; ++k) {
          wgmma<Job::kAMn, Job::kBMn>(sums, da + k * kStepA, db + k * kStepB, i | k);
        }
        wgmma_commit();
        wgmma_wait<1>();
        if (i > 0) release(previous);
        previous = ring.stage;
      }
      wgmma_wait<0>();
      pin(sums);
      if (previous >= 0) release(previous);
      job.finish(sums, early, tile, own_row, lane, desk);
    }
    bulk_store_wait();
  }
  // A block must not end while the other one may still arrive at its barriers.
  cluster_arrive();
  cluster_wait();
#endif
}

}  // namespace liger::sm90
