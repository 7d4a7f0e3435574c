// The three products of a chunk of fused_linear_ce on compute capability 9.0, each with an epilogue that does
// the work which would otherwise take a pass over memory:
//
//   Exponentials   exp(input @ weight.T - reference) and its sums per row and tile. The reference is the
//   logit of the
//                  target, known before the product, so no maximum has to be found first: bf16 has the
//                  exponents of float32, and a row whose maximum is too far above its target is repaired (see
//                  kFarthest).
//   GradInput      (exponentials @ weight) * scale of the row
//   GradWeight     exponentials.T @ (scale * input), added to a sum of 20 bits per element: the memory of the
//   final
//                  bf16 gradient and 4 more bits.
//
// Between them apply_rule turns sums into losses and scales, and puts the one-hot part into the exponentials.
#pragma once

#include "kernels/cross_entropy_rule.cuh"
#include "kernels/gemm_sm90.cuh"

namespace liger::flce90 {

using sm90::Keep;
using sm90::Tile;

// A sum of exponentials beyond this is recomputed from the maximum of the row: 2^60 is a target 41 nats below
// the largest logit. Below, neither exponentials nor scales leave the range in which bf16 is normal.
inline constexpr float kFarthest = 0x1p60f;

struct RowPart {
  float sum, max;  // of exp(z - reference), and of z, over the columns of a tile
};

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

__device__ __forceinline__ int ceil_div(int a, int b) {
  return (a + b - 1) / b;
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

struct Exponentials {
  struct Early {};
  __device__ __forceinline__ void fetch(const Tile&, int, int, const sm90::Desk&) const {}
  __device__ __forceinline__ Early early(const Tile&, int, int) const { return {}; }
  static constexpr bool kAMn = false, kBMn = false, kPanels = false;
  static constexpr Keep kKeepA = Keep::kLong, kKeepB = Keep::kNormal;
  ChunkRows chunk;
  int vocab, hidden;
  const float* reference;  // of the rows of the chunk
  RowPart* parts;          // (rows, tiles of columns)
  Panels out;
  bool wanted;     // or only the sums are
  int* repair;     // per tile of rows, set where a sum is too large
  bool repairing;  // compute only such tiles, from the maximum

  __device__ __forceinline__ int columns() const { return ceil_div(vocab, sm90::kTileN); }
  __device__ __forceinline__ int row_pairs() const {
    return ceil_div(chunk(), sm90::kCluster * sm90::kTileM);
  }
  __device__ __forceinline__ int tiles() const {
    if (repairing) {
      int any = 0;
      for (int i = 0; i < sm90::kCluster * row_pairs(); ++i) any |= repair[i];
      if (!any) return 0;
    }
    return row_pairs() * columns();
  }
  // Pairs of rows first: a slice of the weight serves all rows before the next one is read.
  __device__ __forceinline__ Tile tile(int t, int rank) const {
    const int pairs = row_pairs();
    return {(t % pairs * sm90::kCluster + rank) * sm90::kTileM, t / pairs * sm90::kTileN, 0,
            ceil_div(hidden, sm90::kTileK), 0};
  }

  __device__ __forceinline__ float repaired_reference(int row) const {
    float max = -INFINITY;
    for (int i = 0; i < columns(); ++i)
      max = fmaxf(max, parts[static_cast<int64_t>(row) * columns() + i].max);
    return ce::reference_of(max);
  }

  __device__ __forceinline__ void finish(float (&z)[sm90::kSums], Early, const Tile& tile, int row, int lane,
                                         const sm90::Desk& desk) const {
    if (tile.m0 >= chunk()) return;
    if (repairing && !repair[tile.m0 / sm90::kTileM]) return;
    float from[2], sum[2] = {0.0f, 0.0f}, max[2] = {-INFINITY, -INFINITY};
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int r = tile.m0 + row + lane / 4 + 8 * h;
      from[h] = (r >= chunk.rows ? 0.0f : repairing ? repaired_reference(r) : reference[r]) * ce::kLog2e;
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
          max[i / 2] = fmaxf(max[i / 2], x);
          x = ce::exp2_fast(fmaf(x, ce::kLog2e, -from[i / 2]));
          sum[i / 2] += x;
        }
      }
      if (!wanted) continue;
      if (lane == 0) sm90::bulk_store_wait_read();
      __syncwarp();
      lay_out_half(z, half, lane, desk);
      sm90::async_fence();
      __syncwarp();
      if (lane == 0) sm90::bulk_store(rows + half * panel, desk.memory, 16 * sm90::kPanel * 2);
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
      for (int lanes = 1; lanes < 4; lanes *= 2) {
        sum[h] += __shfl_xor_sync(0xffffffffu, sum[h], lanes);
        max[h] = fmaxf(max[h], __shfl_xor_sync(0xffffffffu, max[h], lanes));
      }
      const int r = tile.m0 + row + lane / 4 + 8 * h;
      if (lane % 4 == 0 && r < chunk.rows) {
        parts[static_cast<int64_t>(r) * columns() + tile.n0 / sm90::kTileN] = {sum[h], max[h]};
        if (!repairing && !(sum[h] < kFarthest)) repair[tile.m0 / sm90::kTileM] = 1;
      }
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
  int rows_in_first;   // of the exponentials
  int parts;           // of the vocabulary, so that small chunks fill the device
  const float* scale;  // of the rows of the chunk
  __nv_bfloat16* out;  // (chunk.rows, hidden)
  float* partial;      // (parts, chunk.rows, hidden), with more than one part

  __device__ __forceinline__ int columns() const { return hidden / sm90::kTileN; }
  __device__ __forceinline__ int row_pairs() const {
    return ceil_div(chunk(), sm90::kCluster * sm90::kTileM);
  }
  __device__ __forceinline__ int tiles() const { return row_pairs() * columns() * parts; }
  __device__ __forceinline__ Tile tile(int t, int rank) const {
    const int pairs = row_pairs(), blocks = ceil_div(vocab, sm90::kTileK);
    const int part = t / (pairs * columns()), within = t % (pairs * columns());
    const int begin = static_cast<int>(int64_t{blocks} * part / parts);
    const int end = static_cast<int>(int64_t{blocks} * (part + 1) / parts);
    return {(within % pairs * sm90::kCluster + rank) * sm90::kTileM, within / pairs * sm90::kTileN,
            begin * sm90::kTileK, end - begin, part};
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
    }
    if (parts > 1) return;
    const int first = tile.m0 + row;
    write_rows(sums, out + int64_t{first} * hidden + tile.n0, hidden, count - first, lane);
  }
};

// Sums of 20 bits: the upper 16 lie in the memory of the final gradient, in an order of their own. Each warp
// uses the 512 bytes that its tile has in each of its 16 rows: piece s of the 16 holds sums 8s to 8s + 7 of
// all lanes. The last chunk rounds to bf16 and puts the elements where they belong. Without kLow, sums of 16
// bits.
template <bool kLow>
struct GradWeight {
  static constexpr bool kAMn = true, kBMn = true, kPanels = true;
  static constexpr Keep kKeepA = Keep::kNormal, kKeepB = Keep::kLong, kKeepSums = Keep::kNormal;
  static constexpr int kPieces = 16, kEarly = 8;  // of which so many go to registers, the others to the desk
  struct Early {
    uint4 high[kEarly], low[kPieces / 4];
  };
  ChunkRows chunk;
  int vocab, hidden;
  int rows_in_first;   // of the exponentials
  __nv_bfloat16* out;  // (vocab, hidden), contiguous
  char* low;           // 4 bits per element, in the order of the tiles
  int64_t low_stride;  // bytes from one tile of rows to the next
  bool first, last;    // chunk
  // Where the exponentials lie in the memory that sums are written to, `slack` panels behind the place of
  // their own rows: per tile of rows a counter, zero at first, of the blocks that have read its exponentials.
  // Else null.
  int* readers;
  int slack;

  __device__ __forceinline__ int columns() const { return hidden / sm90::kTileN; }
  __device__ __forceinline__ int tiles() const {
    // With no rows at all the gradient still has to become zeros, and sums have to become a gradient.
    if (chunk() == 0 && !first && !last) return 0;
    return ceil_div(vocab, sm90::kCluster * sm90::kTileM) * columns();
  }
  __device__ __forceinline__ Tile tile(int t, int rank) const {
    return {(t / columns() * sm90::kCluster + rank) * sm90::kTileM, t % columns() * sm90::kTileN, 0,
            ceil_div(chunk(), sm90::kTileK), 0};
  }

  __device__ __forceinline__ void fetch(const Tile& tile, int row, int lane, const sm90::Desk& desk) const {
    if (first || tile.m0 + row >= vocab) return;
    const uint4* const from = high_of(tile, row, lane);
    uint4* const to = reinterpret_cast<uint4*>(desk.memory) + lane;
    static_assert((kPieces - kEarly) * 32 * sizeof(uint4) == sm90::kDeskBytes);
#pragma unroll
    for (int i = kEarly; i < kPieces; ++i)
      sm90::copy_async(to + (i - kEarly) * 32, from + i * piece(), kKeepSums);
  }
  __device__ __forceinline__ Early early(const Tile& tile, int row, int lane) const {
    Early e{};
    if (first || tile.m0 + row >= vocab) return e;
    const uint4* const high = high_of(tile, row, lane);
    [[maybe_unused]] const uint4* const rest = low_of(tile, row, lane);
#pragma unroll
    for (int i = 0; i < kEarly; ++i) e.high[i] = sm90::load_keeping(high + i * piece(), kKeepSums);
    if constexpr (kLow) {
#pragma unroll
      for (int i = 0; i < kPieces / 4; ++i) e.low[i] = sm90::load_keeping(rest + i * 32, kKeepSums);
    }
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
    uint4* const high = high_of(tile, row, lane);
    uint4* const rest = low_of(tile, row, lane);
    if (!first) {
      sm90::copy_async_wait();
      const uint4* const kept = reinterpret_cast<const uint4*>(desk.memory) + lane;
#pragma unroll
      for (int i = kPieces - 1; i >= 0; --i) {
        const uint4 h = i < kEarly ? e.high[i < kEarly ? i : 0] : kept[(i - kEarly) * 32];
        add(sums, 8 * i, h, kLow ? (&e.low[i / 4].x)[i % 4] : 0u);
      }
      __syncwarp();  // the desk is free
    }
    if (!last) {
#pragma unroll
      for (int i = 0; i < kPieces; i += 4) {
        uint4 l;
#pragma unroll
        for (int s = 0; s < 4; ++s)
          sm90::store_keeping(high + (i + s) * piece(), split(sums, 8 * (i + s), (&l.x)[s]), kKeepSums);
        if (kLow) sm90::store_keeping(rest + i / 4 * 32, l, kKeepSums);
      }
      return;
    }
    __syncwarp();  // all lanes have read their pieces
    write_rows(sums, out + (tile.m0 + row) * int64_t{hidden} + tile.n0, hidden, 16, lane);
  }

 private:
  __device__ __forceinline__ int piece() const { return hidden / 8; }  // from one to the next
  __device__ __forceinline__ uint4* high_of(const Tile& tile, int row, int lane) const {
    return reinterpret_cast<uint4*>(out + (tile.m0 + row) * int64_t{hidden} + tile.n0) + lane;
  }
  __device__ __forceinline__ uint4* low_of(const Tile& tile, int row, int lane) const {
    const int64_t bytes = sm90::kTileM * sm90::kTileN / 2;
    return reinterpret_cast<uint4*>(low + tile.m0 / sm90::kTileM * low_stride +
                                    tile.n0 / sm90::kTileN * bytes) +
           row * 8 + lane;
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

  // Integer instructions run at half the rate of those on floats, and all of this happens while the matrix
  // units wait. So: single byte permutations, and rounding by a multiplication.

  // sums[at..at + 7] += the numbers whose upper 16 bits are in `high` and whose next 4 are in `low`: byte i
  // of it has those of element i in its upper and those of element i + 4 in its lower half. Bits 0 to 7 do
  // not matter.
  static __device__ __forceinline__ void add(float (&sums)[sm90::kSums], int at, uint4 high, uint32_t low) {
    const uint32_t nibbles[2] = {low & 0xf0f0f0f0u, low << 4 & 0xf0f0f0f0u};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int byte = 4 + i % 4;
      sums[at + i] += __uint_as_float(
          __byte_perm((&high.x)[i / 2], nibbles[i / 4], (i % 2 ? 0x3200 : 0x1000) | byte << 4 | byte));
    }
  }
  // 20 bits are the sum cut off; so it grows by half of their last place before, on average over its
  // mantissas.
  static __device__ __forceinline__ uint4 split(const float (&sums)[sm90::kSums], int at, uint32_t& low) {
    uint4 high;
    if constexpr (!kLow) {
#pragma unroll
      for (int i = 0; i < 8; i += 2) (&high.x)[i / 2] = pack_bf16(sums[at + i], sums[at + i + 1]);
    } else {
      uint32_t u[8], nibbles[2];
#pragma unroll
      for (int i = 0; i < 8; ++i) u[i] = __float_as_uint(sums[at + i] * (1.0f + 0x1p-12f / 1.5f));
#pragma unroll
      for (int i = 0; i < 8; i += 2) (&high.x)[i / 2] = __byte_perm(u[i], u[i + 1], 0x7632);
#pragma unroll
      for (int i = 0; i < 8; i += 4) {
        nibbles[i / 4] =
            __byte_perm(__byte_perm(u[i], u[i + 1], 0x0051), __byte_perm(u[i + 2], u[i + 3], 0x0051), 0x5410);
      }
      low = (nibbles[0] & 0xf0f0f0f0u) | (nibbles[1] >> 4 & 0x0f0f0f0fu);
    }
    return high;
  }
};

// --- rows
// ----------------------------------------------------------------------------------------------------------

inline constexpr int kRowThreads = 256;

// One row per block: input rows of the chunk side by side, and the logit of the target of each. Rows beyond
// the count become zeros, so that whatever meets them stays finite. grid: rows of the chunk, rounded up to
// pairs of tiles.
struct Gather {
  ChunkRows chunk;
  const int* index;  // of the rows of the chunk
  ce::Targets targets;
  const __nv_bfloat16 *input, *weight;
  int64_t input_stride, weight_stride;
  int vocab, hidden;
  __nv_bfloat16* out;  // (chunk.rows, hidden)
  float* reference;    // one for each block
  int* repair;
};

__global__ void __launch_bounds__(kRowThreads) gather(const Gather p) {
  __shared__ float scratch[kRowThreads / 32];
  const int row = blockIdx.x, count = p.chunk();
  if (row % sm90::kTileM == 0 && threadIdx.x == 0) p.repair[row / sm90::kTileM] = 0;
  uint4* const out = reinterpret_cast<uint4*>(p.out + int64_t{row} * p.hidden);
  if (row >= count) {
    if (row < p.chunk.rows) {
      for (int i = threadIdx.x; i < p.hidden / 8; i += kRowThreads) out[i] = make_uint4(0, 0, 0, 0);
    }
    if (threadIdx.x == 0) p.reference[row] = 0.0f;
    return;
  }
  const int source = p.index[row];
  const int64_t target = p.targets[source];
  const bool valid = target >= 0 && target < p.vocab;
  const uint4* const x = reinterpret_cast<const uint4*>(p.input + source * p.input_stride);
  const uint4* const w = reinterpret_cast<const uint4*>(p.weight + (valid ? target : 0) * p.weight_stride);
  float sum = 0.0f;
  for (int i = threadIdx.x; i < p.hidden / 8; i += kRowThreads) {
    const uint4 a = x[i], b = w[i];
    out[i] = a;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const uint32_t u = (&a.x)[j], v = (&b.x)[j];
      sum = fmaf(__uint_as_float(u << 16), __uint_as_float(v << 16), sum);
      sum = fmaf(__uint_as_float(u & 0xffff0000u), __uint_as_float(v & 0xffff0000u), sum);
    }
  }
  sum = warp_reduce<Sum>(sum);
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x < 32) {
    sum = warp_reduce<Sum>(threadIdx.x < kRowThreads / 32 ? scratch[threadIdx.x] : 0.0f);
    if (threadIdx.x == 0) p.reference[row] = valid ? sum : 0.0f;
  }
}

// One row per block: sums -> loss and scale; the input row becomes scale * input where the weight gradient
// needs it.
struct Rule {
  ce::Problem problem;  // of the whole batch; logits are not set
  ChunkRows chunk;
  const int* index;
  const float* reference;
  const RowPart* parts;
  int columns;  // of parts
  const int* repair;
  Panels exponentials;
  bool wanted;           // or only the results are
  __nv_bfloat16* input;  // null where only sums, or only the input gradient, are wanted
  int hidden;
  float* scale;
};

__global__ void __launch_bounds__(kRowThreads) apply_rule(const Rule p) {
  __shared__ float scratch[2][kRowThreads / 32];
  const int row = blockIdx.x;
  if (row >= p.chunk()) return;
  float sum = 0.0f, max = -INFINITY;
  for (int i = threadIdx.x; i < p.columns; i += kRowThreads) {
    const RowPart part = p.parts[int64_t{row} * p.columns + i];
    sum += part.sum;
    max = fmaxf(max, part.max);
  }
  sum = warp_reduce<Sum>(sum);
  max = warp_reduce<Max>(max);
  if (threadIdx.x % 32 == 0) scratch[0][threadIdx.x / 32] = sum, scratch[1][threadIdx.x / 32] = max;
  __syncthreads();
  const int lane = threadIdx.x % 32;
  sum = warp_reduce<Sum>(lane < kRowThreads / 32 ? scratch[0][lane] : 0.0f);
  max = warp_reduce<Max>(lane < kRowThreads / 32 ? scratch[1][lane] : -INFINITY);

  const float z_target = p.reference[row];
  const bool repaired = p.repair[row / sm90::kTileM] != 0;
  const ce::Stats<false> stats = {repaired ? ce::reference_of(max) : z_target, sum};
  ce::Row r = {p.index[row], -1, NAN, 1.0f, NAN};
  if (p.problem.token_weight != nullptr) r.token_weight = p.problem.token_weight[r.index];
  const int64_t target = p.problem.targets[r.index];
  if (target >= 0 && target < p.problem.vocab) {
    r.target = static_cast<int>(target);
    r.class_weight = p.problem.class_weight != nullptr ? p.problem.class_weight[target] : 1.0f;
    r.z_target = z_target;
  }
  if (threadIdx.x == 0) ce::write_results(p.problem, r, stats);
  if (!p.wanted) return;

  const float share = r.token_weight / *p.problem.denominator;
  const ce::Gradient g =
      ce::gradient_weights(p.problem, r, stats.max + logf(stats.sum), share, stats.max, stats.sum);
  if (threadIdx.x == 0) {
    p.scale[row] = g.probability;
    if (r.target >= 0 && g.hard != 0.0f) {
      const float exact = ce::exp_from(z_target, stats.max);
      *p.exponentials.at(row, r.target) = __float2bfloat16_rn(exact - g.hard / g.probability);
    }
  }
  if (p.input == nullptr) return;
  uint4* const x = reinterpret_cast<uint4*>(p.input + int64_t{row} * p.hidden);
  for (int i = threadIdx.x; i < p.hidden / 8; i += kRowThreads) {
    uint4 v = x[i];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      uint32_t& word = (&v.x)[j];
      const float2 f = {__uint_as_float(word << 16), __uint_as_float(word & 0xffff0000u)};
      asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(f.y * g.probability), "f"(f.x * g.probability));
    }
    x[i] = v;
  }
}

// One row per block: the parts of a row of grad_input -> its place.
__global__ void __launch_bounds__(kRowThreads) add_parts(const GradInput p) {
  const int row = blockIdx.x;
  if (row >= p.chunk()) return;
  const float factor = p.scale[row];
  const int64_t step = int64_t{p.chunk.rows} * p.hidden / 4;
  const float4* const from = reinterpret_cast<const float4*>(p.partial + int64_t{row} * p.hidden);
  uint2* const to = reinterpret_cast<uint2*>(p.out + int64_t{row} * p.hidden);
  for (int i = threadIdx.x; i < p.hidden / 4; i += kRowThreads) {
    float4 sum = from[i];
    for (int part = 1; part < p.parts; ++part) {
      const float4 more = from[i + part * step];
      sum.x += more.x, sum.y += more.y, sum.z += more.z, sum.w += more.w;
    }
    uint2 packed;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed.x) : "f"(sum.y * factor), "f"(sum.x * factor));
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed.y) : "f"(sum.w * factor), "f"(sum.z * factor));
    to[i] = packed;
  }
}

}  // namespace liger::flce90
