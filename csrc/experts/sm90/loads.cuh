// SPDX-License-Identifier: BSD-3-Clause

// The loads of the grouped GEMM (grouped_gemm.cuh): operands, TMA boxes, and the producer warpgroup that
// gathers rows of A.
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
  constexpr bool kWeights = Epilogue::kWeights;
  const int boxes_a = Epilogue::kGather ? 0 : kWeights || tile.rows > kBox ? kHalves : 1;
  mbarrier_arrive_expect(arrived, kStageBytes - kBytesA + boxes_a * kBoxBytes);
  if constexpr (!Epilogue::kGather) {
    for (int box = 0; box < boxes_a; ++box) {
      const Corner at = kWeights ? Corner{tile.row_tile * kRows + box * kBox, k, 0}
                                 : Corner{k, tile.first_row + box * kBox, 0};
      sm90::load_box(stage + box * kBoxBytes, &maps.a, at, arrived, CacheHint::kNormal);
    }
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
  constexpr int kOwnRows = kRows / Epilogue::kSharing, kCopies = kOwnRows / kGatherRows;
  const Groups& groups = epilogue.groups;
  const auto& a = epilogue.a;
  const int lane = threadIdx.x % 32, vector = lane % 8;
  Share<Epilogue::kSharing> own;
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

// The same of an MN-major A, gathered along the summed dimension; without kGather only the last k-block of an
// expert is copied. Rows of other experts in that k-block may be infinite or NaN, so there B is copied as
// well, with zeros.
template <class Epilogue>
__device__ __forceinline__ void gather_summed(const GroupedMaps& maps, const Epilogue& epilogue, int units,
                                              int cluster, int clusters, int rank, unsigned char* ring_memory,
                                              uint64_t* full, uint64_t* empty) {
  constexpr int kOwnRows = kTileK / Epilogue::kSharing, kCopies = kOwnRows / kGatherRows;
  const Groups& groups = epilogue.groups;
  const auto& a = epilogue.a;
  const int lane = threadIdx.x % 32, vector = lane % 8;
  Share<Epilogue::kSharing> own;
  const int row = own.part * kOwnRows + lane / 8;
  const Destination to(ring_memory, row, vector);
  for (int t = cluster; t < units; t += clusters) {
    const ExpertTile tile = find_tile<true>(groups, nullptr, t, rank);
    const int end = tile.first_row + tile.rows, column = tile.row_tile * kRows + vector * 8;
    const int k_blocks = ceil_div(tile.rows, kTileK);
    const auto* const source = reinterpret_cast<const unsigned char*>(a.rows + column);
    HeldIndices<kCopies> rows, next;
    if (Epilogue::kGather && own.block < k_blocks)
      next.load(a.indices, tile.first_row + own.block * kTileK + row, end, vector);
    for (; own.block < k_blocks; own.next()) {
      const int k = tile.first_row + own.block * kTileK;
      if constexpr (Epilogue::kGather) {
        rows = next;
        next.load(a.indices, k + own.kStep * kTileK + row, end, vector);
      }
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
      if (Epilogue::kGather || !whole) {
#pragma unroll
        for (int i = 0; i < kCopies; ++i) {
          const auto* const from = a.at(source, Epilogue::kGather ? rows.of(i) : k + row + i * kGatherRows);
#pragma unroll
          for (int box = 0; box < kHalves; ++box)
            copy_or_zero(to.at(own.stage, i) + box * kBoxBytes, from + box * kBox * kElementBytes,
                         i * kGatherRows < left && column + box * kBox < a.columns);
        }
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

}  // namespace liger::experts
