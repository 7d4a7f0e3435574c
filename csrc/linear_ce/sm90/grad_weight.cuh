// The weight gradient of fused_linear_ce on compute capability 9.0, summed over chunks.
#pragma once

#include <cuda_fp16.h>

#include "linear_ce/sm90/epilogues.cuh"

namespace liger::flce90 {

// Between chunks a sum lies in the 16 bits that its element of the final gradient has: as float16, in units
// that are as large as the numbers beside it allow. So it is rounded to 11 bits once per chunk, 8 times finer
// than bf16, and the gradient is as exact as if one float32 sum had been rounded. A unit is a power of two
// for 256 sums of one row, that is, of one class: classes differ by the powers of ten between their
// probabilities, elements of a row by little.
//
// The sums are in an order of their own. Each warp uses the 512 bytes that its tile has in each of its 16
// rows: piece s of the 16 holds sums 8s to 8s + 7 of all lanes. The last chunk rounds to bf16 and puts the
// elements where they belong.
struct GradWeight {
  static constexpr bool kAMn = true, kBMn = true, kPanels = true;
  static constexpr Keep kKeepA = Keep::kNormal, kKeepB = Keep::kLong, kKeepSums = Keep::kNormal;
  static constexpr int kPieces = 16, kEarly = 8;  // of which so many go to registers, the others to the desk
  struct Early {
    uint4 kept[kEarly];
    float unit[2];  // of the two rows
    OneHot one_hot[2];
  };
  ChunkRows chunk;
  int vocab, hidden;
  int rows_in_first;           // of the exponentials
  const OneHot* one_hot;       // of the classes
  const __nv_bfloat16* input;  // of the batch, not scaled
  int64_t input_stride;
  __nv_bfloat16* out;    // (vocab, hidden), contiguous
  unsigned char* units;  // exponents, biased: of each tile of rows and columns, 128 of them
  int64_t units_stride;  // from one tile of rows to the next
  bool first, last;      // chunk
  // Where the exponentials lie in the memory that sums are written to, `slack` panels behind the place of
  // their own rows: per tile of rows a counter, zero at first, of the blocks that have read its exponentials.
  // Else null.
  int* readers;
  int slack;
  // Columns of tiles whose input rows L2 keeps while all classes pass by; all columns where others wait for
  // tiles to be read.
  int band;

  __device__ __forceinline__ int columns() const { return hidden / sm90::kTileN; }
  __device__ __forceinline__ int row_pairs() const { return ceil_div(vocab, sm90::kCluster * sm90::kTileM); }
  __device__ __forceinline__ int tiles() const {
    // With no rows at all the gradient still has to become zeros, and sums have to become a gradient.
    if (chunk() == 0 && !first && !last) return 0;
    return row_pairs() * columns();
  }
  __device__ __forceinline__ Tile tile(int t, int rank) const {
    const Place at = place_in_bands(t, columns(), row_pairs(), band);
    return {(at.along * sm90::kCluster + rank) * sm90::kTileM, at.across * sm90::kTileN, 0,
            ceil_div(chunk(), sm90::kTileK), 0};
  }

  __device__ __forceinline__ void fetch(const Tile& tile, int row, int lane, const sm90::Desk& desk) const {
    if (first || tile.m0 + row >= vocab) return;
    const uint4* const from = sums_of(tile, row, lane);
    uint4* const to = reinterpret_cast<uint4*>(desk.memory) + lane;
    static_assert((kPieces - kEarly) * 32 * sizeof(uint4) == sm90::kDeskBytes);
#pragma unroll
    for (int i = kEarly; i < kPieces; ++i)
      sm90::copy_async(to + (i - kEarly) * 32, from + i * piece(), kKeepSums);
  }
  __device__ __forceinline__ Early early(const Tile& tile, int row, int lane) const {
    Early e{};
    if (tile.m0 + row >= vocab) return e;
#pragma unroll
    for (int h = 0; h < 2; ++h) e.one_hot[h] = one_hot[tile.m0 + row + lane / 4 + 8 * h];
    if (first) return e;
    const uint4* const from = sums_of(tile, row, lane);
#pragma unroll
    for (int i = 0; i < kEarly; ++i) e.kept[i] = sm90::load_keeping(from + i * piece(), kKeepSums);
#pragma unroll
    for (int h = 0; h < 2; ++h) e.unit[h] = power_of_two(units_of(tile, row, lane)[8 * h]);
    return e;
  }

  __device__ __forceinline__ void finish(float (&sums)[sm90::kSums], const Early& e, const Tile& tile,
                                         int row, int lane, const sm90::Desk& desk) const {
    if (tile.m0 + row >= vocab) return;  // the vocabulary is a multiple of 16
    if (tile.k_blocks == 0) {
#pragma unroll
      for (int i = 0; i < sm90::kSums; ++i) sums[i] = 0.0f;
    }
    if (readers != nullptr) wait_for_readers(tile, lane);
    if (!first) {
      sm90::copy_async_wait();
      const uint4* const desk_kept = reinterpret_cast<const uint4*>(desk.memory) + lane;
#pragma unroll
      for (int i = kPieces - 1; i >= 0; --i)
        add(sums, 8 * i, i < kEarly ? e.kept[i < kEarly ? i : 0] : desk_kept[(i - kEarly) * 32], e.unit);
      __syncwarp();  // the desk is free
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if (e.one_hot[h].place >= 0)
        subtract_row(sums, h, e.one_hot[h].amount, input + e.one_hot[h].place * input_stride + tile.n0, lane);
    }
    if (!last) {
      float per_unit[2];
      choose_units(sums, per_unit, tile, row, lane);
      uint4* const to = sums_of(tile, row, lane);
#pragma unroll
      for (int i = 0; i < kPieces; ++i)
        sm90::store_keeping(to + i * piece(), in_units(sums, 8 * i, per_unit), kKeepSums);
      return;
    }
    __syncwarp();  // all lanes have read their pieces
    write_rows(sums, out + (tile.m0 + row) * int64_t{hidden} + tile.n0, hidden, 16, lane);
  }

 private:
  __device__ __forceinline__ int piece() const { return hidden / 8; }  // from one to the next
  __device__ __forceinline__ uint4* sums_of(const Tile& tile, int row, int lane) const {
    return reinterpret_cast<uint4*>(out + (tile.m0 + row) * int64_t{hidden} + tile.n0) + lane;
  }
  // Of the upper of this lane's two rows.
  __device__ __forceinline__ unsigned char* units_of(const Tile& tile, int row, int lane) const {
    return units + tile.m0 / sm90::kTileM * units_stride + tile.n0 / sm90::kTileN * sm90::kTileM + row +
           lane / 4;
  }

  // What this tile overwrites has been read by all blocks that have it among their operands. They belong to
  // earlier tiles, and all blocks are resident: so nobody waits forever, and with some slack hardly anybody
  // at all.
  __device__ __forceinline__ void wait_for_readers(const Tile& tile, int lane) const {
    const int own = tile.m0 / sm90::kTileM;
    if (threadIdx.x == 128)
      asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(readers + own) : "memory");
    if (own >= slack) {
      int count;
      do {
        asm volatile("ld.acquire.gpu.global.s32 %0, [%1];"
                     : "=r"(count)
                     : "l"(readers + own - slack)
                     : "memory");
      } while (count < columns());
    }
    __syncwarp();
  }

  // All of this happens while the matrix units wait. So: instructions on floats, which run at the full rate,
  // and no maximum, which would not.

  static __device__ __forceinline__ float power_of_two(int biased_exponent) {
    return __uint_as_float(static_cast<uint32_t>(biased_exponent) << 23);
  }

  __device__ __forceinline__ void choose_units(const float (&sums)[sm90::kSums], float (&per_unit)[2],
                                               const Tile& tile, int row, int lane) const {
    float squares[2] = {0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < sm90::kSums; ++i) squares[i / 2 % 2] = fmaf(sums[i], sums[i], squares[i / 2 % 2]);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      // No element is larger than the root of the squares' sum, and that becomes 2^15 at most.
      const int of_squares = __float_as_uint(warp_reduce<Sum, 4>(squares[h])) >> 23;
      const bool overflow = of_squares == 255;
      const int unit = overflow ? 127 + 113 : 127 - 15 + ((of_squares - 125) >> 1);
      per_unit[h] = power_of_two(254 - unit);
      if (lane % 4 == 0) units_of(tile, row, lane)[8 * h] = static_cast<unsigned char>(unit);
    }
  }

  // sums[at..at + 7] += kept, where words belong to the two rows in turn.
  static __device__ __forceinline__ void add(float (&sums)[sm90::kSums], int at, uint4 kept,
                                             const float (&unit)[2]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 f = __half22float2(reinterpret_cast<const __half2&>((&kept.x)[i]));
      sums[at + 2 * i] = fmaf(f.x, unit[i % 2], sums[at + 2 * i]);
      sums[at + 2 * i + 1] = fmaf(f.y, unit[i % 2], sums[at + 2 * i + 1]);
    }
  }
  static __device__ __forceinline__ uint4 in_units(const float (&sums)[sm90::kSums], int at,
                                                   const float (&per_unit)[2]) {
    uint4 words;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const __half2 pair =
          __floats2half2_rn(sums[at + 2 * i] * per_unit[i % 2], sums[at + 2 * i + 1] * per_unit[i % 2]);
      (&words.x)[i] = reinterpret_cast<const uint32_t&>(pair);
    }
    return words;
  }
};

}  // namespace liger::flce90
