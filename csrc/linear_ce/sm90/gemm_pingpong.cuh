// The GEMM of gemm.cuh with a tile per warpgroup, "ping-pong": while one consumer warpgroup runs the epilogue of its tile,
// the other one has the tensor cores for its own (sm_90a only).
//
// Operand B is K-major or MN-major. Tiles of a block are 128 x 192, two instructions of 64 rows, so a thread has 2 x 96 accumulators. The mainloops of the two
// warpgroups follow each other: the parity of an mbarrier is that of one fill of its stage only for a warpgroup which
// knows that the fill before has arrived.
#pragma once

#include "linear_ce/sm90/gemm_overlapped.cuh"

namespace liger::sm90 {

inline constexpr int kPingpongStages = 5, kPingpongHalves = kTileM / kBox;

// A stage for an MN-major B, whose boxes have kBox columns: each block of a cluster loads half of the depth of all of
// them, for both.
struct HalfDepthStage : Stage<kPingpongColumns, kPingpongColumns / kCluster> {
  using Base = Stage<kPingpongColumns, kPingpongColumns / kCluster>;
  static constexpr int kBoxesPerBlock = kPingpongColumns / kBox, kDepth = kTileK / kCluster;
  static constexpr int kHalfBoxBytes = kDepth * kBox * 2;

  static __device__ __forceinline__ unsigned char* box_b(unsigned char* ring, int stage, int i) {
    return Base::box_b(ring, stage, 0) + i * kBoxBytes;
  }
  template <class Epilogue>
  static __device__ __forceinline__ void load_b(const Maps& maps, const Tile& tile, int k, int rank,
                                                unsigned char* ring, int stage, uint64_t* arrived) {
#pragma unroll
    for (int i = 0; i < kBoxesPerBlock; ++i) {
      load_box_to_cluster(box_b(ring, stage, i) + rank * kHalfBoxBytes, &maps.b,
                          {tile.n0 + i * kBox, k + rank * kDepth, 0}, arrived, Epilogue::kHintB);
    }
  }
};
template <class Epilogue>
using PingpongStage = std::conditional_t<Epilogue::kBMn, HalfDepthStage, NarrowStage>;
template <class Epilogue>
inline constexpr int kPingpongSharedBytes =
    kPingpongStages * PingpongStage<Epilogue>::kBytes + kWarps * Epilogue::kSmemBytes + 1024;

// An epilogue that stores by TMA has descriptors of its results, too.
__device__ __forceinline__ const Maps& operands_of(const Maps& maps) {
  return maps;
}
__device__ __forceinline__ const Maps& operands_of(const OverlappedMaps& maps) {
  return maps.operands;
}

#ifdef LIGER_SM90A
// issue_k_block() of gemm.cuh for both halves of a tile, which share the operand B, and for its first kColumns columns.
template <int kColumns, class Epilogue, class Stage>
__device__ __forceinline__ void issue_halves(float (&sums)[kPingpongHalves][kSums], uint32_t a, uint32_t b,
                                             int ring_stage) {
  constexpr int kStepA = (Epilogue::kAMn ? 16 * 128 : 32) >> 4,
                kStepB = (Epilogue::kBMn ? 16 * 128 : 32) >> 4;
  const uint32_t stage = ring_stage * (Stage::kBytes >> 4);
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < kTileK / 16; ++k) {
#pragma unroll
    for (int half = 0; half < kPingpongHalves; ++half) {
      wgmma<typename Epilogue::Element, kColumns, Epilogue::kAMn, Epilogue::kBMn>(
          sums[half], a + stage + half * (kBoxBytes >> 4) + k * kStepA, b + stage + k * kStepB, true);
    }
  }
  wgmma_commit();
}
#endif

// An Epilogue is as that of gemm_kernel, with the same number of k-blocks in all tiles, and instead of load() and store()
//   using Maps                                 Maps, or OverlappedMaps
//   static constexpr int kSmemBytes            per warp, a multiple of 128
//   void store(float (&sums)[kPingpongHalves][kSums], Operands, Tile, int row, int lane, EpilogueSmem, Maps) const
//       as that of gemm_kernel, for two halves: row is that of the first one, in the second one it is kBox more
//   Operands prefetch(Tile, int row, int lane, EpilogueSmem) const
//       near the end of the mainloop
//   static constexpr bool kMayBeNarrow         a tile may have fewer than kColumns columns
//   int columns_of(Tile) const                 the columns that store() needs, the same for a cluster
template <class Epilogue>
__global__ void __launch_bounds__(kThreads, 1)
    gemm_kernel_pingpong(const __grid_constant__ typename Epilogue::Maps maps,
                         const __grid_constant__ Epilogue epilogue) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  static_assert(Epilogue::kColumns == kPingpongColumns);
  using Stage = PingpongStage<Epilogue>;
  extern __shared__ unsigned char shared_memory[];
  __shared__ alignas(8) uint64_t full[kPingpongStages], empty[kPingpongStages];
  unsigned char* const ring_memory = aligned_ring(shared_memory);
  unsigned char* const epilogue_smem = ring_memory + kPingpongStages * Stage::kBytes;
  const int warpgroup = threadIdx.x / 128, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int rank = blockIdx.x % kCluster, cluster = blockIdx.x / kCluster, clusters = gridDim.x / kCluster;
  // One warpgroup of each block of the cluster releases a stage.
  if (threadIdx.x == 0) init_ring(operands_of(maps), full, empty, kCluster);
  cluster_arrive();
  cluster_wait();
  const int tiles = epilogue.tiles();

  if (warpgroup == 0) {
    if constexpr (Epilogue::kBMn) {
      asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
    } else {
      asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    }
    if (warp == 0) {
      Ring<kPingpongStages> ring;
      for (int t = cluster; t < tiles; t += clusters) {
        const Tile tile = epilogue.tile(t, rank);
        if (lane == 0)
          load_tile<Stage>(operands_of(maps), epilogue, tile, rank, ring_memory, full, empty, ring);
        __syncwarp();
      }
    }
  } else {
    if constexpr (Epilogue::kBMn) {
      asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
    } else {
      asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    }
    const int group = warpgroup - 1;
    // Of stage 0; the boxes of A follow each other.
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
    // The stages of the tile that the other warpgroup computes before this one.
    const auto skip = [&](int count) {
      const int at = ring.stage + count;
      ring.phase ^= at / kPingpongStages & 1;
      ring.stage = at % kPingpongStages;
    };
    if (group == 1 && t < tiles) skip(epilogue.tile(t, rank).k_blocks);
    for (; t < tiles; t += 2 * clusters) {
      const Tile tile = epilogue.tile(t, rank);
      // With kColumns of the columns; the others are 0. Each width has accumulators and an epilogue of its own: where
      // branches join, the compiler would move accumulators, and serialise wgmmas for it.
      const auto compute = [&](auto width) __attribute__((always_inline)) {
        constexpr int kColumns = width.value;
        float sums[kPingpongHalves][kSums];
        // While the other warpgroup computes. It also tells the compiler that the registers are free until here.
        for (auto& half : sums) clear<kPingpongColumns>(half);
        int previous = -1;
        const auto add_k_blocks = [&](int count) __attribute__((always_inline)) {
          for (int i = 0; i < count; ++i, ring.next()) {
            mbarrier_wait(full_address + ring.stage * sizeof(uint64_t), ring.phase);
            issue_halves<kColumns, Epilogue, Stage>(sums, descriptor_a, descriptor_b, ring.stage);
            wgmma_wait<1>();
            if (previous >= 0) release(previous);
            previous = ring.stage;
          }
        };
        if (t != cluster) await_turn();
        const int late = min(tile.k_blocks, kLateBlocks);
        add_k_blocks(tile.k_blocks - late);
        const typename Epilogue::Operands operands = epilogue.prefetch(tile, own_row, lane, smem);
        add_k_blocks(late);
        if (t + clusters < tiles) pass_turn();
        wgmma_wait<0>();
        for (auto& half : sums) pin<kColumns>(half);
        if (previous >= 0) release(previous);
        epilogue.store(sums, operands, tile, own_row, lane, smem, maps);
      };
      // The last tile of columns may be narrow.
      const int width = epilogue.columns_of(tile);
      if (Epilogue::kMayBeNarrow && width <= 64) {
        compute(std::integral_constant<int, 64>{});
      } else if (Epilogue::kMayBeNarrow && width <= 128) {
        compute(std::integral_constant<int, 128>{});
      } else {
        compute(std::integral_constant<int, kPingpongColumns>{});
      }
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
