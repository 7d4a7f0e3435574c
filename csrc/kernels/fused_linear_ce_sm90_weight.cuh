// The weight gradient of fused_linear_ce on compute capability 9.0, summed over chunks.
#pragma once

#include "kernels/fused_linear_ce_sm90.cuh"

namespace liger::flce90 {

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

}  // namespace liger::flce90
