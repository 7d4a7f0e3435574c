// The products of a chunk of fused_linear_ce on compute capability 9.0, each with an epilogue that does the
// work which would otherwise take a pass over memory:
//
// - Exponentials: exp(input @ weight.T - reference) and its sums per row and tile. The reference is the logit
//   of the target, known before the product, so no maximum has to be found first: bf16 has the exponents of
//   float32, and a row whose maximum is too far above its target is repaired (see kFarthest).
// - GradInput: (exponentials @ weight) * scale of the row.
// - GradWeight (fused_linear_ce_sm90_weight.cuh): exponentials.T @ (scale * input), summed over chunks in the
//   memory of the final bf16 gradient, in 16 bits that round 8 times finer.
//
// Between them apply_rule (fused_linear_ce_sm90_rows.cuh) turns sums into losses and scales. The one-hot part
// of the gradient is most of it where a model does not know the answer yet, so it does not go through factors
// that are rounded to bf16: both epilogues add it in float32, from the rows of weight and input themselves.
#pragma once

#include "cross_entropy/rule.cuh"
#include "device/integers.h"
#include "linear_ce/sm90/gemm.cuh"

namespace liger::flce90 {

using sm90::Keep;
using sm90::Tile;

// A sum of exponentials beyond this is recomputed from the maximum of the row: 2^60 is a target 41 nats below
// the largest logit. Below, neither exponentials nor scales leave the range in which bf16 is normal.
inline constexpr float kFarthest = 0x1p60f;

// Where the exponentials of a chunk lie: in panels of 128 columns, each with its rows one after the other,
// and in up to two places. Panels make it possible that those of the first chunk lie in the memory of the
// weight gradient, which is written when they have been read: as many rows of a panel as fit are just the
// rows of the gradient that its columns stand for.
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
    return row_at(row, column) + place(row, column % sm90::kPanel);
  }
  // Within a row: its vectors of 8 lie as the matrix units want them in shared memory, so that rows go there
  // and back as they are.
  static __device__ __forceinline__ int place(int row, int column) {
    return (column & 64) + (((column >> 3) ^ row) & 7) * 8 + (column & 7);
  }
};

// Clusters work on neighbouring tiles of a grid of `wide` x `length`, and all of them at the same place of
// the summed dimension. So what they read at a time comes once from memory if they are in bands: kBand tiles
// wide, and about as long. And a band as a whole reads its wide side once, if L2 keeps that.
inline constexpr int kBand = 8;
struct Place {
  int across, along;
};
__device__ __forceinline__ Place place_in_bands(int t, int wide, int length, int band = kBand) {
  const int first = t / (band * length) * band;
  const int width = min(band, wide - first), within = t - first * length;
  return {first + within % width, within / width};
}

// How many of the rows of this chunk there are: compacted rows end at a count that only the device knows.
struct ChunkRows {
  const int* count;  // of the whole batch
  int first, rows;   // of the chunk; rows is a bound
  __device__ __forceinline__ int operator()() const { return max(0, min(rows, *count - first)); }
};

__device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
  uint32_t word;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  return word;
}

// Half of a warp's sums (16 rows of 128 columns, a panel), rounded to bf16, to its desk: rows of 256 bytes,
// in which the vectors of 8 lie as Panels::place() says.
__device__ __forceinline__ void lay_out_half(const float (&sums)[sm90::kSums], int half, int lane,
                                             const sm90::Desk& desk) {
  // Lane 8m + r addresses row r of matrix m: of the upper or lower 8 rows, and of a vector or the one after
  // it.
  const int row = lane % 16, odd = lane / 16;
  constexpr int kVectors = sm90::kPanel / 8;
#pragma unroll
  for (int v = 0; v < kVectors; v += 2) {
    const int j = 4 * (half * kVectors + v);
    sm90::store_matrices(reinterpret_cast<__nv_bfloat16*>(desk.memory) + row * sm90::kPanel +
                             Panels::place(row, (v + odd) * 8),
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

// The target of a row in the gradient: what is subtracted at its class, and for which class.
struct OneHot {
  float amount;
  int place;  // the class of a row, or the row of a class; -1: none
};
static_assert(sizeof(OneHot) == 8);

// sums of this lane's row h -= amount * from[0..255], of which the lane has the columns of its sums.
__device__ __forceinline__ void subtract_row(float (&sums)[sm90::kSums], int h, float amount,
                                             const __nv_bfloat16* from, int lane) {
  const uint32_t* const pairs = reinterpret_cast<const uint32_t*>(from) + lane % 4;
  uint32_t words[sm90::kTileN / 8];
#pragma unroll
  for (int j = 0; j < sm90::kTileN / 8; ++j) words[j] = __ldg(pairs + 4 * j);
#pragma unroll
  for (int j = 0; j < sm90::kTileN / 8; ++j) {
    float &low = sums[4 * j + 2 * h], &high = sums[4 * j + 2 * h + 1];
    low = fmaf(-amount, __uint_as_float(words[j] << 16), low);
    high = fmaf(-amount, __uint_as_float(words[j] & 0xffff0000u), high);
  }
}

// A warp's sums, rounded to bf16, to the first `count` of its 16 rows in memory: 64 bytes of 8 rows at a
// time. (Longer pieces of fewer rows, by way of the desk, took longer.)
__device__ __forceinline__ void write_rows(const float (&sums)[sm90::kSums], __nv_bfloat16* out,
                                           int64_t stride, int count, int lane) {
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
      if (row < count) *reinterpret_cast<uint4*>(at + 32 * i) = make_uint4(w[0], w[1], w[2], w[3]);
    }
  }
}

// Two more launches repair what kAll found too large; as a rule they find nothing to do. kMaxima: of the
// logits of a row, which become its reference; kRepair: all of it again, from there.
enum class Phase { kAll, kMaxima, kRepair };

// What the exponentials of a row can tell beside their sum, for metrics.
struct Observed {
  float* spread;             // (rows, tiles of columns): the sums of e * log2(e)
  unsigned long long* best;  // of the rows: the largest key of its logits; zero at first
};
// Keys are in the order of logits, and those of equal logits in the opposite order of their columns. So the
// largest one is the same in whatever order tiles come.
__device__ __forceinline__ unsigned long long key_of(float logit, int column) {
  const uint32_t bits = __float_as_uint(logit + 0.0f);  // -0 and 0 are equal
  const uint32_t rising = bits ^ (bits >> 31 ? 0xffffffffu : 0x80000000u);
  return static_cast<unsigned long long>(rising) << 32 | static_cast<uint32_t>(~column);
}
__device__ __forceinline__ int column_of_key(unsigned long long key) {
  return static_cast<int>(~static_cast<uint32_t>(key));
}

template <bool kObserve>
struct Exponentials {
  struct Early {};
  __device__ __forceinline__ void fetch(const Tile&, int, int, const sm90::Desk&) const {}
  __device__ __forceinline__ Early early(const Tile&, int, int) const { return {}; }
  static constexpr bool kAMn = false, kBMn = false, kPanels = false;
  static constexpr Keep kKeepA = Keep::kLong, kKeepB = Keep::kNormal;
  ChunkRows chunk;
  int vocab, hidden;
  float factor;            // from logits to powers of two: log2(e) over the temperature
  const float* reference;  // of the rows of the chunk, over the temperature
  float* parts;            // (rows, tiles of columns): the sums, or the maxima of the logits
  Panels out;
  bool wanted;        // or only the sums are
  int* repair;        // per tile of rows, set where a sum is too large
  Phase phase;        // other than kAll: for such tiles only
  Observed observed;  // with kObserve

  __device__ __forceinline__ int columns() const { return ceil_div(vocab, sm90::kTileN); }
  __device__ __forceinline__ int row_pairs() const {
    return ceil_div(chunk(), sm90::kCluster * sm90::kTileM);
  }
  __device__ __forceinline__ int tiles() const {
    if (phase != Phase::kAll) {
      int any = 0;
      for (int i = 0; i < sm90::kCluster * row_pairs(); ++i) any |= repair[i];
      if (!any) return 0;
    }
    return row_pairs() * columns();
  }
  __device__ __forceinline__ Tile tile(int t, int rank) const {
    const Place at = place_in_bands(t, row_pairs(), columns());
    return {(at.across * sm90::kCluster + rank) * sm90::kTileM, at.along * sm90::kTileN, 0,
            ceil_div(hidden, sm90::kTileK), 0};
  }

  __device__ __forceinline__ void finish(float (&z)[sm90::kSums], Early, const Tile& tile, int row, int lane,
                                         const sm90::Desk& desk) const {
    if (tile.m0 >= chunk()) return;
    if (phase != Phase::kAll && !repair[tile.m0 / sm90::kTileM]) return;
    if (phase == Phase::kMaxima) {
      float max[2] = {-INFINITY, -INFINITY};
#pragma unroll
      for (int i = 0; i < sm90::kSums; ++i) {
        const bool inside = tile.n0 + i / 4 * 8 < vocab;
        if (inside) max[i / 2 % 2] = fmaxf(max[i / 2 % 2], z[i]);
      }
      write_parts<Max>(parts, max, tile, row, lane);
      return;
    }
    float from[2], sum[2] = {0.0f, 0.0f}, spread[2] = {0.0f, 0.0f};
    float best[2] = {-INFINITY, -INFINITY};
    int best_column[2] = {0, 0};  // from this lane's first one on
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int r = tile.m0 + row + lane / 4 + 8 * h;
      from[h] = (r < chunk.rows ? reference[r] : 0.0f) * kLog2e;
    }
    __nv_bfloat16* const rows = wanted ? out.row_at(tile.m0 + row, tile.n0) : nullptr;
    const int64_t panel = out.stride[tile.m0 >= out.rows_in_first];
    constexpr int kVectors = sm90::kPanel / 8;
#pragma unroll
    for (int half = 0; half < sm90::kTileN / sm90::kPanel; ++half) {
      if (tile.n0 + half * sm90::kPanel >= vocab) break;
#pragma unroll
      for (int j = half * kVectors; j < (half + 1) * kVectors; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          float& x = z[4 * j + i];
          const int h = i / 2;
          if constexpr (kObserve) {
            if (x > best[h]) best[h] = x, best_column[h] = 8 * j + i % 2;
          }
          const float y = fmaf(x, factor, -from[h]);
          x = exp2_fast(y);
          sum[h] += x;
          // 0 * -inf is no matter: without a bias, logits are infinite only where operands are.
          if constexpr (kObserve) spread[h] = fmaf(x, y, spread[h]);
        }
      }
      if (!wanted) continue;
      if (lane == 0) sm90::bulk_store_wait_read();
      __syncwarp();
      lay_out_half(z, half, lane, desk);
      async_fence();
      __syncwarp();
      if (lane == 0) sm90::bulk_store(rows + half * panel, desk.memory, 16 * sm90::kPanel * 2);
    }
    write_parts<Sum>(parts, sum, tile, row, lane);
    if constexpr (kObserve) {
      write_parts<Sum>(observed.spread, spread, tile, row, lane);
      raise_best(best, best_column, tile, row, lane);
    }
    const bool too_large = !(sum[0] < kFarthest) || !(sum[1] < kFarthest);
    if (phase == Phase::kAll && too_large) repair[tile.m0 / sm90::kTileM] = 1;
  }

 private:
  // Of the quad of lanes that share a row, which all get the result.
  template <class Reduction>
  __device__ __forceinline__ void write_parts(float* out_parts, float (&part)[2], const Tile& tile, int row,
                                              int lane) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      part[h] = warp_reduce<Reduction, 4>(part[h]);
      const int r = tile.m0 + row + lane / 4 + 8 * h;
      if (lane % 4 == 0 && r < chunk.rows)
        out_parts[static_cast<int64_t>(r) * columns() + tile.n0 / sm90::kTileN] = part[h];
    }
  }
  __device__ __forceinline__ void raise_best(const float (&best)[2], const int (&column)[2], const Tile& tile,
                                             int row, int lane) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      unsigned long long key = key_of(best[h], tile.n0 + lane % 4 * 2 + column[h]);
#pragma unroll
      for (int offset = 2; offset > 0; offset /= 2) key = max(key, __shfl_xor_sync(0xffffffffu, key, offset));
      const int r = tile.m0 + row + lane / 4 + 8 * h;
      if (lane % 4 == 0 && r < chunk.rows) atomicMax(observed.best + r, key);
    }
  }
};

struct GradInput {
  struct Early {};
  __device__ __forceinline__ void fetch(const Tile&, int, int, const sm90::Desk&) const {}
  __device__ __forceinline__ Early early(const Tile&, int, int) const { return {}; }
  static constexpr bool kAMn = false, kBMn = true, kPanels = true;
  static constexpr Keep kKeepA = Keep::kNormal, kKeepB = Keep::kNormal;
  ChunkRows chunk;
  int vocab, hidden;
  int rows_in_first;      // of the exponentials
  int parts;              // of the vocabulary, so that small chunks fill the device
  const float* scale;     // of the rows of the chunk
  const OneHot* one_hot;  // of the rows of the chunk
  const __nv_bfloat16* weight;
  int64_t weight_stride;
  __nv_bfloat16* out;  // (chunk.rows, hidden)
  float* partial;      // (parts, chunk.rows, hidden), with more than one part

  __device__ __forceinline__ int columns() const { return hidden / sm90::kTileN; }
  __device__ __forceinline__ int row_pairs() const {
    return ceil_div(chunk(), sm90::kCluster * sm90::kTileM);
  }
  __device__ __forceinline__ int tiles() const { return row_pairs() * columns() * parts; }
  __device__ __forceinline__ Tile tile(int t, int rank) const {
    const int pairs = row_pairs(), blocks = ceil_div(vocab, sm90::kTileK);
    const int part = t / (pairs * columns());
    const Place at = place_in_bands(t % (pairs * columns()), pairs, columns());
    const int begin = static_cast<int>(int64_t{blocks} * part / parts);
    const int end = static_cast<int>(int64_t{blocks} * (part + 1) / parts);
    return {(at.across * sm90::kCluster + rank) * sm90::kTileM, at.along * sm90::kTileN, begin * sm90::kTileK,
            end - begin, part};
  }

  __device__ __forceinline__ void finish(float (&sums)[sm90::kSums], Early, const Tile& tile, int row,
                                         int lane, const sm90::Desk& desk) const {
    const int count = chunk();
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int r = tile.m0 + row + lane / 4 + 8 * h;
      const bool there = r < count;
      if (parts > 1) {
        float* const at = partial + (int64_t{tile.part} * chunk.rows + r) * hidden + tile.n0 + lane % 4 * 2;
#pragma unroll
        for (int j = 0; j < sm90::kTileN / 8; ++j) {
          if (there) {
            *reinterpret_cast<float2*>(at + 8 * j) =
                make_float2(sums[4 * j + 2 * h], sums[4 * j + 2 * h + 1]);
          }
        }
        continue;
      }
      const float factor = there ? scale[r] : 0.0f;
#pragma unroll
      for (int j = 0; j < sm90::kTileN / 8; ++j)
        sums[4 * j + 2 * h] *= factor, sums[4 * j + 2 * h + 1] *= factor;
      const OneHot target = there ? one_hot[r] : OneHot{0.0f, -1};
      if (target.place >= 0)
        subtract_row(sums, h, target.amount, weight + target.place * weight_stride + tile.n0, lane);
    }
    if (parts > 1) return;
    const int first = tile.m0 + row;
    write_rows(sums, out + int64_t{first} * hidden + tile.n0, hidden, count - first, lane);
  }
};

// A job whose first operand is a matrix and not in panels.
template <class Job>
struct OfMatrix : Job {
  static constexpr bool kPanels = false;
};

}  // namespace liger::flce90
