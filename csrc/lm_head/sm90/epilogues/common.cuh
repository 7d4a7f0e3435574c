// SPDX-License-Identifier: BSD-3-Clause

// Parts that the epilogues of a chunk's three GEMMs share. Each epilogue saves a pass over memory:
//
// - ExpEpilogue (exponentials.cuh): exp(input @ weight.T - reference), and sums per row and tile.
// - GradInputEpilogue (grad_input.cuh): (exponentials @ weight) * scale of the row.
// - GradWeightEpilogue (grad_weight.cuh): exponentials.T @ (scale * input), accumulated over chunks in the
//   memory of the 16-bit result as block-scaled fp16.
//
// Between the GEMMs apply_rule (rows/apply_rule.cuh) turns sums into losses and scales. The softmax is never
// normalised in memory, and the logits are never stored. While a model is untrained, the one-hot term is most
// of the gradient. Rounding it to bf16 with the exponentials would lose accuracy, so both gradient epilogues
// add it in float32 from rows of weight and input.
#pragma once

#include "device/integers.h"
#include "device/quad.cuh"
#include "lm_head/sm90/element.cuh"
#include "lm_head/sm90/epilogues/logit_terms.cuh"
#include "lm_head/sm90/gemm/gemm.cuh"

namespace liger::lm_head {

// Threads per block of the kernels on rows between the GEMMs.
inline constexpr int kRowThreads = 256;

using sm90::CacheHint;
using sm90::Tile;

// The exponentials of a chunk: column panels of 128 classes, each with contiguous rows, in up to two buffers.
// A panel has the size of the 128 rows of the weight gradient for its classes. The first chunk can therefore
// use the memory of the weight gradient, which is written after the panels are read.
struct Panels {
  Element16* memory[2];
  int64_t stride[2];  // elements from one panel to the next
  int rows_in_first;  // a multiple of 128

  __device__ __forceinline__ Element16* row_at(int row, int column) const {
    const bool second = row >= rows_in_first;
    return memory[second] + int64_t{column / sm90::kPanel} * stride[second] +
           int64_t{row - (second ? rows_in_first : 0)} * sm90::kPanel;
  }
  __device__ __forceinline__ Element16* at(int row, int column) const {
    return row_at(row, column) + swizzle(row, column % sm90::kPanel);
  }
  // The column within a row after the 128-byte swizzle, so that panels and shared memory have the same
  // layout.
  static __device__ __forceinline__ int swizzle(int row, int column) {
    return (column & 64) + (((column >> 3) ^ row) & 7) * 8 + (column & 7);
  }
};

// Tile rasterisation over a grid of `wide` x `length` tiles for L2 reuse: active clusters work on groups of
// kGroupM tiles across and about as many along, at the same k. Each step along begins with another tile
// across. Otherwise, if the number of clusters is a multiple of the tiles across, some clusters would have
// only narrow tiles, run ahead, and read from DRAM data that other clusters read again later.
inline constexpr int kGroupM = 8;
struct TileIndex {
  int across, along;
};
__device__ __forceinline__ TileIndex swizzled_tile(int t, int wide, int length, int group = kGroupM) {
  const int first = t / (group * length) * group;
  const int width = min(group, wide - first), within = t - first * length;
  const int along = within / width;
  return {first + (within + along) % width, along};
}

// The number of valid rows in this chunk, which only the device knows.
struct ChunkRows {
  const int* count;  // of the whole batch
  int first, rows;   // of the chunk; rows is an upper bound
  __device__ __forceinline__ int operator()() const { return max(0, min(rows, *count - first)); }
};

// The one-hot term of the gradient.
struct OneHot {
  float amount;
  int index;  // the class of a row, or the row of a class; -1: no term
};
static_assert(sizeof(OneHot) == 8);

// Number of columns of a gradient tile: a multiple of 16, less than kColumns only with kPartialTiles.
template <bool kPartialTiles, int kColumns>
struct TileWidth {
  int columns;
  __device__ __forceinline__ TileWidth(const Tile& tile, int hidden)
      : columns(kPartialTiles ? min(kColumns, hidden - tile.n0) : kColumns) {}
  __device__ __forceinline__ bool has(int column) const {
    return column < (kPartialTiles ? columns : kColumns);
  }
};

// Number of loads in flight in subtract_row(), limited by registers.
template <int kColumns>
inline constexpr int kRowLoads = kColumns <= 256 ? kColumns / 8 : kColumns / 16;

// sums of row h -= amount * from[0..width - 1], for the columns of this lane; kBatch loads, of a register
// each, are in flight.
template <int kBatch, typename T, bool kPartialTiles, int kColumns>
__device__ __forceinline__ void subtract_row(sm90::Sums<kColumns>& sums, int h, float amount, const T* from,
                                             int lane, TileWidth<kPartialTiles, kColumns> width) {
  const uint32_t* const pairs = reinterpret_cast<const uint32_t*>(from) + lane % 4;
  static_assert(kColumns / 8 % kBatch == 0);
#pragma unroll
  for (int first = 0; first < kColumns / 8; first += kBatch) {
    uint32_t words[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i)
      words[i] = width.has(8 * (first + i)) ? __ldg(pairs + 4 * (first + i)) : 0;
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int j = first + i;
      float &low = sums[4 * j + 2 * h], &high = sums[4 * j + 2 * h + 1];
      low = fmaf(-amount, low_of<T>(words[i]), low);
      high = fmaf(-amount, high_of<T>(words[i]), high);
    }
  }
}

// sums of row h -= amount * vector[0..kColumns - 1], for the columns of this lane.
template <int kColumns>
__device__ __forceinline__ void subtract_rank_one(sm90::Sums<kColumns>& sums, int h, float amount,
                                                  const float* vector, int lane) {
  const float2* const pairs = reinterpret_cast<const float2*>(vector) + lane % 4;
#pragma unroll
  for (int j = 0; j < kColumns / 8; ++j) {
    const float2 v = __ldg(pairs + 4 * j);
    float &low = sums[4 * j + 2 * h], &high = sums[4 * j + 2 * h + 1];
    low = fmaf(-amount, v.x, low), high = fmaf(-amount, v.y, high);
  }
}

// Rounds a warp's accumulators to T and stores the first `count` of its 16 rows: 64 bytes of 8 rows at a
// time. (Longer segments of fewer rows, staged in shared memory, were slower.)
template <typename T, bool kPartialTiles, int kColumns>
__device__ __forceinline__ void write_rows(const sm90::Sums<kColumns>& sums, T* out, int64_t stride,
                                           int count, int lane, TileWidth<kPartialTiles, kColumns> width) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int row = lane / 4 + 8 * h;
    T* const at = out + row * stride + lane % 4 * 8;
#pragma unroll
    for (int i = 0; i < (kColumns + 31) / 32; ++i) {
      uint32_t w[4] = {};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (32 * i + 8 * j < kColumns)
          w[j] = pack_pair<T>(sums[16 * i + 4 * j + 2 * h], sums[16 * i + 4 * j + 2 * h + 1]);
      }
      transpose_quad(w, lane);
      if (row < count && width.has(32 * i + lane % 4 * 8))
        *reinterpret_cast<uint4*>(at + 32 * i) = make_uint4(w[0], w[1], w[2], w[3]);
    }
  }
}

// Adapts an epilogue to a row-major operand A (instead of panels).
template <class Epilogue>
struct OfMatrix : Epilogue {
  static constexpr bool kPanels = false;
};

}  // namespace liger::lm_head
