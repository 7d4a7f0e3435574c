// SPDX-License-Identifier: BSD-3-Clause

// The grouped GEMM of the experts: rows sorted by expert times the matrix of each expert (sm_90a only).
//
// The schedule is the ping-pong of lm_head/sm90/gemm/pingpong.cuh, with tiles of 128 x 192 per warpgroup,
// clusters of two blocks and persistent blocks, with three differences:
//
// - Units of work are cut from `ends` on the device (schedule.h): every block sums the units of experts in
//   its own shared memory, so the host reads nothing and no other kernel runs first.
// - With kGather the producer warpgroup copies rows of A by their indices, with cp.async: TMA of compute
//   capability 9.0 has no gather, and bulk copies of single rows cannot swizzle. Copies that have landed
//   signal their stage. Consumers fence them for wgmma: a fence of the producer would wait for all of its
//   copies, also of later stages.
// - A tile with up to 64 rows issues the wgmmas of its first half alone.
//
// Gradients of matrices (kWeights) sum over the rows of an expert: A and B are MN-major, kGather gathers
// along the summed dimension, and the number of k-blocks differs between experts.
#pragma once

#include "experts/sm90/loads.cuh"

namespace liger::experts {

#ifdef LIGER_SM90A
// Sets the accumulators of all rows to a bias, or to 0. first: the column in `bias` of the first column of
// each half of the tile; columns from `end` on are 0.
template <typename T>
__device__ __forceinline__ void start_with_bias(sm90::Sums<kColumns> (&sums)[kHalves], const T* bias,
                                                const int (&first)[2], const int (&end)[2], int lane) {
#pragma unroll
  for (int j = 0; j < kColumns / 8; ++j) {
    const int half = j / (kColumns / 16), column = first[half] + j % (kColumns / 16) * 8 + 2 * (lane % 4);
    const bool has = bias != nullptr && column < end[half];
    const uint32_t word = has ? __ldg(reinterpret_cast<const uint32_t*>(bias + column)) : 0;
    const float pair[2] = {lm_head::low_of<T>(word), lm_head::high_of<T>(word)};
#pragma unroll
    for (int i = 0; i < 4 * kHalves; ++i) set_sum(sums[i / 4][4 * j + i % 4], pair[i % 2]);
  }
}

// An Epilogue defines:
//   using Element                        the type of the operands, __nv_bfloat16 or __half
//   static constexpr bool kGather        A is gathered, else loaded by TMA
//   GatheredRows<Element> a              with kGather or kWeights
//   static constexpr int kSharing        then: the warps that fill a stage together; with fewer of them more
//                                        stages are filled at a time, and a stage costs fewer instructions,
//                                        but takes longer
//   static constexpr bool kBMn           B is MN-major
//   static constexpr bool kWeights       gradients of matrices: MN-major operands; B is (rows, int columns),
//                                        contiguous, and `b` points to it
//   Groups groups
//   static constexpr int kStagingBytes   shared memory of a warp: staging is its address
//   void start(Sums<kColumns> (&sums)[kHalves], ExpertTile, int row, int lane, uint32_t staging) const
//       sets the accumulators, while the other warpgroup computes
//   void store(Sums<kColumns>& sums, ExpertTile, int row, int lane, uint32_t staging) const
//       row: the first of the 16 rows of a half that belong to this warp; called for each half with rows
template <class Epilogue>
struct IssueOf : Epilogue {
  static constexpr bool kAMn = Epilogue::kWeights;
  static constexpr int kColumns = experts::kColumns;
};
struct GroupedStage {
  static constexpr int kBytes = kStageBytes;
};
#endif

template <class Epilogue>
__global__ void __launch_bounds__(sm90::kThreads, 1)
    grouped_gemm_kernel(const __grid_constant__ GroupedMaps maps, const __grid_constant__ Epilogue epilogue) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ unsigned char shared_memory[];
  __shared__ uint64_t full[kStages], empty[kStages];
  constexpr bool kWeights = Epilogue::kWeights, kCopies = Epilogue::kGather || kWeights;
  __shared__ int first_units[kWeights ? 1 : kMaxExperts + 1];
  unsigned char* const ring_memory = sm90::aligned_ring(shared_memory);
  const int warpgroup = threadIdx.x / 128, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int rank = blockIdx.x % kCluster, cluster = blockIdx.x / kCluster, clusters = gridDim.x / kCluster;
  const Groups& groups = epilogue.groups;

  if (threadIdx.x == 0) {
    if constexpr (!Epilogue::kGather) sm90::prefetch_map(&maps.a);
    sm90::prefetch_map(&maps.b);
    int copying = 0;
    if constexpr (kCopies) copying = 32 * Epilogue::kSharing;
    for (int i = 0; i < kStages; ++i) {
      // Gathered rows: each lane of the producer's warps signals its own copies.
      sm90::barrier_init(&full[i], copying + 1);
      // One warpgroup of each block of the cluster releases a stage.
      sm90::barrier_init(&empty[i], kCluster);
    }
    mbarrier_init_fence();
  }
  if (!kWeights && warp == 1) sum_units(groups, first_units, lane);
  cluster_arrive();
  cluster_wait();
  const int units = kWeights ? groups.experts * weight_units_of(groups.row_tiles, groups.column_tiles)
                             : first_units[groups.experts];

  if (warpgroup == 0) {
    give_registers();
    if constexpr (kWeights) {
      gather_summed(maps, epilogue, units, cluster, clusters, rank, ring_memory, full, empty);
    } else if constexpr (Epilogue::kGather) {
      gather_rows(maps, epilogue, first_units, units, cluster, clusters, rank, ring_memory, full, empty);
    } else if (warp == 0) {
      Ring<kStages> ring;
      for (int t = cluster; t < units; t += clusters) {
        const ExpertTile tile = find_tile<false>(groups, first_units, t, rank);
        if (lane == 0) {
          for (int block = 0; block < groups.k_blocks; ++block, ring.next()) {
            mbarrier_wait(&empty[ring.stage], ring.phase ^ 1);
            load_stage<Epilogue>(maps, groups, tile, block * kTileK, rank,
                                 ring_memory + ring.stage * kStageBytes, &full[ring.stage]);
          }
        }
        __syncwarp();
      }
    }
  } else {
    take_registers();
    // Exchanged as in Share; not for the producer above, whose conditional TMA loads nvcc 13.0 would then
    // miscompile: with a uniform tile it sets their coordinates under a stale predicate.
    const int own_warp = __shfl_sync(0xffffffffu, warp, 0), group = own_warp / 4 - 1;
    const uint32_t descriptor_a = sm90::descriptor_low(ring_memory),
                   descriptor_b = sm90::descriptor_low(ring_memory + kRows * kTileK * 2);
    const uint32_t full_address = shared_address(full);
    const bool releases = threadIdx.x % 128 < kCluster;
    const uint32_t empty_address = sm90::cluster_address(empty, releases ? threadIdx.x % 128 : 0);
    const auto release = [&](int stage) {
      if (releases) sm90::cluster_barrier_arrive(empty_address + stage * sizeof(uint64_t));
    };
    const int own_row = own_warp % 4 * 16;
    const uint32_t staging =
        shared_address(ring_memory) + kStages * kStageBytes + (own_warp - 4) * Epilogue::kStagingBytes;
    Ring<kStages> ring;
    // Named barriers 1 and 2: warpgroup 0 or 1 may begin its mainloop. One warpgroup waits, the other does
    // not.
    constexpr int kTurnThreads = 2 * 128;
    const auto await_turn = [&] { sync_threads(1 + group, kTurnThreads); };
    const auto pass_turn = [&] { arrive_threads(2 - group, kTurnThreads); };
    const auto k_blocks_of = [&](const ExpertTile& tile) {
      return kWeights ? ceil_div(tile.rows, kTileK) : groups.k_blocks;
    };
    // Skips the stages of tile t, which the other warpgroup computes.
    const auto skip = [&](int t) {
      int count = groups.k_blocks;
      if constexpr (kWeights) count = k_blocks_of(find_tile<true>(groups, first_units, t, rank));
      const int at = ring.stage + count;
      ring.phase ^= at / kStages & 1;
      ring.stage = at % kStages;
    };
    int t = cluster + group * clusters;
    if (group == 1 && t < units) skip(cluster);
    for (; t < units; t += 2 * clusters) {
      const ExpertTile tile = find_tile<kWeights>(groups, first_units, t, rank);
      const int k_blocks = k_blocks_of(tile);
      int rows_left = tile.rows;
      if constexpr (kWeights) rows_left = epilogue.rows_left(tile);
      sm90::Sums<kColumns> sums[kHalves];
      sm90::Sums<sm90::kSecondColumns> none;
      // As in gemm_kernel_pingpong: the first wgmma adds, else the accumulators are kept through the
      // epilogue.
      epilogue.start(sums, tile, own_row, lane, staging);
      int previous = -1;
      const auto multiply = [&](auto halves) __attribute__((always_inline)) {
        for (int i = 0; i < k_blocks; ++i, ring.next()) {
          mbarrier_wait(full_address + ring.stage * sizeof(uint64_t), ring.phase);
          if constexpr (kCopies) async_fence();
          sm90::issue_k_block<IssueOf<Epilogue>, GroupedStage, false, halves.value>(
              sums, none, descriptor_a, descriptor_b, ring.stage, true);
          sm90::wgmma_wait<1>();
          if (previous >= 0) release(previous);
          previous = ring.stage;
        }
      };
      if (t != cluster) await_turn();
      if (rows_left > kBox) {
        multiply(std::integral_constant<int, kHalves>{});
      } else {
        multiply(std::integral_constant<int, 1>{});
      }
      if (t + clusters < units) pass_turn();
      sm90::wgmma_wait<0>();
      for (auto& half : sums) sm90::pin<kColumns>(half);
      if (previous >= 0) release(previous);
      // The halves share code, which would else be up to 150 KB and miss in the instruction cache.
#pragma unroll 1
      for (int first = 0; first < min(rows_left, kRows); first += kBox) {
        epilogue.store(sums[0], tile, own_row + first, lane, staging);
#pragma unroll
        for (int i = 0; i < kColumns / 2; ++i) sums[0][i] = sums[1][i];
      }
      if (t + 2 * clusters < units) skip(t + clusters);
    }
  }
  // A block must not exit while the other one may still arrive on its mbarriers.
  cluster_arrive();
  cluster_wait();
#endif
}

}  // namespace liger::experts
