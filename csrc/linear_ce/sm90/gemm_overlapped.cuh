// The GEMM of gemm.cuh with two sets of accumulators: while wgmma accumulates a tile in one of them, the same warps
// run the epilogue of the tile before on the other one, a piece per k-block (sm_90a only).
//
// Tiles of a block are 128 x 192, so a thread has 2 x 96 accumulators. Boxes of B have 96 rows, half of a tile: each
// block of a cluster loads one and multicasts it.
#pragma once

#include <utility>

#include "linear_ce/sm90/gemm.cuh"

namespace liger::sm90 {

inline constexpr int kOverlappedStages = 5;
inline constexpr int kOverlappedBoxRows = kOverlappedColumns / kCluster;  // of B
using NarrowStage = Stage<kOverlappedColumns, kOverlappedBoxRows>;
// A box of the epilogue's result, of one warp: 16 rows of kBox columns.
inline constexpr int kResultBoxRows = 16, kResultBoxBytes = kResultBoxRows * kBox * 2;
template <class Epilogue>
inline constexpr int kOverlappedSharedBytes =
    kOverlappedStages * NarrowStage::kBytes + kWarps * Epilogue::kSmemBytes + 1024;

struct OverlappedMaps {
  Maps operands;
  CUtensorMap results
      [2];  // panels, in boxes of kResultBoxRows x kBox; rows from `rows_in_first` on are in the second
};

// An Epilogue is as that of gemm_kernel, without prefetch(), load() and store() but with
//   static constexpr int kPieces               of a tile, each while a k-block of the next tile is computed
//   struct Pending                             what a tile needs beside its accumulators until its epilogue has ended
//   static constexpr int kSmemBytes            per warp, a multiple of 128: a box of the result, then others
//   bool begin(Pending&, Tile, int row, int lane, EpilogueSmem) const
//       during the mainloop of the tile; false: nothing is done with its accumulators
//   bool ends_at_once(float (&sums)[kSums], const Pending&, int row, int lane, EpilogueSmem) const
//       after the mainloop; true: this was the epilogue, there are no pieces
//   void piece<kPiece>(float (&sums)[kSums], Pending&, int row, int lane, EpilogueSmem, const CUtensorMap (&)[2]) const
//       each once, in ascending order; the last one ends the epilogue
template <class Epilogue>
__global__ void __launch_bounds__(kThreads, 1)
    gemm_kernel_overlapped(const __grid_constant__ OverlappedMaps maps,
                           const __grid_constant__ Epilogue epilogue) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ unsigned char shared_memory[];
  __shared__ alignas(8) uint64_t full[kOverlappedStages], empty[kOverlappedStages];
  unsigned char* const ring_memory = aligned_ring(shared_memory);
  unsigned char* const epilogue_smem = ring_memory + kOverlappedStages * NarrowStage::kBytes;
  const int warpgroup = threadIdx.x / 128, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int rank = blockIdx.x % kCluster, cluster = blockIdx.x / kCluster, clusters = gridDim.x / kCluster;
  if (threadIdx.x == 0) init_ring(maps.operands, full, empty);
  cluster_arrive();
  cluster_wait();
  const int tiles = epilogue.tiles();

  if (warpgroup == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (warp == 0) {
      Ring<kOverlappedStages> ring;
      for (int t = cluster; t < tiles; t += clusters) {
        const Tile tile = epilogue.tile(t, rank);
        if (lane == 0)
          load_tile<NarrowStage>(maps.operands, epilogue, tile, rank, ring_memory, full, empty, ring);
        __syncwarp();
      }
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    const int group = warpgroup - 1;
    const int own_row = group * kBox + warp % 4 * 16, own_warp = warp - 4;
    const EpilogueSmem smem{epilogue_smem + own_warp * Epilogue::kSmemBytes};
    // Of stage 0.
    const uint32_t descriptor_a = descriptor_low(NarrowStage::box_a(ring_memory, 0, group)),
                   descriptor_b = descriptor_low(NarrowStage::box_b(ring_memory, 0, 0));
    const uint32_t full_address = shared_address(full);
    const bool releases = threadIdx.x % 128 < kCluster;
    const uint32_t empty_address = cluster_address(empty, releases ? threadIdx.x % 128 : 0);
    const auto release = [&](int stage) {
      if (releases) cluster_barrier_arrive(empty_address + stage * sizeof(uint64_t));
    };
    Ring<kOverlappedStages> ring;
    typename Epilogue::Pending pending;
    bool is_pending = false;
    int t = cluster;
    Tile next{};
    if (t < tiles) next = epilogue.tile(t, rank);
    // The mainloop of the next tile, with the epilogue of the tile before; false if there is no next tile.
    const auto step = [&](float (&sums)[kSums], float (&before)[kSums]) __attribute__((always_inline)) {
      const auto run_piece = [&](auto piece) __attribute__((always_inline)) {
        epilogue.template piece<piece.value>(before, pending, own_row, lane, smem, maps.results);
      };
      const auto for_each_piece = [&](const auto& f) __attribute__((always_inline)) {
        [&]<int... p>(std::integer_sequence<int, p...>) __attribute__((always_inline)) {
          (f(std::integral_constant<int, p>{}), ...);
        }(std::make_integer_sequence<int, Epilogue::kPieces>{});
      };
      const Tile tile = next;
      int previous = -1;
      forget<Epilogue::kColumns>(sums);
      // Adds a k-block while the warp runs `meanwhile`.
      const auto add_k_block = [&](const auto& meanwhile) __attribute__((always_inline)) {
        mbarrier_wait(full_address + ring.stage * sizeof(uint64_t), ring.phase);
        issue_k_block<Epilogue, NarrowStage>(sums, descriptor_a, descriptor_b, ring.stage, previous);
        meanwhile();
        wgmma_wait<1>();
        if (previous >= 0) release(previous);
        previous = ring.stage;
        ring.next();
      };
      const auto add_k_blocks = [&](int count) __attribute__((always_inline)) {
        for (int i = 0; i < count; ++i) add_k_block([] {});
        // During the last k-block, so that the next mainloop follows without a gap.
        t += clusters;
        if (t < tiles) next = epilogue.tile(t, rank);
        asm volatile("" : "+r"(next.m0), "+r"(next.n0));
        wgmma_wait<0>();
        pin<Epilogue::kColumns>(sums);
      };
      // Two whole mainloops: where branches join while wgmmas run, the compiler would serialise them. With fewer k-blocks
      // than pieces the epilogue runs before the mainloop.
      const bool has_tile = t < tiles;
      if (is_pending && has_tile && tile.k_blocks >= Epilogue::kPieces) {
        for_each_piece([&](auto piece) __attribute__((always_inline)) {
          add_k_block([&]() __attribute__((always_inline)) { run_piece(piece); });
        });
        is_pending = epilogue.begin(pending, tile, own_row, lane, smem);
        add_k_blocks(tile.k_blocks - Epilogue::kPieces);
      } else {
        if (is_pending) for_each_piece(run_piece);
        if (!has_tile) return false;
        is_pending = epilogue.begin(pending, tile, own_row, lane, smem);
        add_k_blocks(tile.k_blocks);
      }
      if (previous >= 0) release(previous);
      if (is_pending) is_pending = !epilogue.ends_at_once(sums, pending, own_row, lane, smem);
      return true;
    };
    float even[kSums], odd[kSums];
    while (step(even, odd) && step(odd, even)) {
    }
    bulk_store_wait();
  }
  // A block must not exit while the other one may still arrive on its mbarriers.
  cluster_arrive();
  cluster_wait();
#endif
}

}  // namespace liger::sm90
