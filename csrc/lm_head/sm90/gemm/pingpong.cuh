// SPDX-License-Identifier: BSD-3-Clause

// The GEMM of gemm.cuh with a tile per warpgroup, the schedule that CUTLASS calls ping-pong: while one
// consumer warpgroup runs the epilogue of its tile, the other one uses the tensor cores (sm_90a only).
//
// Tiles of a block are 128 x 192, two instructions of 64 rows, so a thread has 2 x 96 accumulators. The
// mainloops of the two warpgroups take turns. A warpgroup may wait on a stage's parity only after it has seen
// the previous fill of that stage; otherwise the parity is ambiguous. Boxes of B have 96 rows, half of a
// tile: each block of a cluster loads one box and multicasts it.
#pragma once

#include "lm_head/sm90/gemm/gemm.cuh"

namespace liger::sm90 {

inline constexpr int kPingpongStages = 5, kPingpongHalves = kTileM / kBox;
using PingpongStage = KMajorStage<kPingpongColumns>;
// A box of the epilogue's result, per warp: 16 rows of kBox columns.
inline constexpr int kResultBoxRows = 16, kResultBoxBytes = kResultBoxRows * kBox * 2;
template <class Epilogue>
inline constexpr int kPingpongSharedBytes =
    kPingpongStages * PingpongStage::kBytes + kWarps * Epilogue::kSmemBytes + kAlignmentBytes;

struct PingpongMaps {
  Maps operands;
  // Panels, in boxes of kResultBoxRows x kBox; rows from `rows_in_first` on are in the second buffer.
  CUtensorMap results[2];
};

// The Epilogue contract is the contract of gemm_kernel (gemm.cuh) with these differences: operands are
// K-major, all tiles have the same number of k-blocks, and two functions replace prefetch(), load() and
// store():
//   void prefetch(Tile, int lane, EpilogueSmem) const
//       near the end of the mainloop
//   void store(Sums<kColumns> (&sums)[kPingpongHalves], Tile, int row, int lane, EpilogueSmem,
//              const CUtensorMap (&results)[2]) const
//       for two halves of the tile: row belongs to the first half; the row of the second half is row + kBox
template <class Epilogue>
__global__ void __launch_bounds__(kThreads, 1)
    gemm_kernel_pingpong(const __grid_constant__ PingpongMaps maps,
                         const __grid_constant__ Epilogue epilogue) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  static_assert(Epilogue::kColumns == kPingpongColumns && !Epilogue::kAMn && !Epilogue::kBMn);
  using Stage = PingpongStage;
  extern __shared__ unsigned char shared_memory[];
  __shared__ alignas(8) uint64_t full[kPingpongStages], empty[kPingpongStages];
  unsigned char* const ring_memory = aligned_ring(shared_memory);
  unsigned char* const epilogue_smem = ring_memory + kPingpongStages * Stage::kBytes;
  const int warpgroup = threadIdx.x / 128, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int rank = blockIdx.x % kCluster, cluster = blockIdx.x / kCluster, clusters = gridDim.x / kCluster;
  // One warpgroup of each block of the cluster releases a stage.
  if (threadIdx.x == 0) init_ring(maps.operands, full, empty, kCluster);
  cluster_arrive();
  cluster_wait();
  const int tiles = epilogue.tiles();

  if (warpgroup == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (warp == 0) {
      Ring<kPingpongStages> ring;
      for (int t = cluster; t < tiles; t += clusters) {
        const Tile tile = epilogue.tile(t, rank);
        if (lane == 0) load_tile<Stage>(maps.operands, epilogue, tile, rank, ring_memory, full, empty, ring);
        __syncwarp();
      }
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    const int group = warpgroup - 1;
    // Descriptors of stage 0; the boxes of A follow each other.
    const uint32_t descriptor_a = descriptor_low(Stage::box_a(ring_memory, 0, 0)),
                   descriptor_b = descriptor_low(Stage::box_b(ring_memory, 0, 0));
    const uint32_t full_address = shared_address(full);
    const bool releases = threadIdx.x % 128 < kCluster;
    const uint32_t empty_address = cluster_address(empty, releases ? threadIdx.x % 128 : 0);
    const auto release = [&](int stage) {
      if (releases) cluster_barrier_arrive(empty_address + stage * sizeof(uint64_t));
    };
    const int own_row = warp % 4 * 16;
    const EpilogueSmem smem{epilogue_smem + (warp - 4) * Epilogue::kSmemBytes};
    Ring<kPingpongStages> ring;
    // Named barriers 1 and 2: warpgroup 0 or 1 may begin its mainloop.
    const auto await_turn = [&] { asm volatile("bar.sync %0, 256;" ::"r"(1 + group) : "memory"); };
    const auto pass_turn = [&] { asm volatile("bar.arrive %0, 256;" ::"r"(2 - group) : "memory"); };
    int t = cluster + group * clusters;
    // Skips the stages of the tile that the other warpgroup computes first.
    const auto skip = [&](int count) {
      const int at = ring.stage + count;
      ring.phase ^= at / kPingpongStages & 1;
      ring.stage = at % kPingpongStages;
    };
    if (group == 1 && t < tiles) skip(epilogue.tile(t, rank).k_blocks);
    for (; t < tiles; t += 2 * clusters) {
      const Tile tile = epilogue.tile(t, rank);
      Sums<kPingpongColumns> sums[kPingpongHalves];
      Sums<kSecondColumns> none;
      // Runs while the other warpgroup computes. Without the clear the compiler keeps the accumulators
      // through the epilogue and spills: it does not know that the first wgmma of a tile ignores them.
      for (auto& half : sums) clear<kPingpongColumns>(half);
      int previous = -1;
      const auto add_k_blocks = [&](int count) __attribute__((always_inline)) {
        for (int i = 0; i < count; ++i, ring.next()) {
          mbarrier_wait(full_address + ring.stage * sizeof(uint64_t), ring.phase);
          issue_k_block<Epilogue, Stage>(sums, none, descriptor_a, descriptor_b, ring.stage, true);
          wgmma_wait<1>();
          if (previous >= 0) release(previous);
          previous = ring.stage;
        }
      };
      if (t != cluster) await_turn();
      const int late = min(tile.k_blocks, kLateBlocks);
      add_k_blocks(tile.k_blocks - late);
      epilogue.prefetch(tile, lane, smem);
      add_k_blocks(late);
      if (t + clusters < tiles) pass_turn();
      wgmma_wait<0>();
      for (auto& half : sums) pin<kPingpongColumns>(half);
      if (previous >= 0) release(previous);
      epilogue.store(sums, tile, own_row, lane, smem, maps.results);
      skip(tile.k_blocks);
    }
    bulk_store_wait();
  }
  // A block must not exit while the other one may still arrive on its mbarriers.
  cluster_arrive();
  cluster_wait();
#endif
}

}  // namespace liger::sm90
