// Matrix products of bf16 on the matrix units of compute capability 9.0 (sm_90a only).
//
// A product is a persistent kernel, launched as clusters of kCluster blocks: pairs of blocks walk over tiles
// of 2 x 128 rows and 256 columns. One warp of a block copies operands into a ring of shared memory (the
// tensor copy engine; the half of B that each block of a pair loads goes to both); two warpgroups multiply,
// 64 rows each, and hand their sums, still in registers, to the epilogue of the job. An operand may lie in
// memory with the summed dimension inside ("K-major") or outside ("MN-major"); boxes of 64 x 64 elements with
// the 128-byte swizzle serve both.
#pragma once

#include "linear_ce/sm90/ptx.cuh"

namespace liger::sm90 {

// Where a tile lies: rows m0.. (this block's) and columns n0.. of the result, k_blocks x 64 summed from k0
// on.
struct Tile {
  int m0, n0, k0, k_blocks;
  int part;  // which of the parts that the summed dimension is split into
};

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
