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
// Gradients of matrices (kWeights) sum over the rows of an expert: A and B are MN-major, A is gathered along
// the summed dimension, and the number of k-blocks differs between experts.
#pragma once

#include "experts/sm90/layout.h"
#include "experts/sm90/ptx.cuh"
#include "experts/sm90/schedule.h"
#include "lm_head/sm90/element.cuh"
#include "lm_head/sm90/gemm/pingpong.cuh"

namespace liger::experts {

using sm90::CacheHint;
using sm90::Corner;
using sm90::kBox;
using sm90::kBoxBytes;
using sm90::kCluster;
using sm90::kTileK;
using sm90::Ring;

inline constexpr int kHalves = sm90::kPingpongHalves, kStages = 5;
inline constexpr int kStageBytes = (kRows + kColumns) * kTileK * 2;
template <class Epilogue>
inline constexpr int kGroupedSharedBytes =
    kStages * kStageBytes + 8 * Epilogue::kStagingBytes + sm90::kAlignmentBytes;
static_assert(kRows == sm90::kTileM && kColumns % kCluster == 0);

// Indices of rows, int32 or int64, from 0 to 2^31 - 1: the low word of an int64 is its value.
struct RowIndices {
  const void* indices;
  bool wide;
  __device__ __forceinline__ int operator[](int i) const {
    return __ldg(static_cast<const int*>(indices) + (int64_t{i} << wide));
  }
};

// Operands of a grouped GEMM. B: a matrix per expert, in boxes of kBox elements along its rows in memory.
// K-major: boxes of 96 columns of the tile; MN-major: boxes of 32 of the summed dimension.
struct GroupedMaps {
  CUtensorMap a, b;
};
inline constexpr int kElementBytes = 2, kHalfColumns = kColumns / kCluster, kHalfK = kTileK / kCluster;

struct Groups {
  const int* ends;  // (experts,) the end of the rows of each expert
  int experts;
  int column_tiles;
  int k_blocks, row_tiles;  // k_blocks without, row_tiles with kWeights
  // The first column (row of a K-major B in memory) of each half of a tile is
  // column_tile * column_step + half * half_offset.
  int column_step, half_offset;
};

// The gathered operand A: rows[indices[i]], contiguous, is row i.
template <typename T>
struct GatheredRows {
  const T* rows;
  int columns;  // a multiple of 8
  RowIndices indices;
  // Bytes and factors of 32 bits make it one instruction. column: in row 0.
  __device__ __forceinline__ const unsigned char* at(const unsigned char* column, int row) const {
    return column + uint64_t{static_cast<uint32_t>(row)} *
                        uint64_t{static_cast<uint32_t>(columns) * static_cast<uint32_t>(sizeof(T))};
  }
};

template <class Epilogue>
__device__ __forceinline__ void load_half_b(const GroupedMaps& maps, const Groups& groups,
                                            const ExpertTile& tile, int k, int half, unsigned char* b,
                                            uint64_t* arrived, bool to_cluster) {
  constexpr bool kBMn = Epilogue::kBMn;
  const int column = tile.column_tile * groups.column_step + (kBMn ? 0 : half * groups.half_offset);
  const int matrix = Epilogue::kWeights ? 0 : tile.expert;
  const auto load = [&](unsigned char* to, Corner at) {
    if (to_cluster) {
      sm90::load_box_to_cluster(to, &maps.b, at, arrived, CacheHint::kNormal);
    } else {
      sm90::load_box(to, &maps.b, at, arrived, CacheHint::kNormal);
    }
  };
  if constexpr (kBMn) {
#pragma unroll
    for (int box = 0; box < kColumns / kBox; ++box)
      load(b + box * kBoxBytes + half * kHalfK * kBox * 2, {column + box * kBox, k + half * kHalfK, matrix});
  } else {
    load(b + half * kHalfColumns * kTileK * 2, {k, column, matrix});
  }
}

// One thread calls it: starts the loads of operand B of a stage, and of A unless it is gathered.
template <class Epilogue>
__device__ __forceinline__ void load_stage(const GroupedMaps& maps, const Groups& groups,
                                           const ExpertTile& tile, int k, int rank, unsigned char* stage,
                                           uint64_t* arrived) {
  constexpr int kBytesA = kRows * kTileK * 2;
  const int boxes_a = Epilogue::kGather ? 0 : tile.rows > kBox ? kHalves : 1;
  mbarrier_arrive_expect(arrived, kStageBytes - kBytesA + boxes_a * kBoxBytes);
  if constexpr (!Epilogue::kGather) {
    for (int box = 0; box < boxes_a; ++box)
      sm90::load_box(stage + box * kBoxBytes, &maps.a, {k, tile.first_row + box * kBox, 0}, arrived,
                     CacheHint::kNormal);
  }
  unsigned char* const b = stage + kBytesA;
  if (tile.paired) return load_half_b<Epilogue>(maps, groups, tile, k, rank, b, arrived, true);
#pragma unroll
  for (int half = 0; half < kCluster; ++half)
    load_half_b<Epilogue>(maps, groups, tile, k, half, b, arrived, false);
}

// Sums the units of the experts; first_units has experts + 1 entries. One warp calls it.
__device__ __forceinline__ void sum_units(const Groups& groups, int* first_units, int lane) {
  int before = 0;
  for (int base = 0; base < groups.experts; base += 32) {
    const int e = base + lane;
    int sum = 0;
    if (e < groups.experts)
      sum = units_of(groups.ends[e] - (e > 0 ? groups.ends[e - 1] : 0), groups.column_tiles);
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(0xffffffffu, sum, step);
      if (lane >= step) sum += other;
    }
    if (e < groups.experts) first_units[e + 1] = before + sum;
    before += __shfl_sync(0xffffffffu, sum, 31);
  }
  if (lane == 0) first_units[0] = 0;
}

template <bool kWeights>
__device__ __forceinline__ ExpertTile find_tile(const Groups& groups, const int* first_units, int t,
                                                int rank) {
  const int units = weight_units_of(groups.row_tiles, groups.column_tiles);
  const int e = kWeights ? t / units : expert_of(first_units, groups.experts, t);
  const int begin = e > 0 ? __ldg(groups.ends + e - 1) : 0, end = __ldg(groups.ends + e);
  if constexpr (kWeights) return weight_tile_of(t - e * units, rank, e, begin, end, groups.row_tiles);
  return tile_of(t - first_units[e], rank, e, begin, end, groups.column_tiles);
}

// The share of a warp of the producer: k-blocks of all tiles of a cluster, one in kStep, and in them a part
// of the rows.
template <int kSharing>
struct Share {
  static constexpr int kStep = kGatherWarps / kSharing;
  static_assert(kGatherWarps % kSharing == 0 && kStep <= kStages);
  // Exchanged, so that the compiler knows that the lanes agree: uniform registers hold what follows from it.
  int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x / 32), 0);
  int part = warp % kSharing, block = warp / kSharing, stage = block;  // block: of the tile
  uint32_t phase = 0;

  __device__ __forceinline__ void next() {
    block += kStep, stage += kStep;
    if (stage >= kStages) stage -= kStages, phase ^= 1;
  }
  // One warp starts the TMA loads of a stage, in turns: it needs as long for them as for copies.
  __device__ __forceinline__ bool issues(int lane) const { return lane == 0 && part == stage % kSharing; }
};

// Where a lane of the producer writes its vectors (layout.h): the first row of even i, and of odd i.
struct Destination {
  uint32_t even, odd;
  __device__ __forceinline__ Destination(const unsigned char* ring_memory, int row, int vector)
      : even(shared_address(ring_memory) + box_vector_offset(row, vector)),
        odd(shared_address(ring_memory) + box_vector_offset(row + kGatherRows, vector) - kGatherStep) {}
  __device__ __forceinline__ uint32_t at(int stage, int i) const {
    return (i % 2 == 0 ? even : odd) + stage * kStageBytes + i * kGatherStep;
  }
};

// Copy i of a lane copies from the row whose index this lane or another one of the eight with its rows holds.
template <int kCopies>
struct HeldIndices {
  static constexpr int kHeld = ceil_div(kCopies, 8);
  int indices[kHeld];
  // first: the row of copy 0; rows from `end` on have the index of the row before it.
  __device__ __forceinline__ void load(const RowIndices& all, int first, int end, int vector) {
#pragma unroll
    for (int j = 0; j < kHeld; ++j)
      indices[j] = all[min(first + (vector % kCopies + 8 * j) * kGatherRows, end - 1)];
  }
  __device__ __forceinline__ int of(int i) const {
    return __shfl_sync(0xffffffffu, indices[i / 8], i % 8, 8);
  }
};

// The producer warpgroup of a K-major gathered A.
template <class Epilogue>
__device__ __forceinline__ void gather_rows(const GroupedMaps& maps, const Epilogue& epilogue,
                                            const int* first_units, int units, int cluster, int clusters,
                                            int rank, unsigned char* ring_memory, uint64_t* full,
                                            uint64_t* empty) {
  constexpr int kOwnRows = kRows / kRowSharing, kCopies = kOwnRows / kGatherRows;
  const Groups& groups = epilogue.groups;
  const auto& a = epilogue.a;
  const int lane = threadIdx.x % 32, vector = lane % 8;
  Share<kRowSharing> own;
  const int first = own.part * kOwnRows, row = first + lane / 8;
  const Destination to(ring_memory, row, vector);
  for (int t = cluster; t < units; t += clusters, own.block -= groups.k_blocks) {
    const ExpertTile tile = find_tile<false>(groups, first_units, t, rank);
    HeldIndices<kCopies> rows;
    rows.load(a.indices, tile.first_row + row, tile.first_row + max(tile.rows, 1), vector);
    for (; own.block < groups.k_blocks; own.next()) {
      mbarrier_wait(&empty[own.stage], own.phase ^ 1);
      const int k = own.block * kTileK, column = k + vector * 8;
      if (own.issues(lane))
        load_stage<Epilogue>(maps, groups, tile, k, rank, ring_memory + own.stage * kStageBytes,
                             &full[own.stage]);
      __syncwarp();
      const bool valid = column < a.columns;
      const auto* const source = reinterpret_cast<const unsigned char*>(a.rows + column);
#pragma unroll
      for (int i = 0; i < kCopies; ++i) {
        // No wgmma reads the second half of a tile without rows there.
        if ((i * kGatherRows) % kBox == 0 && first + i * kGatherRows >= kBox && tile.rows <= kBox) break;
        copy_or_zero(to.at(own.stage, i), a.at(source, rows.of(i)), valid);
      }
      copies_arrive(&full[own.stage]);
    }
  }
}

// The same of an MN-major A, gathered along the summed dimension. Rows of other experts in the last k-block
// of an expert may be infinite or NaN, so there B is copied as well, with zeros.
template <class Epilogue>
__device__ __forceinline__ void gather_summed(const GroupedMaps& maps, const Epilogue& epilogue, int units,
                                              int cluster, int clusters, int rank, unsigned char* ring_memory,
                                              uint64_t* full, uint64_t* empty) {
  constexpr int kOwnRows = kTileK / kSummedSharing, kCopies = kOwnRows / kGatherRows;
  const Groups& groups = epilogue.groups;
  const auto& a = epilogue.a;
  const int lane = threadIdx.x % 32, vector = lane % 8;
  Share<kSummedSharing> own;
  const int row = own.part * kOwnRows + lane / 8;
  const Destination to(ring_memory, row, vector);
  for (int t = cluster; t < units; t += clusters) {
    const ExpertTile tile = find_tile<true>(groups, nullptr, t, rank);
    const int end = tile.first_row + tile.rows, column = tile.row_tile * kRows + vector * 8;
    const int k_blocks = ceil_div(tile.rows, kTileK);
    const auto* const source = reinterpret_cast<const unsigned char*>(a.rows + column);
    HeldIndices<kCopies> rows, next;
    if (own.block < k_blocks) next.load(a.indices, tile.first_row + own.block * kTileK + row, end, vector);
    for (; own.block < k_blocks; own.next()) {
      const int k = tile.first_row + own.block * kTileK;
      rows = next;
      next.load(a.indices, k + own.kStep * kTileK + row, end, vector);
      mbarrier_wait(&empty[own.stage], own.phase ^ 1);
      const bool whole = k + kTileK <= end;
      if (own.issues(lane)) {
        if (whole) {
          load_stage<Epilogue>(maps, groups, tile, k, rank, ring_memory + own.stage * kStageBytes,
                               &full[own.stage]);
        } else {
          mbarrier_arrive_expect(&full[own.stage], 0);
        }
      }
      __syncwarp();
      const int left = end - k - row;
#pragma unroll
      for (int i = 0; i < kCopies; ++i) {
        const auto* const from = a.at(source, rows.of(i));
#pragma unroll
        for (int box = 0; box < kHalves; ++box)
          copy_or_zero(to.at(own.stage, i) + box * kBoxBytes, from + box * kBox * kElementBytes,
                       i * kGatherRows < left && column + box * kBox < a.columns);
      }
      if (!whole) {
        const int b_column = tile.column_tile * kColumns + vector * 8;
        const auto* from = epilogue.b + int64_t{k + row} * epilogue.columns + b_column;
#pragma unroll 1
        for (int i = 0; i < kCopies; ++i, from += int64_t{kGatherRows} * epilogue.columns) {
#pragma unroll
          for (int box = 0; box < kColumns / kBox; ++box)
            copy_or_zero(to.at(own.stage, i) + (kHalves + box) * kBoxBytes, from + box * kBox,
                         i * kGatherRows < left && b_column + box * kBox < epilogue.columns);
        }
      }
      copies_arrive(&full[own.stage]);
    }
    own.block -= k_blocks;
  }
}

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
//   static constexpr bool kGather        A is gathered; then GatheredRows<Element> a is a member
//   static constexpr bool kBMn           B is MN-major
//   static constexpr bool kWeights       gradients of matrices: gathered A, MN-major operands; B is
//                                        (rows, int columns), contiguous, and `b` points to it
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
  constexpr bool kWeights = Epilogue::kWeights;
  constexpr int kCopying = !Epilogue::kGather ? 0 : 32 * (kWeights ? kSummedSharing : kRowSharing);
  __shared__ int first_units[kWeights ? 1 : kMaxExperts + 1];
  unsigned char* const ring_memory = sm90::aligned_ring(shared_memory);
  const int warpgroup = threadIdx.x / 128, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int rank = blockIdx.x % kCluster, cluster = blockIdx.x / kCluster, clusters = gridDim.x / kCluster;
  const Groups& groups = epilogue.groups;

  if (threadIdx.x == 0) {
    if constexpr (!Epilogue::kGather) sm90::prefetch_map(&maps.a);
    sm90::prefetch_map(&maps.b);
    for (int i = 0; i < kStages; ++i) {
      // Gathered rows: each lane of the producer's warps signals its own copies.
      sm90::barrier_init(&full[i], kCopying + 1);
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
    // Named barriers 1 and 2: warpgroup 0 or 1 may begin its mainloop.
    const auto await_turn = [&] { named_barrier_sync(1 + group); };
    const auto pass_turn = [&] { named_barrier_arrive(2 - group); };
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
          if constexpr (Epilogue::kGather) async_fence();
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
