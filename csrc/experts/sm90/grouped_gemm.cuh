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

// True for the thread that starts the TMA loads of a stage. The warps of the producer take turns: a warp
// needs as long for them as for its copies.
__device__ __forceinline__ bool issues(int stage) {
  return threadIdx.x == stage % (kGatherThreads / 32) * 32;
}

// The producer warpgroup of a K-major gathered A.
template <class Epilogue>
__device__ __forceinline__ void gather_rows(const GroupedMaps& maps, const Epilogue& epilogue,
                                            const int* first_units, int units, int cluster, int clusters,
                                            int rank, unsigned char* ring_memory, uint64_t* full,
                                            uint64_t* empty) {
  const Groups& groups = epilogue.groups;
  const auto& a = epilogue.a;
  const int vector = threadIdx.x % 8, row = threadIdx.x / 8;
  const uint32_t destination = shared_address(ring_memory) + box_vector_offset(row, vector);
  const auto* const source = reinterpret_cast<const unsigned char*>(a.rows);
  Ring<kStages> ring;
  for (int t = cluster; t < units; t += clusters) {
    const ExpertTile tile = find_tile<false>(groups, first_units, t, rank);
    int rows[kRows / kGatherRows];
#pragma unroll
    for (int i = 0; i < kRows / kGatherRows; ++i)
      rows[i] = a.indices[tile.first_row + min(row + i * kGatherRows, max(tile.rows, 1) - 1)];
    for (int block = 0; block < groups.k_blocks; ++block, ring.next()) {
      mbarrier_wait(&empty[ring.stage], ring.phase ^ 1);
      const int k = block * kTileK, column = k + vector * 8;
      if (issues(ring.stage))
        load_stage<Epilogue>(maps, groups, tile, k, rank, ring_memory + ring.stage * kStageBytes,
                             &full[ring.stage]);
      const bool valid = column < a.columns;
      const uint32_t to = destination + ring.stage * kStageBytes;
#pragma unroll
      for (int i = 0; i < kRows / kGatherRows; ++i)
        copy_or_zero(to + i * kGatherStep, a.at(source + column * kElementBytes, rows[i]),
                     valid && (i * kGatherRows < kBox || tile.rows > kBox));
      copies_arrive(&full[ring.stage]);
    }
  }
}

// Rows from k to `end` of a k-block of B, then zeros.
template <class Epilogue>
__device__ __forceinline__ void copy_rows_of_b(const Epilogue& epilogue, const ExpertTile& tile, int k,
                                               int end, int row, int vector, uint32_t to) {
#pragma unroll
  for (int box = 0; box < kColumns / kBox; ++box) {
    const int column = tile.column_tile * kColumns + box * kBox + vector * 8;
#pragma unroll
    for (int i = 0; i < kTileK / kGatherRows; ++i) {
      const int at = k + row + i * kGatherRows;
      const bool valid = column < epilogue.columns && at < end;
      copy_or_zero(to + box * kBoxBytes + i * kGatherStep,
                   epilogue.b + (valid ? int64_t{at} * epilogue.columns + column : 0), valid);
    }
  }
}

// The same of an MN-major A, gathered along the summed dimension. Rows of other experts in the last k-block
// of an expert may be infinite or NaN, so there B is copied as well, with zeros.
//
// The producer has about 1000 cycles per k-block, and loads of indices take as long. So the eight threads
// that copy the vectors of a row load one index each for two k-blocks, two k-blocks ahead, and exchange them.
template <class Epilogue>
__device__ __forceinline__ void gather_summed(const GroupedMaps& maps, const Epilogue& epilogue, int units,
                                              int cluster, int clusters, int rank, unsigned char* ring_memory,
                                              uint64_t* full, uint64_t* empty) {
  constexpr int kOwn = kTileK / kGatherRows;  // rows of a thread in a box
  static_assert(2 * kOwn == 8);
  const Groups& groups = epilogue.groups;
  const auto& a = epilogue.a;
  const int vector = threadIdx.x % 8, row = threadIdx.x / 8;
  const uint32_t destination = shared_address(ring_memory) + box_vector_offset(row, vector);
  Ring<kStages> ring;
  for (int t = cluster; t < units; t += clusters) {
    const ExpertTile tile = find_tile<true>(groups, nullptr, t, rank);
    const int end = tile.first_row + tile.rows, column = tile.row_tile * kRows + vector * 8;
    const auto* const source = reinterpret_cast<const unsigned char*>(a.rows + column);
    const auto load_index = [&](int k) { return a.indices[min(k + row + vector * kGatherRows, end - 1)]; };
    int next = tile.rows > 0 ? load_index(tile.first_row) : 0;
    for (int pair = tile.first_row; pair < end; pair += 2 * kTileK) {
      const int index = next;
      next = load_index(pair + 2 * kTileK);
#pragma unroll
      for (int second = 0; second < 2; ++second) {
        const int k = pair + second * kTileK;
        if (k >= end) break;
        int rows[kOwn];
#pragma unroll
        for (int i = 0; i < kOwn; ++i) rows[i] = __shfl_sync(0xffffffffu, index, second * kOwn + i, 8);
        mbarrier_wait(&empty[ring.stage], ring.phase ^ 1);
        const bool whole = k + kTileK <= end;
        if (issues(ring.stage)) {
          if (whole) {
            load_stage<Epilogue>(maps, groups, tile, k, rank, ring_memory + ring.stage * kStageBytes,
                                 &full[ring.stage]);
          } else {
            mbarrier_arrive_expect(&full[ring.stage], 0);
          }
        }
        const uint32_t to = destination + ring.stage * kStageBytes;
#pragma unroll
        for (int i = 0; i < kOwn; ++i) {
          const bool valid = k + row + i * kGatherRows < end;
#pragma unroll
          for (int box = 0; box < kHalves; ++box)
            copy_or_zero(to + box * kBoxBytes + i * kGatherStep,
                         a.at(source, rows[i]) + box * kBox * kElementBytes,
                         valid && column + box * kBox < a.columns);
        }
        if (!whole) copy_rows_of_b(epilogue, tile, k, end, row, vector, to + kHalves * kBoxBytes);
        copies_arrive(&full[ring.stage]);
        ring.next();
      }
    }
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
//   void start(Sums<kColumns> (&sums)[kHalves], ExpertTile, int lane) const
//       sets the accumulators, while the other warpgroup computes
//   static constexpr int kStagingBytes   shared memory of a warp for store(): staging is its address
//   void store(Sums<kColumns>& sums, ExpertTile, int row, int lane, uint32_t staging) const
//       row: the first of the 16 rows of the tile that belong to this warp; called for each half with rows
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
  __shared__ int first_units[kWeights ? 1 : kMaxExperts + 1];
  unsigned char* const ring_memory = sm90::aligned_ring(shared_memory);
  const int warpgroup = threadIdx.x / 128, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int rank = blockIdx.x % kCluster, cluster = blockIdx.x / kCluster, clusters = gridDim.x / kCluster;
  const Groups& groups = epilogue.groups;

  if (threadIdx.x == 0) {
    if constexpr (!Epilogue::kGather) sm90::prefetch_map(&maps.a);
    sm90::prefetch_map(&maps.b);
    for (int i = 0; i < kStages; ++i) {
      // Gathered rows: each thread of the producer signals its own copies.
      sm90::barrier_init(&full[i], Epilogue::kGather ? kGatherThreads + 1 : 1);
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
    const int group = warpgroup - 1;
    const uint32_t descriptor_a = sm90::descriptor_low(ring_memory),
                   descriptor_b = sm90::descriptor_low(ring_memory + kRows * kTileK * 2);
    const uint32_t full_address = shared_address(full);
    const bool releases = threadIdx.x % 128 < kCluster;
    const uint32_t empty_address = sm90::cluster_address(empty, releases ? threadIdx.x % 128 : 0);
    const auto release = [&](int stage) {
      if (releases) sm90::cluster_barrier_arrive(empty_address + stage * sizeof(uint64_t));
    };
    const int own_row = warp % 4 * 16;
    const uint32_t staging =
        shared_address(ring_memory) + kStages * kStageBytes + (warp - 4) * Epilogue::kStagingBytes;
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
      epilogue.start(sums, tile, lane);
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
