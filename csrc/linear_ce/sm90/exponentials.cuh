// The epilogue of the logits GEMM: exponentials, and their sums per row and tile.
//
// The reference of a row is the logit of its target, which is known before the GEMM, so no maximum is needed
// first: bf16 has the exponent range of float32. A row whose sum overflows kMaxRowSum is recomputed from its
// maximum. float16 has less range: a row whose sum in a tile is large is shifted down there by a power of two, and
// apply_rule() shifts the other tiles of the row (RangeRows).
#pragma once

#include <cfloat>

#include "cross_entropy/rule.cuh"
#include "device/sigmoid.cuh"
#include "linear_ce/sm90/epilogues.cuh"

namespace liger::linear_ce {

// A row with a larger sum of exponentials is recomputed from its maximum: 2^60 is a target 41 nats below the
// largest logit. Below it, exponentials and scales are normal bf16 numbers.
inline constexpr float kMaxRowSum = 0x1p60f;

// Two more launches recompute tiles that overflowed in kAll; normally they exit at once. kMaxima: row maxima
// of the logits, from which references follow; kRecompute: exponentials and sums from there.
enum class Phase { kAll, kMaxima, kRecompute };

// Accumulated with the exponentials, for entropy and argmax.
struct RowMetrics {
  // (rows, column tiles): sums of e * log2(e); then, with kSquares, as many sums of e * e
  float* entropy_sums;
  unsigned long long* best_keys;  // (rows): the largest key of the logits of a row; initially zero
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

// Where a lane accumulates the sums of its two rows of a tile.
struct LaneSums {
  float (&sum)[2], (&entropy)[2], (&squares)[2];
  float (&best)[2];       // the largest logit
  int (&best_column)[2];  // relative to the first column of this lane
};

// kTransform: with a bias or a softcap. The softcap multiplies an exponential by its derivative after it was
// added to the sum. kSquares, with kMetrics: also sums of squares. Below kMaxRowSum one of a tile is finite.
template <typename T, bool kMetrics, bool kPartialTiles, bool kTransform, bool kSquares = false,
          int kTileColumns = sm90::kTileN>
struct ExpEpilogue {
  static_assert(kMetrics || !kSquares, "sums of squares are behind those of the entropy");
  using Element = T;
  struct Operands {};
  __device__ __forceinline__ void prefetch(const Tile&, int, int, const sm90::EpilogueSmem&) const {}
  __device__ __forceinline__ Operands load(const Tile&, int, int) const { return {}; }
  static constexpr bool kAMn = false, kBMn = false, kPanels = false;
  static constexpr int kColumns = kTileColumns;
  static constexpr CacheHint kHintA = CacheHint::kEvictLast, kHintB = CacheHint::kNormal;
  ChunkRows chunk;
  int vocab, hidden;
  float factor;            // log2(e) / temperature
  const float* reference;  // per row of the chunk, over the temperature
  float* tile_sums;        // (rows, column tiles): sums of exponentials, or maxima of logits
  Panels out;
  bool write;                // false: sums only
  int* overflow;             // per row tile, set if a sum is too large
  Phase phase;               // other than kAll: tiles with overflow only
  RowMetrics metrics;        // with kMetrics
  LogitTransform transform;  // with kTransform
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

  __device__ __forceinline__ void store(float (&z)[sm90::kSums], Operands, const Tile& tile, int row,
                                        int lane, const sm90::EpilogueSmem& smem) const {
    if (tile.m0 >= chunk()) return;
    if (phase != Phase::kAll && !overflow[tile.m0 / sm90::kTileM]) return;
    if constexpr (kTransform) {
      if (transform.bias != nullptr) add_bias(z, 0, kColumns, tile, lane);
    }
    if (phase == Phase::kMaxima) return write_maxima(z, tile, row, lane);
    float from[2], sum[2] = {0.0f, 0.0f}, entropy_sum[2] = {0.0f, 0.0f};
    float square_sum[2] = {0.0f, 0.0f}, best[2] = {-INFINITY, -INFINITY};
    int best_column[2] = {0, 0};
    LaneSums sums{sum, entropy_sum, square_sum, best, best_column};
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      from[h] = reference_of(tile.m0 + row + lane / 4 + 8 * h) * kLog2e;
      if constexpr (kOffset<T> != 0) from[h] -= kOffset<T>;
    }
    __nv_bfloat16* const rows = write ? out.row_at(tile.m0 + row, tile.n0) : nullptr;
    const int64_t panel = out.stride[tile.m0 >= out.rows_in_first];
#pragma unroll
    for (int half = 0; half < kColumns / sm90::kPanel; ++half) {
      const int first = half * sm90::kPanel;
      if (tile.n0 + first >= vocab) break;
      if constexpr (kPartialTiles) exclude_beyond(vocab - tile.n0, z, first, sm90::kPanel, lane);
      exponentials(z, first, sm90::kPanel, from, tile, lane, sums);
      if (!write) continue;
      if constexpr (kSmallRange<T>) shift_down(z, half, sums.sum, tile, row, lane);
      if (lane == 0) sm90::bulk_store_wait_read();
      __syncwarp();
      stage_half<T>(z, half, lane, smem);
      async_fence();
      __syncwarp();
      if (lane == 0) sm90::bulk_store(rows + half * panel, smem.memory, 16 * sm90::kPanel * 2);
    }
    write_sums(sums, tile, row, lane);
  }

 protected:
  __device__ __forceinline__ float reference_of(int row) const {
    // With a bias a row of zeros may have large logits; all its exponentials become 0.
    return row < chunk.rows ? reference[row] : kTransform ? INFINITY : 0.0f;
  }
  __device__ __forceinline__ void write_maxima(const float (&z)[sm90::kSums], const Tile& tile, int row,
                                               int lane) const {
    float max[2] = {-INFINITY, -INFINITY};
#pragma unroll
    for (int i = 0; i < kColumns / 2; ++i) {
      const int column = tile.n0 + i / 4 * 8 + (kPartialTiles ? lane % 4 * 2 + i % 2 : 0);
      const bool inside = column < vocab;
      if (inside) max[i / 2 % 2] = fmaxf(max[i / 2 % 2], z[i]);
    }
    write_tile_results<Max>(tile_sums, max, tile, row, lane);
  }
  // Logits of that many columns of the tile -> exponentials. from: references of the rows of this lane, as exponents
  // to base 2.
  __device__ __forceinline__ void exponentials(float (&z)[sm90::kSums], int first, int count,
                                               const float (&from)[2], const Tile& tile, int lane,
                                               const LaneSums& sums) const {
    if constexpr (kTransform) {
      transform.softcap != 0.0f ? exponentials_of<true>(z, first, count, from, tile, lane, sums)
                                : exponentials_of<false>(z, first, count, from, tile, lane, sums);
    } else {
      exponentials_of<false>(z, first, count, from, tile, lane, sums);
    }
  }
  // kCapped: with a softcap. kPartial: columns may be beyond the vocabulary.
  template <bool kCapped, bool kPartial = kPartialTiles>
  __device__ __forceinline__ void exponentials_of(float (&z)[sm90::kSums], int first, int count,
                                                  const float (&from)[2], const Tile& tile, int lane,
                                                  const LaneSums& sums) const {
    const int left = vocab - tile.n0 - lane % 4 * 2;  // columns from that of this lane on
#pragma unroll
    for (int j = first / 8; j < (first + count) / 8; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float& x = z[4 * j + i];
        const int h = i / 2;
        if constexpr (kMetrics) {
          if (x > sums.best[h]) sums.best[h] = x, sums.best_column[h] = 8 * j + i % 2;
        }
        float y, derivative;
        if constexpr (kCapped) {
          // The logit of an excluded column is -inf, where the derivative is 0.
          y = capped_exponent(x, from[h], derivative);
          if (kPartial && 8 * j + i % 2 >= left) y = -INFINITY;
        } else {
          y = fmaf(x, factor, -from[h]);
        }
        x = exp2_fast(y);
        sums.sum[h] += x;
        if constexpr (kSquares) sums.squares[h] = fmaf(x, x, sums.squares[h]);
        // A logit of -inf, of an excluded column or by the bias, has no entropy.
        if constexpr (kMetrics) sums.entropy[h] = fmaf(x, kPartial ? fmaxf(y, -FLT_MAX) : y, sums.entropy[h]);
        if constexpr (kCapped) x *= derivative;
      }
    }
  }
  // The results of a tile, and whether it overflowed.
  __device__ __forceinline__ void write_sums(const LaneSums& sums, const Tile& tile, int row,
                                             int lane) const {
    if constexpr (kOffset<T> != 0) remove_offset(sums);
    write_tile_results<Sum>(tile_sums, sums.sum, tile, row, lane);
    if constexpr (kMetrics) {
      write_tile_results<Sum>(metrics.entropy_sums, sums.entropy, tile, row, lane);
      if constexpr (kSquares) {
        write_tile_results<Sum>(metrics.entropy_sums + int64_t{chunk.rows} * columns(), sums.squares, tile,
                                row, lane);
      }
      update_best_keys(sums.best, sums.best_column, tile, row, lane);
    }
    const bool too_large = !(sums.sum[0] < kMaxRowSum) || !(sums.sum[1] < kMaxRowSum);
    if (phase == Phase::kAll && too_large) overflow[tile.m0 / sm90::kTileM] = 1;
  }
  // The logits of columns from `left` on become -inf, of `count` columns of the tile.
  static __device__ __forceinline__ void exclude_beyond(int left, float (&z)[sm90::kSums], int first,
                                                        int count, int lane) {
    if (left >= first + count) return;
#pragma unroll
    for (int i = first / 2; i < (first + count) / 2; ++i) {
      if (i / 4 * 8 + lane % 4 * 2 + i % 2 >= left) z[i] = -INFINITY;
    }
  }
  __device__ __forceinline__ void add_bias(float (&z)[sm90::kSums], int first, int count, const Tile& tile,
                                           int lane) const {
    const float2* const pairs = reinterpret_cast<const float2*>(transform.bias + tile.n0) + lane % 4;
#pragma unroll
    for (int j = first / 8; j < (first + count) / 8; ++j) {
      const float2 b = __ldg(pairs + 4 * j);
#pragma unroll
      for (int h = 0; h < 2; ++h) z[4 * j + 2 * h] += b.x, z[4 * j + 2 * h + 1] += b.y;
    }
  }

 private:
  // Before half of a tile is rounded: multiplies the exponentials of rows whose sum so far is at least
  // 2^kLargestSumExponent by a power of two, so that each is below that.
  __device__ __forceinline__ void shift_down(float (&z)[sm90::kSums], int half, const float (&sum)[2],
                                             const Tile& tile, int row, int lane) const {
    float total[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) total[h] = warp_reduce<Sum, 4>(sum[h]);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      constexpr float kLargestSum = static_cast<float>(1 << kLargestSumExponent);
      if (total[h] < kLargestSum) continue;
      const int shift = exponent_of(total[h]) - (kLargestSumExponent - 1);
      const float factor = pow2(-shift);
      constexpr int kPerPanel = sm90::kSums * sm90::kPanel / sm90::kTileN;
#pragma unroll
      for (int i = half * kPerPanel; i < (half + 1) * kPerPanel; ++i) {
        if (i / 2 % 2 == h) z[i] *= factor;
      }
      const int r = tile.m0 + row + lane / 4 + 8 * h;
      if (lane % 4 == 0 && r < chunk.rows) {
        const int64_t panels = ceil_div(vocab, sm90::kPanel);
        range.panel_shifts[r * panels + tile.n0 / sm90::kPanel + half] = static_cast<unsigned char>(shift);
        atomicMax(range.shift + r, shift);
      }
    }
  }
  // The sums of a lane for exponentials and exponents without kOffset.
  static __device__ __forceinline__ void remove_offset(const LaneSums& sums) {
    constexpr float kFactor = 1.0f / (1 << kOffset<T>);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if constexpr (kMetrics) sums.entropy[h] = fmaf(-kOffset<T>, sums.sum[h], sums.entropy[h]) * kFactor;
      if constexpr (kSquares) sums.squares[h] *= kFactor * kFactor;
      sums.sum[h] *= kFactor;
    }
  }
  // The exponent of a logit after the softcap, and the derivative of the softcap: with u = z / softcap and
  // r = 1 / (1 + e^2u), tanh(u) = 1 - 2r, and its derivative is 4r (1 - r).
  __device__ __forceinline__ float capped_exponent(float z, float from, float& derivative) const {
    const float r = reciprocal_fast(1.0f + exp2_fast(z * (2.0f * kLog2e / transform.softcap)));
    derivative = fmaf(-4.0f * r, r, 4.0f * r);
    return fmaf(fmaf(-2.0f, r, 1.0f), transform.softcap * factor, -from);
  }
  // Reduces over the four lanes that share a row; all of them get the result.
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

}  // namespace liger::linear_ce
