// SPDX-License-Identifier: BSD-3-Clause

// The epilogue of the weight gradient, which accumulates over chunks in its own memory.
#pragma once

#include <cuda_fp16.h>

#include "device/fast_divide.h"
#include "lm_head/sm90/epilogues/grad_bias.cuh"

namespace liger::lm_head {

// Between chunks dW accumulates in place, in the 16 bits of each bf16 result, as block-scaled fp16: the
// elements of a row in a tile share one power-of-two scale. Each chunk rounds the sum to 11 bits, 8 times
// finer than bf16, so the result is as exact as a float32 sum that is rounded at the end. Scales are per row,
// because classes differ by orders of magnitude in probability while the elements of one row do not.
//
// The order of the partial sums is private: a warp owns the memory of 16 rows of its tile, and segment s of
// it holds accumulators 8s to 8s + 7 of all lanes, so that accesses are coalesced. The last chunk rounds to
// bf16 and writes row-major.
//
// float16: the rows of the input were multiplied by the scale and by 2^unit_exponent(); store() divides by
// that power of two.
//
// With kBias, tiles of the first columns also multiply by the scales of the rows, which gives the gradient of
// the bias: a product with 8 columns instead of a pass over the exponentials.
template <typename T, bool kPartialTiles, int kTileColumns, bool kBias = false>
struct GradWeightEpilogue {
  using Element = T;
  static constexpr bool kAMn = true, kBMn = true, kPanels = true, kSecondB = kBias;
  static constexpr int kColumns = kTileColumns;
  static constexpr CacheHint kHintA = CacheHint::kNormal, kHintB = CacheHint::kEvictLast,
                             kHintSums = CacheHint::kNormal;
  // Segments per warp; the first kEarly are loaded to registers, the others to shared memory.
  static constexpr int kSegments = kColumns / 16, kEarly = kBias ? 10 : 8;
  static constexpr int kSmemBytes = (kSegments - kEarly) * 32 * sizeof(uint4);
  struct Operands {
    uint4 partial[kEarly];
    float block_scale[2];  // of the two rows of this lane
    OneHot one_hot[2];
  };
  ChunkRows chunk;
  int vocab, hidden;
  int rows_in_first;      // of the panels
  const OneHot* one_hot;  // per class
  const T* input;         // of the batch, unscaled
  int64_t input_stride;
  T* out;                          // (vocab, hidden), contiguous
  unsigned char* scale_exponents;  // biased exponents: per tile of rows and columns, one for each of 128 rows
  int64_t scale_stride;            // from one tile of rows to the next
  bool first, last;                // chunk
  // Per panel the number of column tiles that have read it, initially zero. Null unless this GEMM writes the
  // memory of the exponentials, which are stored `panel_offset` panels further.
  int* panel_read_counts;
  int panel_offset;
  // Column tiles per group of the rasterisation: L2 keeps their input rows while all classes pass. All column
  // tiles if tiles wait for panel reads.
  int group;
  // Divides by the number of 16-byte vectors of a row in the last column tile, if that tile is partial.
  FastDivide last_vectors;
  RankOneTerm smoothing;
  const uint32_t* largest_scaled;  // RangeRows::largest_scaled, with kSmallRange
  GradBias<T> bias;                // with kBias
  CUtensorMap second_b;            // written by split_scales(), with kBias

  __device__ __forceinline__ int columns() const {
    return kPartialTiles ? ceil_div(hidden, kColumns) : hidden / kColumns;
  }
  __device__ __forceinline__ int row_pairs() const { return ceil_div(vocab, sm90::kCluster * sm90::kTileM); }
  __device__ __forceinline__ int tiles() const {
    // Without valid rows the first chunk still writes zeros, and the last chunk the result.
    if (chunk() == 0 && !first && !last) return 0;
    return row_pairs() * columns();
  }
  __device__ __forceinline__ Tile tile(int t, int rank) const {
    const TileIndex at = swizzled_tile(t, columns(), row_pairs(), group);
    return {(at.along * sm90::kCluster + rank) * sm90::kTileM, at.across * kColumns, 0,
            ceil_div(chunk(), sm90::kTileK), 0};
  }

  __device__ __forceinline__ bool has_second_b(const Tile& tile) const { return tile.n0 == 0; }
  __device__ __forceinline__ void store_second(const sm90::Sums<sm90::kSecondColumns>& sums, const Tile& tile,
                                               int row, int lane) const {
    const float coefficient =
        bias.sum_of_smoothing(lane, 32, [](float sum) { return warp_reduce<Sum>(sum); });
    // Only lanes with columns 0 and 1, the scale and its remainder, continue.
    if (lane % 4 != 0) return;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int column = tile.m0 + row + lane / 4 + 8 * h;
      if (column < vocab) bias.add(column, sums[2 * h] + sums[2 * h + 1], coefficient);
    }
  }

  __device__ __forceinline__ void prefetch(const Tile& tile, int row, int lane,
                                           const sm90::EpilogueSmem& smem) const {
    if (first || tile.m0 + row >= vocab) return;
    uint4* const to = reinterpret_cast<uint4*>(smem.memory) + lane;
    by_width(tile, [&](auto partial) {
      const auto from = segments<partial.value>(tile, row, lane);
#pragma unroll
      for (int i = kEarly; i < kSegments; ++i) {
        if (from.has(i)) sm90::copy_async(to + (i - kEarly) * 32, from.at(i), kHintSums);
      }
    });
  }
  __device__ __forceinline__ Operands load(const Tile& tile, int row, int lane) const {
    Operands e{};
    if (tile.m0 + row >= vocab) return e;
#pragma unroll
    for (int h = 0; h < 2; ++h) e.one_hot[h] = one_hot[tile.m0 + row + lane / 4 + 8 * h];
    if (first) return e;
    by_width(tile, [&](auto partial) {
      const auto from = segments<partial.value>(tile, row, lane);
#pragma unroll
      for (int i = 0; i < kEarly; ++i) {
        if (from.has(i)) e.partial[i] = sm90::load_with_hint(from.at(i), kHintSums);
      }
    });
#pragma unroll
    for (int h = 0; h < 2; ++h) e.block_scale[h] = power_of_two(scale_exponents_of(tile, row, lane)[8 * h]);
    return e;
  }

  __device__ __forceinline__ void store(sm90::Sums<kColumns>& sums, const Operands& e, const Tile& tile,
                                        int row, int lane, const sm90::EpilogueSmem& smem) const {
    if (tile.m0 + row >= vocab) return;
    by_width(tile, [&](auto partial) { store_tile<partial.value>(sums, e, tile, row, lane, smem); });
  }

 protected:
  // Calls f(std::true_type) for a tile of fewer than kColumns columns, else f(std::false_type). Width tests
  // cost as many instructions as the rest of the epilogue, so the code for whole tiles has none.
  template <class F>
  __device__ __forceinline__ void by_width(const Tile& tile, const F& f) const {
    if constexpr (kPartialTiles) {
      if (hidden - tile.n0 < kColumns) return f(std::true_type{});
    }
    f(std::false_type{});
  }

  template <bool kPartial>
  __device__ __forceinline__ void store_tile(sm90::Sums<kColumns>& sums, const Operands& e, const Tile& tile,
                                             int row, int lane, const sm90::EpilogueSmem& smem) const {
    const TileWidth<kPartial, kColumns> width(tile, hidden);
    if constexpr (kSmallRange<T>) {
      const float unit = pow2(-unit_exponent(__uint_as_float(*largest_scaled)));
#pragma unroll
      for (int i = 0; i < kColumns / 2; ++i) sums[i] *= unit;
    }
    if (panel_read_counts != nullptr) {
      const int own = tile.m0 / sm90::kTileM;
      if (threadIdx.x == 128) count_panel_read(own);
      wait_for_panel_reads(own);
    }
    if (!first) {
      sm90::copy_async_wait();
      const uint4* const smem_partial = reinterpret_cast<const uint4*>(smem.memory) + lane;
#pragma unroll
      for (int i = kSegments - 1; i >= 0; --i) {
        if (!width.has(i * 16)) continue;
        add(sums, 8 * i, i < kEarly ? e.partial[i < kEarly ? i : 0] : smem_partial[(i - kEarly) * 32],
            e.block_scale);
      }
      __syncwarp();  // all lanes have read the shared memory
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if (e.one_hot[h].index >= 0)
        subtract_row<kRowLoads<kColumns>>(sums, h, e.one_hot[h].amount,
                                          input + e.one_hot[h].index * input_stride + tile.n0, lane, width);
      const int r = tile.m0 + row + lane / 4 + 8 * h;
      if (smoothing.vector != nullptr && r < vocab)
        subtract_rank_one<kColumns>(sums, h, smoothing.amount_of(r), smoothing.vector + tile.n0, lane);
    }
    if (!last) {
      float inverse_scale[2];
      choose_block_scales(sums, inverse_scale, tile, row, lane);
      const auto to = segments<kPartial>(tile, row, lane);
#pragma unroll
      for (int i = 0; i < kSegments; ++i) {
        if (to.has(i)) sm90::store_with_hint(to.at(i), scaled(sums, 8 * i, inverse_scale), kHintSums);
      }
      return;
    }
    __syncwarp();  // all lanes have read their segments
    write_rows(sums, out + (tile.m0 + row) * int64_t{hidden} + tile.n0, hidden,
               kPartialTiles ? vocab - tile.m0 - row : 16, lane, width);
  }

  // The segments of a warp follow each other through the rows of the tile. With kTileN columns a segment is a
  // row.
  template <bool kPartial>
  struct Segments {
    uint4* sums;
    int stride;  // from one row to the next, in 16-byte vectors
    int lane, count;
    FastDivide vectors;

    __device__ __forceinline__ bool has(int i) const { return !kPartial || i < count; }
    // This lane's 16 bytes of segment i.
    __device__ __forceinline__ uint4* at(int i) const {
      const uint32_t vector = i * 32 + lane;
      if constexpr (kPartial) {
        const uint32_t row = vectors.quotient(vector);
        return sums + row * stride + vectors.remainder(vector, row);
      }
      constexpr int kVectors = kColumns / 8;
      if constexpr (kVectors == 32) return sums + lane + i * stride;
      return sums + vector / kVectors * stride + vector % kVectors;
    }
  };
  template <bool kPartial>
  __device__ __forceinline__ Segments<kPartial> segments(const Tile& tile, int row, int lane) const {
    uint4* const sums = reinterpret_cast<uint4*>(out + (tile.m0 + row) * int64_t{hidden} + tile.n0);
    return {sums, hidden / 8, lane, (hidden - tile.n0) / 16, last_vectors};
  }
  // Points to the scale of this lane's first row; the scale of its second row is 8 bytes further.
  __device__ __forceinline__ unsigned char* scale_exponents_of(const Tile& tile, int row, int lane) const {
    return scale_exponents + tile.m0 / sm90::kTileM * scale_stride + tile.n0 / kColumns * sm90::kTileM + row +
           lane / 4;
  }

  // One thread of a block calls it when all operands of a tile in this panel have arrived.
  __device__ __forceinline__ void count_panel_read(int panel) const {
    sm90::count_release(panel_read_counts + panel);
  }
  // Waits until all column tiles have read the panel that a tile in this panel overwrites. The reads belong
  // to earlier tiles and all blocks are resident, so the wait ends; panel_offset makes it short.
  __device__ __forceinline__ void wait_for_panel_reads(int panel) const {
    if (panel >= panel_offset) sm90::wait_for_count(panel_read_counts + panel - panel_offset, columns());
    __syncwarp();
  }

  // The tensor cores idle during the epilogue, so speed matters: the scale comes from a sum of squares (FFMA,
  // full rate), not from a maximum (half rate).
  __device__ __forceinline__ void choose_block_scales(const sm90::Sums<kColumns>& sums,
                                                      float (&inverse_scale)[2], const Tile& tile, int row,
                                                      int lane) const {
    float squares[2] = {0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < kColumns / 2; ++i) squares[i / 2 % 2] = fmaf(sums[i], sums[i], squares[i / 2 % 2]);
    // The root of the sum of squares bounds every element; the scale brings it to at most 2^15.
    int biased[2];
    bool overflow = false;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int exponent = __float_as_uint(warp_reduce<Sum, 4>(squares[h])) >> 23;
      biased[h] = 127 - 15 + ((exponent - 125) >> 1);
      overflow |= exponent == 255;
    }
    if (__any_sync(0xffffffffu, overflow)) {
      // Squares of elements from about 2^60 on overflow; the scale then comes from the largest element.
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float largest = 0.0f;
#pragma unroll
        for (int i = 0; i < kColumns / 2; ++i) {
          if (i / 2 % 2 == h) largest = fmaxf(largest, fabsf(sums[i]));
        }
        const int exponent = __float_as_uint(warp_reduce<Max, 4>(largest)) >> 23;
        biased[h] = min(max(exponent - 14, 127 - 15 - 63), 127 + 113);
      }
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      inverse_scale[h] = power_of_two(254 - biased[h]);
      if (lane % 4 == 0) scale_exponents_of(tile, row, lane)[8 * h] = static_cast<unsigned char>(biased[h]);
    }
  }

  // sums[at..at + 7] += partial; the words of `partial` alternate between the two rows.
  static __device__ __forceinline__ void add(sm90::Sums<kColumns>& sums, int at, uint4 partial,
                                             const float (&block_scale)[2]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 f = __half22float2(reinterpret_cast<const __half2&>((&partial.x)[i]));
      sums[at + 2 * i] = fmaf(f.x, block_scale[i % 2], sums[at + 2 * i]);
      sums[at + 2 * i + 1] = fmaf(f.y, block_scale[i % 2], sums[at + 2 * i + 1]);
    }
  }
  static __device__ __forceinline__ uint4 scaled(const sm90::Sums<kColumns>& sums, int at,
                                                 const float (&inverse_scale)[2]) {
    uint4 words;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const __half2 pair = __floats2half2_rn(sums[at + 2 * i] * inverse_scale[i % 2],
                                             sums[at + 2 * i + 1] * inverse_scale[i % 2]);
      (&words.x)[i] = reinterpret_cast<const uint32_t&>(pair);
    }
    return words;
  }
};

}  // namespace liger::lm_head
