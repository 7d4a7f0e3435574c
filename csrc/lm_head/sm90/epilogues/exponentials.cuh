// SPDX-License-Identifier: BSD-3-Clause

// The epilogue of the logits GEMM: exponentials, and sums of exponentials per row and tile.
//
// The reference of a row is the logit of its target, which is known before the GEMM. bf16 has the exponent
// range of float32, so no pass for the maximum is needed. A row whose sum overflows kMaxRowSum is recomputed
// from its maximum. float16 has less range: a row with a large sum in a tile is multiplied by a negative
// power of two in that tile, and apply_rule() shifts the other tiles of the row (RangeRows).
#pragma once

#include <algorithm>
#include <cfloat>

#include "cross_entropy/rule.cuh"
#include "device/async.cuh"
#include "device/sigmoid.cuh"
#include "lm_head/sm90/epilogues/common.cuh"
#include "lm_head/sm90/gemm/pingpong.cuh"

namespace liger::lm_head {

// A row with a larger sum of exponentials is recomputed from its maximum: 2^60 corresponds to a target 41
// nats below the largest logit. Up to this sum, exponentials and scales are normal bf16 numbers.
inline constexpr float kMaxRowSum = 0x1p60f;

// Two more launches recompute tiles that overflowed in kAll; normally they exit at once. kMaxima computes row
// maxima of the logits, which give new references; kRecompute computes exponentials and sums with them.
enum class Phase { kAll, kMaxima, kRecompute };

// Sums for entropy and argmax, accumulated with the exponentials.
struct RowMetrics {
  // (rows, column tiles): sums of e * log2(e); with squares, then also sums of e * e
  float* entropy_sums;
  unsigned long long* best_keys;  // (rows): the largest key_of() of a row; initially zero
};
// Keys order logits, and equal logits by descending column, so that the maximum does not depend on the order
// of tiles and a tie goes to the lowest column.
__device__ __forceinline__ unsigned long long key_of(float logit, int column) {
  const uint32_t bits = __float_as_uint(logit + 0.0f);  // -0 and 0 are equal
  const uint32_t rising = bits ^ (bits >> 31 ? 0xffffffffu : 0x80000000u);
  return static_cast<unsigned long long>(rising) << 32 | static_cast<uint32_t>(~column);
}
__device__ __forceinline__ int column_of_key(unsigned long long key) {
  return static_cast<int>(~static_cast<uint32_t>(key));
}

// A lane's sums of its two rows of a tile.
struct LaneSums {
  float sum[2] = {}, entropy[2] = {}, squares[2] = {};
  float best[2] = {-INFINITY, -INFINITY};  // the largest logit
  int best_column[2] = {};                 // relative to the first column of this lane
};

// Work in addition to exponentials and their sums. With a softcap an exponential is multiplied by the
// derivative after it was added to the sum. Below kMaxRowSum a tile's sum of squares is finite.
struct LogitsWork {
  bool metrics = false, squares = false;  // entropy and argmax; in addition, sums of squares
  bool bias = false, softcap = false;

  constexpr bool transform() const { return bias || softcap; }
};

// A warp has 16 rows in each half of a tile. Panels have 128 columns and tiles 192, so exponentials are
// stored in boxes of 64 columns, half a row of a panel. Rows and panels beyond the chunk are clipped by TMA.
template <typename T, LogitsWork kWork>
struct ExpEpilogue {
  static_assert(kWork.metrics || !kWork.squares, "sums of squares follow the sums of the entropy");
  using Element = T;
  static constexpr bool kAMn = false, kBMn = false, kPanels = false;
  static constexpr int kColumns = sm90::kPingpongColumns, kHalves = sm90::kPingpongHalves;
  static constexpr CacheHint kHintA = CacheHint::kEvictLast, kHintB = CacheHint::kNormal;
  // The bias of the tile follows the box.
  static constexpr int kSmemBytes = sm90::kResultBoxBytes + (kWork.bias ? kColumns * int{sizeof(float)} : 0);
  ChunkRows chunk;
  int vocab, hidden;
  float factor;            // log2(e) / temperature
  const float* reference;  // per row of the chunk, over the temperature
  float* tile_sums;        // (rows, column tiles): sums of exponentials, or maxima of logits
  Panels out;
  bool write;                // false: sums only
  int* overflow;             // per row tile, set if a sum is too large
  Phase phase;               // phases other than kAll compute only tiles with overflow
  RowMetrics metrics;        // with kWork.metrics
  LogitTransform transform;  // with kWork.transform()
  RangeRows range;           // with kSmallRange

  __device__ __forceinline__ int columns() const { return ceil_div(vocab, kColumns); }
  __device__ __forceinline__ int row_pairs() const {
    return ceil_div(chunk(), sm90::kCluster * sm90::kTileM);
  }
  __device__ __forceinline__ int tiles() const {
    if (phase != Phase::kAll) {
      int any = 0;
      for (int i = 0; i < sm90::kCluster * row_pairs(); ++i) any |= overflow[i];
      if (!any) return 0;
    }
    return row_pairs() * columns();
  }
  __device__ __forceinline__ Tile tile(int t, int rank) const {
    const TileIndex at = swizzled_tile(t, row_pairs(), columns());
    return {(at.across * sm90::kCluster + rank) * sm90::kTileM, at.along * kColumns, 0,
            ceil_div(hidden, sm90::kTileK), 0};
  }

  __device__ __forceinline__ void prefetch(const Tile& tile, int lane, const sm90::EpilogueSmem& smem) const {
    if constexpr (kWork.bias) load_bias(tile, lane, smem);
  }
  __device__ __forceinline__ void store(sm90::Sums<kColumns> (&z)[kHalves], const Tile& tile, int row,
                                        int lane, const sm90::EpilogueSmem& smem,
                                        const CUtensorMap (&maps)[2]) const {
    // Keeps the compiler from computing epilogue addresses before the loop over tiles, which would spill
    // registers.
    asm volatile("" : "+r"(lane), "+r"(row));
    if (tile.m0 >= chunk()) return;
    if (phase != Phase::kAll && !overflow[tile.m0 / sm90::kTileM]) return;
    if constexpr (kWork.bias) {
      sm90::copy_async_wait();
      __syncwarp();
    }
#pragma unroll
    for (int half = 0; half < kHalves; ++half)
      store_half(z[half], tile, row + half * sm90::kBox, lane, smem, maps);
  }

 private:
  // row: the first row of this warp in the half.
  __device__ __forceinline__ void store_half(sm90::Sums<kColumns>& z, const Tile& tile, int row, int lane,
                                             const sm90::EpilogueSmem& smem,
                                             const CUtensorMap (&maps)[2]) const {
    if (phase == Phase::kMaxima) {
      if constexpr (kWork.bias) add_bias(z, 0, kColumns, lane, smem);
      return write_maxima(z, tile, row, lane);
    }
    LaneSums sums;
    float from[2];
#pragma unroll
    for (int h = 0; h < 2; ++h)
      from[h] = reference_of(tile.m0 + row + lane / 4 + 8 * h) * kLog2e - kOffset<T>;
    // The other GEMMs read the last panel to its end, so its columns beyond the vocabulary are zeros.
    const int end = round_up(vocab, sm90::kPanel);
    // float16 computes all exponentials of a row before it rounds any of them.
    if constexpr (kSmallRange<T>) {
#pragma unroll
      for (int first = 0; first < kColumns; first += sm90::kBox) {
        if (tile.n0 + first >= end) break;
        exponentials_of_box(z, first, from, tile, lane, smem, sums);
      }
      if (write) shift_down(z, sums.sum, tile, row, lane);
    }
#pragma unroll
    for (int first = 0; first < kColumns; first += sm90::kBox) {
      if (tile.n0 + first >= end) break;
      if constexpr (!kSmallRange<T>) exponentials_of_box(z, first, from, tile, lane, smem, sums);
      if (!write) continue;
      wait_for_store(lane);
      stage_box(z, first, lane, smem);
      store_box(tile, tile.n0 + first, row, lane, smem, maps);
    }
    if (write) clear_rest_of_panel(tile, row, lane, smem, maps);
    write_sums(sums, tile, row, lane);
  }

  // --- logits -> exponentials ------------------------------------------------------------------------------

  __device__ __forceinline__ float reference_of(int row) const {
    // With a bias a row of zeros may have large logits; all its exponentials become 0.
    return row < chunk.rows ? reference[row] : kWork.transform() ? INFINITY : 0.0f;
  }
  // Copies the bias of the tile to shared memory during its mainloop. The vector is padded with zeros to a
  // multiple of kTileN; the tile may extend beyond the vector, in columns beyond the vocabulary.
  //
  // No copy has a predicate, so some lanes repeat copies of other lanes: ptxas 13.0 encodes the second of two
  // predicated copies with a descriptor in an odd uniform register, an illegal instruction.
  __device__ __forceinline__ void load_bias(const Tile& tile, int lane,
                                            const sm90::EpilogueSmem& smem) const {
    sm90::copy_async_wait();  // waits for copies of a tile that was skipped
    const int last = round_up(vocab, sm90::kTileN) - 4;
#pragma unroll
    for (int i = 0; i < kColumns; i += 32 * 4) {
      const int column = i + lane * 4 % std::min(kColumns - i, 32 * 4);
      copy_async(
          reinterpret_cast<Vec<float, 4>*>(smem.memory + sm90::kResultBoxBytes + column * sizeof(float)),
          transform.bias + min(tile.n0 + column, last));
    }
  }
  static __device__ __forceinline__ void add_bias(sm90::Sums<kColumns>& z, int first, int count, int lane,
                                                  const sm90::EpilogueSmem& smem) {
    const float2* const pairs =
        reinterpret_cast<const float2*>(smem.memory + sm90::kResultBoxBytes) + lane % 4;
#pragma unroll
    for (int j = first / 8; j < (first + count) / 8; ++j) {
      const float2 b = pairs[4 * j];
#pragma unroll
      for (int h = 0; h < 2; ++h) z[4 * j + 2 * h] += b.x, z[4 * j + 2 * h + 1] += b.y;
    }
  }
  // Replaces the logits of a box by exponentials, 0 beyond the vocabulary. from: references of this lane's
  // rows, as exponents to base 2.
  __device__ __forceinline__ void exponentials_of_box(sm90::Sums<kColumns>& z, int first,
                                                      const float (&from)[2], const Tile& tile, int lane,
                                                      const sm90::EpilogueSmem& smem, LaneSums& sums) const {
    if constexpr (kWork.bias) add_bias(z, first, sm90::kBox, lane, smem);
    const int left = vocab - tile.n0 - lane % 4 * 2;  // number of columns from this lane's first column on
    exclude_beyond(left, z, first);
    exponentials(z, first, left, from, sums);
  }
  // Sets the logits of a box that are beyond the vocabulary to -inf.
  static __device__ __forceinline__ void exclude_beyond(int left, sm90::Sums<kColumns>& z, int first) {
    if (left >= first + sm90::kBox) return;
#pragma unroll
    for (int i = first / 2; i < (first + sm90::kBox) / 2; ++i) {
      if (i / 4 * 8 + i % 2 >= left) z[i] = -INFINITY;
    }
  }
  __device__ __forceinline__ void exponentials(sm90::Sums<kColumns>& z, int first, int left,
                                               const float (&from)[2], LaneSums& sums) const {
#pragma unroll
    for (int j = first / 8; j < (first + sm90::kBox) / 8; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float& x = z[4 * j + i];
        const int h = i / 2;
        if constexpr (kWork.metrics) {
          if (x > sums.best[h]) sums.best[h] = x, sums.best_column[h] = 8 * j + i % 2;
        }
        float y, derivative;
        if constexpr (kWork.softcap) {
          // The logit of an excluded column is -inf, where the derivative is 0.
          y = capped_exponent(x, from[h], derivative);
          if (8 * j + i % 2 >= left) y = -INFINITY;
        } else {
          y = fmaf(x, factor, -from[h]);
        }
        x = exp2_fast(y);
        sums.sum[h] += x;
        if constexpr (kWork.squares) sums.squares[h] = fmaf(x, x, sums.squares[h]);
        // A logit of -inf (an excluded column, or from the bias) adds nothing to the entropy.
        if constexpr (kWork.metrics) sums.entropy[h] = fmaf(x, fmaxf(y, -FLT_MAX), sums.entropy[h]);
        if constexpr (kWork.softcap) x *= derivative;
      }
    }
  }
  // The exponent of a logit after the softcap, and the derivative of the softcap: with u = z / softcap and
  // r = 1 / (1 + e^2u), tanh(u) = 1 - 2r, and its derivative is 4r (1 - r).
  __device__ __forceinline__ float capped_exponent(float z, float from, float& derivative) const {
    const float r = reciprocal_fast(1.0f + exp2_fast(z * (2.0f * kLog2e / transform.softcap)));
    derivative = fmaf(-4.0f * r, r, 4.0f * r);
    return fmaf(fmaf(-2.0f, r, 1.0f), transform.softcap * factor, -from);
  }
  // Called before the exponentials of a tile are rounded. Rows with a sum of at least 2^kLargestSumExponent
  // are multiplied by a power of two, which brings every exponential below that limit.
  __device__ __forceinline__ void shift_down(sm90::Sums<kColumns>& z, const float (&sum)[2], const Tile& tile,
                                             int row, int lane) const {
    float total[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) total[h] = warp_reduce<Sum, 4>(sum[h]);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      constexpr float kLargestSum = static_cast<float>(1 << kLargestSumExponent);
      if (total[h] < kLargestSum) continue;
      const int shift = exponent_of(total[h]) - (kLargestSumExponent - 1);
      const float by = pow2(-shift);
#pragma unroll
      for (int i = 0; i < kColumns / 2; ++i) {
        if (i / 2 % 2 == h) z[i] *= by;
      }
      const int r = tile.m0 + row + lane / 4 + 8 * h;
      if (lane % 4 == 0 && r < chunk.rows) {
        range.tile_shifts[int64_t{r} * columns() + tile.n0 / kColumns] = static_cast<unsigned char>(shift);
        atomicMax(range.shift + r, shift);
      }
    }
  }

  // --- results ---------------------------------------------------------------------------------------------

  // Waits until TMA has read the previous box from shared memory.
  static __device__ __forceinline__ void wait_for_store(int lane) {
    if (lane == 0) sm90::bulk_store_wait_read();
    __syncwarp();
  }
  // Swizzles the 16-byte vectors of a row: vector v of row r is stored at v ^ r % 8.
  static __device__ __forceinline__ void stage_box(const sm90::Sums<kColumns>& z, int first, int lane,
                                                   const sm90::EpilogueSmem& smem) {
    // For stmatrix: lane 8m + r addresses row r of matrix m; a matrix is the upper or lower 8 rows of one of
    // two vectors.
    const int r = lane % 16, odd = lane / 16;
    T* const row = reinterpret_cast<T*>(smem.memory) + r * sm90::kBox;
#pragma unroll
    for (int v = 0; v < sm90::kBox / 8; v += 2) {
      const int j = first / 2 + 4 * v;
      sm90::store_matrices(row + (((v + odd) ^ r) & 7) * 8, pack_pair<T>(z[j], z[j + 1]),
                           pack_pair<T>(z[j + 2], z[j + 3]), pack_pair<T>(z[j + 4], z[j + 5]),
                           pack_pair<T>(z[j + 6], z[j + 7]));
    }
  }
  __device__ __forceinline__ void store_box(const Tile& tile, int column, int row, int lane,
                                            const sm90::EpilogueSmem& smem,
                                            const CUtensorMap (&maps)[2]) const {
    async_fence();
    __syncwarp();
    if (lane != 0) return;
    const bool second = tile.m0 >= out.rows_in_first;
    sm90::store_box(
        &maps[second], smem.memory,
        {column % sm90::kPanel, tile.m0 + row - (second ? out.rows_in_first : 0), column / sm90::kPanel});
  }
  // The last panel may end 64 columns after the last tile.
  __device__ __forceinline__ void clear_rest_of_panel(const Tile& tile, int row, int lane,
                                                      const sm90::EpilogueSmem& smem,
                                                      const CUtensorMap (&maps)[2]) const {
    const int end = tile.n0 + kColumns;
    if (end < vocab || end % sm90::kPanel == 0) return;
    wait_for_store(lane);
#pragma unroll
    for (int i = 0; i < sm90::kResultBoxBytes; i += 32 * 16)
      store_shared(smem.memory + i + lane * 16, 0.0f, 0.0f, 0.0f, 0.0f);
    store_box(tile, end, row, lane, smem, maps);
  }

  __device__ __forceinline__ void write_maxima(const sm90::Sums<kColumns>& z, const Tile& tile, int row,
                                               int lane) const {
    float max[2] = {-INFINITY, -INFINITY};
#pragma unroll
    for (int i = 0; i < kColumns / 2; ++i) {
      const bool inside = tile.n0 + i / 4 * 8 + lane % 4 * 2 + i % 2 < vocab;
      if (inside) max[i / 2 % 2] = fmaxf(max[i / 2 % 2], z[i]);
    }
    write_tile_results<Max>(tile_sums, max, tile, row, lane);
  }
  // Writes the results of a tile, and whether it overflowed.
  __device__ __forceinline__ void write_sums(LaneSums& sums, const Tile& tile, int row, int lane) const {
    if constexpr (kOffset<T> != 0) remove_offset(sums);
    write_tile_results<Sum>(tile_sums, sums.sum, tile, row, lane);
    if constexpr (kWork.metrics) {
      write_tile_results<Sum>(metrics.entropy_sums, sums.entropy, tile, row, lane);
      if constexpr (kWork.squares) {
        write_tile_results<Sum>(metrics.entropy_sums + int64_t{chunk.rows} * columns(), sums.squares, tile,
                                row, lane);
      }
      update_best_keys(sums.best, sums.best_column, tile, row, lane);
    }
    const bool too_large = !(sums.sum[0] < kMaxRowSum) || !(sums.sum[1] < kMaxRowSum);
    if (phase == Phase::kAll && too_large) overflow[tile.m0 / sm90::kTileM] = 1;
  }
  // Removes kOffset from the sums of a lane.
  static __device__ __forceinline__ void remove_offset(LaneSums& sums) {
    constexpr float kFactor = 1.0f / (1 << kOffset<T>);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if constexpr (kWork.metrics)
        sums.entropy[h] = fmaf(-kOffset<T>, sums.sum[h], sums.entropy[h]) * kFactor;
      if constexpr (kWork.squares) sums.squares[h] *= kFactor * kFactor;
      sums.sum[h] *= kFactor;
    }
  }
  // Reduces over the four lanes that share a row; all four get the result.
  template <class Reduction>
  __device__ __forceinline__ void write_tile_results(float* out_results, float (&value)[2], const Tile& tile,
                                                     int row, int lane) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      value[h] = warp_reduce<Reduction, 4>(value[h]);
      const int r = tile.m0 + row + lane / 4 + 8 * h;
      if (lane % 4 == 0 && r < chunk.rows)
        out_results[static_cast<int64_t>(r) * columns() + tile.n0 / kColumns] = value[h];
    }
  }
  __device__ __forceinline__ void update_best_keys(const float (&best)[2], const int (&column)[2],
                                                   const Tile& tile, int row, int lane) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      unsigned long long key = key_of(best[h], tile.n0 + lane % 4 * 2 + column[h]);
#pragma unroll
      for (int offset = 2; offset > 0; offset /= 2) key = max(key, __shfl_xor_sync(0xffffffffu, key, offset));
      const int r = tile.m0 + row + lane / 4 + 8 * h;
      if (lane % 4 == 0 && r < chunk.rows) atomicMax(metrics.best_keys + r, key);
    }
  }
};

}  // namespace liger::lm_head
