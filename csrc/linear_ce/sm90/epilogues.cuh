// The three GEMMs of a chunk of fused_linear_ce, each with an epilogue that saves a pass over memory:
//
// - ExpEpilogue: exponentials exp(input @ weight.T - reference) and their sums per row and tile. The reference
//   is the logit of the target, which is known before the GEMM, so no maximum is needed first: bf16 has the
//   exponent range of float32. A row whose sum overflows kMaxRowSum is recomputed from its maximum.
// - GradInputEpilogue: (exponentials @ weight) * scale of the row.
// - GradWeightEpilogue (grad_weight.cuh): exponentials.T @ (scale * input), accumulated over chunks in the
//   memory of the bf16 result as block-scaled fp16.
//
// Between them apply_rule (rows.cuh) turns sums into losses and scales. The softmax is never normalised in
// memory, and the logits are never stored. The one-hot term is most of the gradient while a model is
// untrained, so it is not rounded to bf16 with the exponentials: both gradient epilogues add it in float32,
// from rows of weight and input.
#pragma once

#include <cfloat>

#include "cross_entropy/rule.cuh"
#include "device/integers.h"
#include "device/sigmoid.cuh"
#include "linear_ce/sm90/gemm.cuh"
#include "linear_ce/sm90/logit_terms.cuh"

namespace liger::linear_ce {

using sm90::CacheHint;
using sm90::Tile;

// A row with a larger sum of exponentials is recomputed from its maximum: 2^60 is a target 41 nats below the
// largest logit. Below it, exponentials and scales are normal bf16 numbers.
inline constexpr float kMaxRowSum = 0x1p60f;

// The exponentials of a chunk: column panels of 128 classes, each with its rows contiguous, in up to two
// buffers. The panel layout lets the first chunk use the memory of the weight gradient, which is written
// after they have been read: one panel has the size of the 128 rows of the gradient for its classes.
struct Panels {
  __nv_bfloat16* memory[2];
  int64_t stride[2];  // elements from one panel to the next
  int rows_in_first;  // a multiple of 128

  __device__ __forceinline__ __nv_bfloat16* row_at(int row, int column) const {
    const bool second = row >= rows_in_first;
    return memory[second] + int64_t{column / sm90::kPanel} * stride[second] +
           int64_t{row - (second ? rows_in_first : 0)} * sm90::kPanel;
  }
  __device__ __forceinline__ __nv_bfloat16* at(int row, int column) const {
    return row_at(row, column) + swizzle(row, column % sm90::kPanel);
  }
  // The column within a row after the 128-byte swizzle, so that panels and shared memory have the same
  // layout.
  static __device__ __forceinline__ int swizzle(int row, int column) {
    return (column & 64) + (((column >> 3) ^ row) & 7) * 8 + (column & 7);
  }
};

// Tile rasterisation over a grid of `wide` x `length` tiles for L2 reuse: active clusters work on groups of
// kGroupM tiles across and about as many along, at the same k.
inline constexpr int kGroupM = 8;
struct TileIndex {
  int across, along;
};
__device__ __forceinline__ TileIndex swizzled_tile(int t, int wide, int length, int group = kGroupM) {
  const int first = t / (group * length) * group;
  const int width = min(group, wide - first), within = t - first * length;
  return {first + within % width, within / width};
}

// The number of valid rows in this chunk, which only the device knows.
struct ChunkRows {
  const int* count;  // of the whole batch
  int first, rows;   // of the chunk; rows is an upper bound
  __device__ __forceinline__ int operator()() const { return max(0, min(rows, *count - first)); }
};

__device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
  uint32_t word;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  return word;
}

// Rounds half of a warp's accumulators (16 rows of 128 columns, a panel) to bf16 and writes them, swizzled,
// to the shared memory of the warp.
__device__ __forceinline__ void stage_half(const float (&sums)[sm90::kSums], int half, int lane,
                                           const sm90::EpilogueSmem& smem) {
  // For stmatrix: lane 8m + r addresses row r of matrix m, which is the upper or lower 8 rows of one of two
  // vectors.
  const int row = lane % 16, odd = lane / 16;
  constexpr int kVectors = sm90::kPanel / 8;
#pragma unroll
  for (int v = 0; v < kVectors; v += 2) {
    const int j = 4 * (half * kVectors + v);
    sm90::store_matrices(reinterpret_cast<__nv_bfloat16*>(smem.memory) + row * sm90::kPanel +
                             Panels::swizzle(row, (v + odd) * 8),
                         pack_bf16(sums[j], sums[j + 1]), pack_bf16(sums[j + 2], sums[j + 3]),
                         pack_bf16(sums[j + 4], sums[j + 5]), pack_bf16(sums[j + 6], sums[j + 7]));
  }
}

// Transposes 4 x 4 words over the four lanes of a quad.
__device__ __forceinline__ void transpose_quad(uint32_t (&w)[4], int lane) {
  const bool odd = lane & 1, upper = lane & 2;
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    const uint32_t other = __shfl_xor_sync(0xffffffffu, odd ? w[i] : w[i + 1], 1);
    (odd ? w[i] : w[i + 1]) = other;
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t other = __shfl_xor_sync(0xffffffffu, upper ? w[i] : w[i + 2], 2);
    (upper ? w[i] : w[i + 2]) = other;
  }
}

// The one-hot term of the gradient.
struct OneHot {
  float amount;
  int index;  // the class of a row, or the row of a class; -1: no term
};
static_assert(sizeof(OneHot) == 8);

// The columns of a tile: a multiple of kTileK, less than kTileN only with kPartialTiles.
template <bool kPartialTiles>
struct TileWidth {
  int columns;
  __device__ __forceinline__ TileWidth(const Tile& tile, int hidden)
      : columns(kPartialTiles ? min(sm90::kTileN, hidden - tile.n0) : sm90::kTileN) {}
  __device__ __forceinline__ bool has(int column) const { return !kPartialTiles || column < columns; }
};

// sums of row h -= amount * from[0..width - 1], for the columns of this lane.
template <bool kPartialTiles>
__device__ __forceinline__ void subtract_row(float (&sums)[sm90::kSums], int h, float amount,
                                             const __nv_bfloat16* from, int lane,
                                             TileWidth<kPartialTiles> width) {
  const uint32_t* const pairs = reinterpret_cast<const uint32_t*>(from) + lane % 4;
  uint32_t words[sm90::kTileN / 8];
#pragma unroll
  for (int j = 0; j < sm90::kTileN / 8; ++j) words[j] = width.has(8 * j) ? __ldg(pairs + 4 * j) : 0;
#pragma unroll
  for (int j = 0; j < sm90::kTileN / 8; ++j) {
    float &low = sums[4 * j + 2 * h], &high = sums[4 * j + 2 * h + 1];
    low = fmaf(-amount, __uint_as_float(words[j] << 16), low);
    high = fmaf(-amount, __uint_as_float(words[j] & 0xffff0000u), high);
  }
}

// sums of row h -= amount * vector[0..kTileN - 1], for the columns of this lane.
__device__ __forceinline__ void subtract_rank_one(float (&sums)[sm90::kSums], int h, float amount,
                                                  const float* vector, int lane) {
  const float2* const pairs = reinterpret_cast<const float2*>(vector) + lane % 4;
#pragma unroll
  for (int j = 0; j < sm90::kTileN / 8; ++j) {
    const float2 v = __ldg(pairs + 4 * j);
    float &low = sums[4 * j + 2 * h], &high = sums[4 * j + 2 * h + 1];
    low = fmaf(-amount, v.x, low), high = fmaf(-amount, v.y, high);
  }
}

// Rounds a warp's accumulators to bf16 and stores the first `count` of its 16 rows: 64 bytes of 8 rows at a
// time. (Longer segments of fewer rows, staged in shared memory, were slower.)
template <bool kPartialTiles>
__device__ __forceinline__ void write_rows(const float (&sums)[sm90::kSums], __nv_bfloat16* out,
                                           int64_t stride, int count, int lane,
                                           TileWidth<kPartialTiles> width) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int row = lane / 4 + 8 * h;
    __nv_bfloat16* const at = out + row * stride + lane % 4 * 8;
#pragma unroll
    for (int i = 0; i < sm90::kTileN / 32; ++i) {
      uint32_t w[4];
#pragma unroll
      for (int j = 0; j < 4; ++j)
        w[j] = pack_bf16(sums[16 * i + 4 * j + 2 * h], sums[16 * i + 4 * j + 2 * h + 1]);
      transpose_quad(w, lane);
      if (row < count && width.has(32 * i))
        *reinterpret_cast<uint4*>(at + 32 * i) = make_uint4(w[0], w[1], w[2], w[3]);
    }
  }
}

// Two more launches recompute tiles that overflowed in kAll; normally they exit at once. kMaxima: row maxima
// of the logits, from which references follow; kRecompute: exponentials and sums from there.
enum class Phase { kAll, kMaxima, kRecompute };

// Accumulated with the exponentials, for entropy and argmax.
struct RowMetrics {
  float* entropy_sums;            // (rows, column tiles): sums of e * log2(e)
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

// kTransform: with a bias or a softcap. The softcap multiplies an exponential by its derivative after it was
// added to the sum.
template <bool kMetrics, bool kPartialTiles, bool kTransform>
struct ExpEpilogue {
  struct Operands {};
  __device__ __forceinline__ void prefetch(const Tile&, int, int, const sm90::EpilogueSmem&) const {}
  __device__ __forceinline__ Operands load(const Tile&, int, int) const { return {}; }
  static constexpr bool kAMn = false, kBMn = false, kPanels = false, kNarrowTiles = false;
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

  __device__ __forceinline__ int columns() const { return ceil_div(vocab, sm90::kTileN); }
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
    return {(at.across * sm90::kCluster + rank) * sm90::kTileM, at.along * sm90::kTileN, 0,
            ceil_div(hidden, sm90::kTileK), 0};
  }

  __device__ __forceinline__ void store(float (&z)[sm90::kSums], Operands, const Tile& tile, int row,
                                        int lane, const sm90::EpilogueSmem& smem) const {
    if (tile.m0 >= chunk()) return;
    if (phase != Phase::kAll && !overflow[tile.m0 / sm90::kTileM]) return;
    if constexpr (kTransform) {
      if (transform.bias != nullptr) add_bias(z, tile, lane);
    }
    if (phase == Phase::kMaxima) {
      float max[2] = {-INFINITY, -INFINITY};
#pragma unroll
      for (int i = 0; i < sm90::kSums; ++i) {
        const int column = tile.n0 + i / 4 * 8 + (kPartialTiles ? lane % 4 * 2 + i % 2 : 0);
        const bool inside = column < vocab;
        if (inside) max[i / 2 % 2] = fmaxf(max[i / 2 % 2], z[i]);
      }
      write_tile_results<Max>(tile_sums, max, tile, row, lane);
      return;
    }
    float from[2], sum[2] = {0.0f, 0.0f}, entropy_sum[2] = {0.0f, 0.0f};
    float best[2] = {-INFINITY, -INFINITY};
    int best_column[2] = {0, 0};  // relative to the first column of this lane
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int r = tile.m0 + row + lane / 4 + 8 * h;
      // With a bias a row of zeros may have large logits; all its exponentials become 0.
      from[h] = (r < chunk.rows ? reference[r] : kTransform ? INFINITY : 0.0f) * kLog2e;
    }
    __nv_bfloat16* const rows = write ? out.row_at(tile.m0 + row, tile.n0) : nullptr;
    const int64_t panel = out.stride[tile.m0 >= out.rows_in_first];
    constexpr int kVectors = sm90::kPanel / 8;
    const int left = vocab - tile.n0 - lane % 4 * 2;  // columns from that of this lane on
#pragma unroll
    for (int half = 0; half < sm90::kTileN / sm90::kPanel; ++half) {
      if (tile.n0 + half * sm90::kPanel >= vocab) break;
      if constexpr (kPartialTiles) exclude_beyond(vocab - tile.n0, z, half, lane);
      const auto exponentials = [&](auto capped) __attribute__((always_inline)) {
#pragma unroll
        for (int j = half * kVectors; j < (half + 1) * kVectors; ++j) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            float& x = z[4 * j + i];
            const int h = i / 2;
            if constexpr (kMetrics) {
              if (x > best[h]) best[h] = x, best_column[h] = 8 * j + i % 2;
            }
            float y, derivative;
            if constexpr (capped.value) {
              y = 8 * j + i % 2 < left ? capped_exponent(x, from[h], derivative) : -INFINITY;
            } else {
              y = fmaf(x, factor, -from[h]);
            }
            x = exp2_fast(y);
            sum[h] += x;
            // A logit of -inf, of an excluded column or by the bias, has no entropy.
            if constexpr (kMetrics)
              entropy_sum[h] = fmaf(x, kPartialTiles ? fmaxf(y, -FLT_MAX) : y, entropy_sum[h]);
            if constexpr (capped.value) x *= derivative;
          }
        }
      };
      if (kTransform && transform.softcap != 0.0f) {
        if constexpr (kTransform) exponentials(std::true_type{});
      } else {
        exponentials(std::false_type{});
      }
      if (!write) continue;
      if (lane == 0) sm90::bulk_store_wait_read();
      __syncwarp();
      stage_half(z, half, lane, smem);
      async_fence();
      __syncwarp();
      if (lane == 0) sm90::bulk_store(rows + half * panel, smem.memory, 16 * sm90::kPanel * 2);
    }
    write_tile_results<Sum>(tile_sums, sum, tile, row, lane);
    if constexpr (kMetrics) {
      write_tile_results<Sum>(metrics.entropy_sums, entropy_sum, tile, row, lane);
      update_best_keys(best, best_column, tile, row, lane);
    }
    const bool too_large = !(sum[0] < kMaxRowSum) || !(sum[1] < kMaxRowSum);
    if (phase == Phase::kAll && too_large) overflow[tile.m0 / sm90::kTileM] = 1;
  }

 private:
  __device__ __forceinline__ void add_bias(float (&z)[sm90::kSums], const Tile& tile, int lane) const {
    const float2* const pairs = reinterpret_cast<const float2*>(transform.bias + tile.n0) + lane % 4;
#pragma unroll
    for (int j = 0; j < sm90::kTileN / 8; ++j) {
      const float2 b = __ldg(pairs + 4 * j);
#pragma unroll
      for (int h = 0; h < 2; ++h) z[4 * j + 2 * h] += b.x, z[4 * j + 2 * h + 1] += b.y;
    }
  }
  // The exponent of a logit after the softcap, and the derivative of the softcap: with u = z / softcap and
  // r = 1 / (1 + e^2u), tanh(u) = 1 - 2r, and its derivative is 4r (1 - r).
  __device__ __forceinline__ float capped_exponent(float z, float from, float& derivative) const {
    const float r = reciprocal_fast(1.0f + exp2_fast(z * (2.0f * kLog2e / transform.softcap)));
    derivative = fmaf(-4.0f * r, r, 4.0f * r);
    return fmaf(fmaf(-2.0f, r, 1.0f), transform.softcap * factor, -from);
  }
  // The logits of columns from `left` on become -inf, if panel `half` of the tile has any.
  static __device__ __forceinline__ void exclude_beyond(int left, float (&z)[sm90::kSums], int half,
                                                        int lane) {
    if (left >= (half + 1) * sm90::kPanel) return;
    constexpr int kPerPanel = sm90::kSums * sm90::kPanel / sm90::kTileN;
#pragma unroll
    for (int i = half * kPerPanel; i < (half + 1) * kPerPanel; ++i) {
      if (i / 4 * 8 + lane % 4 * 2 + i % 2 >= left) z[i] = -INFINITY;
    }
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
        out_results[static_cast<int64_t>(r) * columns() + tile.n0 / sm90::kTileN] = value[h];
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

struct GradInput {
  ChunkRows chunk;
  int vocab, hidden;
  int rows_in_first;      // of the panels
  int k_splits;           // of the vocabulary, so that small chunks fill the device
  const float* scale;     // of the rows of the chunk
  const OneHot* one_hot;  // of the rows of the chunk
  const __nv_bfloat16* weight;
  int64_t weight_stride;
  __nv_bfloat16* out;  // (chunk.rows, hidden)
  float* partial;      // (k_splits, chunk.rows, hidden) partial sums, if k_splits > 1
  RankOneTerm smoothing;
};

template <bool kPartialTiles>
struct GradInputEpilogue : GradInput {
  struct Operands {};
  __device__ __forceinline__ void prefetch(const Tile&, int, int, const sm90::EpilogueSmem&) const {}
  __device__ __forceinline__ Operands load(const Tile&, int, int) const { return {}; }
  static constexpr bool kAMn = false, kBMn = true, kPanels = true, kNarrowTiles = kPartialTiles;
  static constexpr CacheHint kHintA = CacheHint::kNormal, kHintB = CacheHint::kNormal;

  __device__ __forceinline__ bool is_narrow(const Tile& tile) const {
    return hidden - tile.n0 <= sm90::kTileN / 2;
  }
  __device__ __forceinline__ int columns() const {
    return kPartialTiles ? sm90::column_tiles(hidden) : hidden / sm90::kTileN;
  }
  __device__ __forceinline__ int row_pairs() const {
    return ceil_div(chunk(), sm90::kCluster * sm90::kTileM);
  }
  __device__ __forceinline__ int tiles() const { return row_pairs() * columns() * k_splits; }
  __device__ __forceinline__ Tile tile(int t, int rank) const {
    const int pairs = row_pairs(), blocks = ceil_div(vocab, sm90::kTileK);
    const int k_split = t / (pairs * columns());
    const TileIndex at = swizzled_tile(t % (pairs * columns()), pairs, columns());
    const int begin = static_cast<int>(int64_t{blocks} * k_split / k_splits);
    const int end = static_cast<int>(int64_t{blocks} * (k_split + 1) / k_splits);
    return {(at.across * sm90::kCluster + rank) * sm90::kTileM, at.along * sm90::kTileN, begin * sm90::kTileK,
            end - begin, k_split};
  }

  __device__ __forceinline__ void store(float (&sums)[sm90::kSums], Operands, const Tile& tile, int row,
                                        int lane, const sm90::EpilogueSmem& smem) const {
    const int count = chunk();
    const TileWidth<kPartialTiles> width(tile, hidden);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int r = tile.m0 + row + lane / 4 + 8 * h;
      const bool valid = r < count;
      if (k_splits > 1) {
        float* const at =
            partial + (int64_t{tile.k_split} * chunk.rows + r) * hidden + tile.n0 + lane % 4 * 2;
#pragma unroll
        for (int j = 0; j < sm90::kTileN / 8; ++j) {
          if (valid && width.has(8 * j)) {
            *reinterpret_cast<float2*>(at + 8 * j) =
                make_float2(sums[4 * j + 2 * h], sums[4 * j + 2 * h + 1]);
          }
        }
        continue;
      }
      const float factor = valid ? scale[r] : 0.0f;
#pragma unroll
      for (int j = 0; j < sm90::kTileN / 8; ++j)
        sums[4 * j + 2 * h] *= factor, sums[4 * j + 2 * h + 1] *= factor;
      const OneHot target = valid ? one_hot[r] : OneHot{0.0f, -1};
      if (target.index >= 0)
        subtract_row(sums, h, target.amount, weight + target.index * weight_stride + tile.n0, lane, width);
      if (smoothing.vector != nullptr && valid)
        subtract_rank_one(sums, h, smoothing.amount_of(r), smoothing.vector + tile.n0, lane);
    }
    if (k_splits > 1) return;
    const int first = tile.m0 + row;
    write_rows(sums, out + int64_t{first} * hidden + tile.n0, hidden, count - first, lane, width);
  }
};

// The same epilogue for an operand A that is row-major instead of in panels.
template <class Epilogue>
struct OfMatrix : Epilogue {
  static constexpr bool kPanels = false;
};

}  // namespace liger::linear_ce
