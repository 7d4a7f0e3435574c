// SPDX-License-Identifier: BSD-3-Clause

// Persistent, warp-specialised GEMM of bf16 or fp16 with wgmma and TMA (sm_90a only).
//
// Clusters of kCluster = 2 blocks iterate over tiles of 2 x 128 rows and up to 320 columns. The producer warp
// of a block loads operands by TMA into a ring of stages; each block of a cluster loads half of B and
// multicasts it to both blocks. Two consumer warpgroups of 64 rows each issue wgmma and pass the
// accumulators, still in registers, to the epilogue. Operands are K-major or MN-major; boxes of 64 x 64
// elements with the 128-byte swizzle serve both.
#pragma once

#include <algorithm>
#include <type_traits>

#include "lm_head/sm90/gemm/wgmma.cuh"

namespace liger::sm90 {

// The work of one block: rows from m0 on and columns from n0 on of the result, summed over k_blocks x kTileK
// from k0 on.
struct Tile {
  int m0, n0, k0, k_blocks;
  int k_split;  // index of the split
};

// Shared memory of one consumer warp, Epilogue::kSmemBytes.
struct EpilogueSmem {
  unsigned char* memory;
};

// TMA descriptors. Operand A may be in panels of 128 columns and in two buffers: rows from `rows_in_first` on
// are in the second one.
struct Maps {
  CUtensorMap a[2], b;
};

// A stage of the ring has kTileK of the summed dimension, for the rows of A and the columns of B. Each block
// of a cluster loads half of B for both blocks.
template <int kBytesOfB, int kBytesOfBox>
struct StageBoxes {
  static constexpr int kBytes = kBoxesA * kBoxBytes + kBytesOfB;
  static __device__ __forceinline__ unsigned char* box_a(unsigned char* ring, int stage, int i) {
    return ring + stage * kBytes + i * kBoxBytes;
  }
  static __device__ __forceinline__ unsigned char* box_b(unsigned char* ring, int stage, int i) {
    return box_a(ring, stage, kBoxesA) + i * kBytesOfBox;
  }
};

// B is K-major: a block loads a box of half of the columns.
template <int kColumns>
struct KMajorStage : StageBoxes<kColumns * kTileK * 2, kColumns / kCluster * kTileK * 2> {
  static constexpr int kBoxRowsB = kColumns / kCluster, kSecondBytes = 0;

  // The half of B that block `rank` of the cluster loads, with the summed dimension from k on.
  template <class Epilogue>
  static __device__ __forceinline__ void load_b(const Maps& maps, const Tile& tile, int k, int rank,
                                                unsigned char* ring, int stage, uint64_t* arrived) {
    load_box_to_cluster(KMajorStage::box_b(ring, stage, rank), &maps.b,
                        Corner{k, tile.n0 + rank * kBoxRowsB, 0}, arrived, Epilogue::kHintB);
  }
};

// The columns of a second operand B, which is K-major.
inline constexpr int kSecondColumns = 8;

// B is MN-major, in boxes of kBox columns: a block loads half of them. If the number of boxes is odd, a block
// loads half of the rows of each box. The second operand B follows the boxes.
template <int kColumns, bool kSecondB>
struct MnMajorStage
    : StageBoxes<(kColumns + kBox - 1) / kBox * kBoxBytes + (kSecondB ? kSecondColumns * kTileK * 2 : 0),
                 kBoxBytes> {
  static constexpr int kSecondBytes = kSecondB ? kSecondColumns * kTileK * 2 : 0;
  static constexpr int kBoxes = (kColumns + kBox - 1) / kBox;
  static constexpr bool kHalfBoxes = kBoxes % kCluster != 0;
  static constexpr int kBoxRowsB = kHalfBoxes ? kTileK / kCluster : kTileK;

  template <class Epilogue>
  static __device__ __forceinline__ void load_b(const Maps& maps, const Tile& tile, int k, int rank,
                                                unsigned char* ring, int stage, uint64_t* arrived) {
    constexpr int kLoads = kHalfBoxes ? kBoxes : kBoxes / kCluster;
    const int first_box = kHalfBoxes ? 0 : rank * kLoads, first_row = kHalfBoxes ? rank * kBoxRowsB : 0;
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int box = first_box + i;
      load_box_to_cluster(MnMajorStage::box_b(ring, stage, box) + first_row * kBox * 2, &maps.b,
                          Corner{tile.n0 + box * kBox, k + first_row, 0}, arrived, Epilogue::kHintB);
    }
  }
};

template <class Epilogue>
using StageOf = MnMajorStage<Epilogue::kColumns, Epilogue::kSecondB>;

template <int kCount>
struct Ring {
  int stage = 0;
  uint32_t phase = 0;
  __device__ __forceinline__ void next() {
    if (++stage == kCount) stage = 0, phase ^= 1;
  }
};

// Boxes need an alignment of 1024 bytes, as the 128-byte swizzle requires.
__device__ __forceinline__ unsigned char* aligned_ring(unsigned char* shared_memory) {
  return reinterpret_cast<unsigned char*>((reinterpret_cast<uintptr_t>(shared_memory) + 1023) &
                                          ~uintptr_t{1023});
}

// One thread calls it before a cluster barrier. releases: number of warpgroups that release a stage.
template <int kCount>
__device__ __forceinline__ void init_ring(const Maps& maps, uint64_t (&full)[kCount],
                                          uint64_t (&empty)[kCount], int releases = kCluster * kConsumers) {
  for (const CUtensorMap& map : maps.a) prefetch_map(&map);
  prefetch_map(&maps.b);
  for (int i = 0; i < kCount; ++i) {
    barrier_init(&full[i], 1);
    barrier_init(&empty[i], releases);
  }
  mbarrier_init_fence();
}

// Loads the operands of a tile; one thread calls it.
template <class Stage, int kCount, class Epilogue>
__device__ __forceinline__ void load_tile(const Maps& maps, const Epilogue& epilogue, const Tile& tile,
                                          int rank, unsigned char* ring_memory, uint64_t (&full)[kCount],
                                          uint64_t (&empty)[kCount], Ring<kCount>& ring) {
  bool second_b = false;
  if constexpr (Stage::kSecondBytes > 0) second_b = epilogue.has_second_b(tile);
  for (int i = 0; i < tile.k_blocks; ++i, ring.next()) {
    mbarrier_wait(&empty[ring.stage], ring.phase ^ 1);
    uint64_t* const arrived = &full[ring.stage];
    mbarrier_arrive_expect(arrived, Stage::kBytes - (second_b ? 0 : Stage::kSecondBytes));
    const int k = tile.k0 + i * kTileK;
    const int row_a = Epilogue::kAMn ? k : tile.m0;  // row in the memory of A
    bool second = false;
    if constexpr (Epilogue::kPanels) second = row_a >= epilogue.rows_in_first;
    const CUtensorMap* const map_a = &maps.a[second];
    int skipped = 0;
    if constexpr (Epilogue::kPanels) skipped = second ? epilogue.rows_in_first : 0;
#pragma unroll
    for (int box = 0; box < kBoxesA; ++box) {
      const int m = tile.m0 + box * kBox;
      Corner at = Epilogue::kAMn ? Corner{m, k - skipped, 0} : Corner{k, m - skipped, 0};
      if constexpr (Epilogue::kPanels) at = {at.column % kPanel, at.row, at.column / kPanel};
      load_box(Stage::box_a(ring_memory, ring.stage, box), map_a, at, arrived, Epilogue::kHintA);
    }
    Stage::template load_b<Epilogue>(maps, tile, k, rank, ring_memory, ring.stage, arrived);
    if constexpr (Stage::kSecondBytes > 0) {
      if (second_b)
        load_box(Stage::box_b(ring_memory, ring.stage, Stage::kBoxes), &epilogue.second_b, Corner{k, 0, 0},
                 arrived, CacheHint::kNormal);
    }
  }
}

#ifdef LIGER_SM90A
// Issues the wgmmas of a k-block in this stage for kCount times 64 rows, which share the operand B. a, b: low
// words of the descriptors of stage 0; other stages only add constants, because many instructions between
// wgmmas would stall the tensor cores. add: false overwrites the accumulators. second: descriptor of the
// second operand B, with kSecondB. kUsed: how many of the kCount are multiplied; 0 for all.
template <class Epilogue, class Stage, bool kSecondB = false, int kUsed = 0, int kCount>
__device__ __forceinline__ void issue_k_block(Sums<Epilogue::kColumns> (&sums)[kCount],
                                              Sums<kSecondColumns>& second, uint32_t a, uint32_t b,
                                              int ring_stage, bool add) {
  using Element = typename Epilogue::Element;
  constexpr bool kAMn = Epilogue::kAMn, kBMn = Epilogue::kBMn;
  // An instruction has up to 256 columns. If two are needed, the first ends at the end of a box of B.
  constexpr int kFirst = Epilogue::kColumns <= 256 ? Epilogue::kColumns : 2 * kBox,
                kRest = Epilogue::kColumns - kFirst;
  // Descriptor increments for 16 elements of K within a box: along its rows, or down 16 of them.
  constexpr int kStepA = (kAMn ? 16 * 128 : 32) >> 4, kStepB = (kBMn ? 16 * 128 : 32) >> 4;
  const uint32_t stage = ring_stage * (Stage::kBytes >> 4);
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < kTileK / 16; ++k) {
#pragma unroll
    for (int i = 0; i < (kUsed > 0 ? kUsed : kCount); ++i) {
      const uint32_t at_a = a + stage + i * (kBoxBytes >> 4) + k * kStepA, at_b = b + stage + k * kStepB;
      wgmma<Element, kFirst, kAMn, kBMn>(sums[i], at_a, at_b, k > 0 || add);
      if constexpr (kRest > 0) {
        static_assert(kBMn);
        constexpr int kSkipped = kFirst / kBox * kBoxBytes >> 4;
        wgmma<Element, kRest, kAMn, kBMn>(sums[i] + kFirst / 2, at_a, at_b + kSkipped, k > 0 || add);
      }
      if constexpr (kSecondB) {
        constexpr int kSkipped = Stage::kBoxes * kBoxBytes >> 4, kStep = 32 >> 4;
        wgmma<Element, kSecondColumns, kAMn, false>(second, at_a, b + stage + kSkipped + k * kStep,
                                                    k > 0 || add);
      }
    }
  }
  wgmma_commit();
}
#endif

// 1024 bytes align the boxes, as the 128-byte swizzle requires.
inline constexpr int kAlignmentBytes = 1024, kMaxSharedBytes = 226 * 1024;
template <class Epilogue>
inline constexpr int kRingStages = std::min(
    4, (kMaxSharedBytes - kAlignmentBytes - kWarps * Epilogue::kSmemBytes) / StageOf<Epilogue>::kBytes);
template <class Epilogue>
inline constexpr int kSharedBytes =
    kRingStages<Epilogue> * StageOf<Epilogue>::kBytes + kWarps * Epilogue::kSmemBytes + kAlignmentBytes;

// Number of k-blocks that follow prefetch() and load() in the mainloop.
inline constexpr int kLateBlocks = 2;

// An Epilogue defines the tiles and what is done with the accumulators:
//   using Element                              the type of the operands, __nv_bfloat16 or __half
//   static constexpr bool kAMn, kBMn           true: the operand is MN-major
//   static constexpr CacheHint kHintA, kHintB
//   static constexpr bool kPanels              A is in panels; then int rows_in_first is a member
//   int tiles() const                          number of tiles, a cluster each; the same for all threads
//   Tile tile(int t, int rank) const
//   static constexpr int kColumns              of a tile
//   static constexpr int kSmemBytes            shared memory of the epilogue per warp, a multiple of 128
//   static constexpr bool kSecondB             there is a second operand B, of kSecondColumns columns; then
//     CUtensorMap second_b                     of its transpose, in boxes of kTileK of the summed dimension
//     bool has_second_b(Tile) const            true for tiles that are also multiplied by it
//     void store_second(Sums<kSecondColumns>& sums, Tile, int row, int lane) const
//   void prefetch(Tile, int row, int lane, EpilogueSmem) const
//       starts copies to the epilogue's shared memory near the end of the mainloop; earlier ones would delay
//       the operands
//   Operands load(Tile, int row, int lane) const
//       then loads what store() needs from global memory
//   void store(Sums<kColumns>& sums, Operands, Tile, int row, int lane, const EpilogueSmem&) const
//       row: the first of the 16 rows of the tile that belong to this warp. In lane l, sums[4j + 2h + i] is
//       row l / 4 + 8h of them and column 8j + 2 (l % 4) + i of the tile. All operands of the tile have
//       arrived.
template <class Epilogue>
__global__ void __launch_bounds__(kThreads, 1)
    gemm_kernel(const __grid_constant__ Maps maps, const __grid_constant__ Epilogue epilogue) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  static_assert(Epilogue::kBMn);
  using Stage = StageOf<Epilogue>;
  constexpr int kStages = kRingStages<Epilogue>;
  extern __shared__ unsigned char shared_memory[];
  __shared__ alignas(8) uint64_t full[kStages], empty[kStages];
  unsigned char* const ring_memory = aligned_ring(shared_memory);
  const int warpgroup = threadIdx.x / 128, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int rank = blockIdx.x % kCluster, cluster = blockIdx.x / kCluster, clusters = gridDim.x / kCluster;
  unsigned char* const epilogue_smem = ring_memory + kStages * Stage::kBytes;

  if (threadIdx.x == 0) init_ring(maps, full, empty);
  cluster_arrive();
  cluster_wait();
  const int tiles = epilogue.tiles();

  if (warpgroup == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (warp == 0) {
      Ring<kStages> ring;
      for (int t = cluster; t < tiles; t += clusters) {
        const Tile tile = epilogue.tile(t, rank);
        if (lane == 0) load_tile<Stage>(maps, epilogue, tile, rank, ring_memory, full, empty, ring);
        __syncwarp();
      }
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    const int group = warpgroup - 1;
    // Descriptors and barrier addresses of stage 0; other stages add a constant.
    const uint32_t descriptor_a = descriptor_low(Stage::box_a(ring_memory, 0, group)),
                   descriptor_b = descriptor_low(Stage::box_b(ring_memory, 0, 0));
    const uint32_t full_address = shared_address(full);
    const bool releases = threadIdx.x % 128 < kCluster;
    const uint32_t empty_address = cluster_address(empty, releases ? threadIdx.x % 128 : 0);
    const auto release = [&](int stage) {
      if (releases) cluster_barrier_arrive(empty_address + stage * sizeof(uint64_t));
    };
    const int own_row = group * kBox + warp % 4 * 16, own_warp = warp - 4;
    const EpilogueSmem smem{epilogue_smem + own_warp * Epilogue::kSmemBytes};
    Ring<kStages> ring;
    Sums<Epilogue::kColumns> sums[1];
    Sums<kSecondColumns> second;
    for (int t = cluster; t < tiles; t += clusters) {
      const Tile tile = epilogue.tile(t, rank);
      int previous = -1;
      const auto add = [&](int count, auto second_b) {
        for (int i = 0; i < count; ++i, ring.next()) {
          mbarrier_wait(full_address + ring.stage * sizeof(uint64_t), ring.phase);
          issue_k_block<Epilogue, Stage, second_b.value>(sums, second, descriptor_a, descriptor_b, ring.stage,
                                                         previous >= 0);
          wgmma_wait<1>();
          if (previous >= 0) release(previous);
          previous = ring.stage;
        }
      };
      const auto add_k_blocks = [&](int count) {
        if constexpr (Epilogue::kSecondB) {
          if (epilogue.has_second_b(tile)) return add(count, std::true_type{});
        }
        add(count, std::false_type{});
      };
      // The epilogue's operands are loaded between two loops: inside a loop every iteration would select
      // their registers.
      const int late = min(tile.k_blocks, kLateBlocks);
      add_k_blocks(tile.k_blocks - late);
      epilogue.prefetch(tile, own_row, lane, smem);
      const typename Epilogue::Operands operands = epilogue.load(tile, own_row, lane);
      add_k_blocks(late);
      wgmma_wait<0>();
      pin<Epilogue::kColumns>(sums[0]);
      if (tile.k_blocks == 0) clear<Epilogue::kColumns>(sums[0]);
      if (previous >= 0) release(previous);
      if constexpr (Epilogue::kSecondB) {
        if (epilogue.has_second_b(tile)) {
          pin<kSecondColumns>(second);
          if (tile.k_blocks == 0) clear<kSecondColumns>(second);
          epilogue.store_second(second, tile, own_row, lane);
        }
      }
      epilogue.store(sums[0], operands, tile, own_row, lane, smem);
    }
    bulk_store_wait();
  }
  // A block must not exit while the other one may still arrive on its mbarriers.
  cluster_arrive();
  cluster_wait();
#endif
}

}  // namespace liger::sm90
