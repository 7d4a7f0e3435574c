// The epilogue of the logits GEMM for gemm_kernel_pingpong: bfloat16 only.
#pragma once

#include <algorithm>

#include "linear_ce/sm90/exponentials.cuh"
#include "linear_ce/sm90/gemm_pingpong.cuh"

namespace liger::linear_ce {

// ExpEpilogue for a warp with 16 rows in each half of a tile. Panels have 128 columns and tiles 192, so exponentials are
// stored in boxes of 64 columns, half a row of a panel. Rows and panels beyond the chunk are clipped by TMA.
template <sm90::LogitsWork kWork, bool kPartialTiles>
struct PingpongExpEpilogue : ExpEpilogue<__nv_bfloat16, kWork.metrics, kPartialTiles, kWork.transform(),
                                         kWork.squares, sm90::kPingpongColumns> {
  static_assert(!kWork.float16, "shifts of float16 are per panel, and a tile may have half of one");
  using T = __nv_bfloat16;
  using Base =
      ExpEpilogue<T, kWork.metrics, kPartialTiles, kWork.transform(), kWork.squares, sm90::kPingpongColumns>;
  using Base::kColumns, Base::chunk, Base::vocab, Base::out, Base::write, Base::overflow, Base::phase,
      Base::transform;
  using Maps = sm90::OverlappedMaps;
  using typename Base::Operands;
  static constexpr int kHalves = sm90::kPingpongHalves;
  static constexpr bool kMayBeNarrow = false;
  // Behind the box is the bias of the tile.
  static constexpr int kSmemBytes = sm90::kResultBoxBytes + (kWork.bias ? kColumns * int{sizeof(float)} : 0);

  __device__ __forceinline__ int columns_of(const Tile&) const { return kColumns; }
  __device__ __forceinline__ Operands prefetch(const Tile& tile, int, int lane,
                                               const sm90::EpilogueSmem& smem) const {
    if constexpr (kWork.bias) load_bias(tile, lane, smem);
    return {};
  }

  __device__ __forceinline__ void store(float (&z)[kHalves][sm90::kSums], const Operands&, const Tile& tile,
                                        int row, int lane, const sm90::EpilogueSmem& smem,
                                        const Maps& maps) const {
    asm volatile("" : "+r"(lane), "+r"(row));
    if (tile.m0 >= chunk()) return;
    if (phase != Phase::kAll && !overflow[tile.m0 / sm90::kTileM]) return;
    if constexpr (kWork.bias) {
      sm90::copy_async_wait();
      __syncwarp();
    }
#pragma unroll
    for (int half = 0; half < kHalves; ++half)
      store_half(z[half], tile, row + half * sm90::kBox, lane, smem, maps.results);
  }

 private:
  // row: the first row of this warp in the half.
  __device__ __forceinline__ void store_half(float (&z)[sm90::kSums], const Tile& tile, int row, int lane,
                                             const sm90::EpilogueSmem& smem,
                                             const CUtensorMap (&maps)[2]) const {
    if (phase == Phase::kMaxima) {
      if constexpr (kWork.bias) add_bias(z, 0, kColumns, lane, smem);
      return Base::write_maxima(z, tile, row, lane);
    }
    float from[2], sum[2] = {}, entropy_sum[2] = {}, square_sum[2] = {}, best[2] = {-INFINITY, -INFINITY};
    int best_column[2] = {};
    const LaneSums sums{sum, entropy_sum, square_sum, best, best_column};
#pragma unroll
    for (int h = 0; h < 2; ++h) from[h] = Base::reference_of(tile.m0 + row + lane / 4 + 8 * h) * kLog2e;
    // Without partial panels a box is inside of the vocabulary or beyond it; with one, its boxes are written to its end.
    const int end = kPartialTiles ? round_up(vocab, sm90::kPanel) : vocab;
#pragma unroll
    for (int first = 0; first < kColumns; first += sm90::kBox) {
      if (tile.n0 + first >= end) break;
      if constexpr (kWork.bias) add_bias(z, first, sm90::kBox, lane, smem);
      if constexpr (kPartialTiles) Base::exclude_beyond(vocab - tile.n0, z, first, sm90::kBox, lane);
      Base::template exponentials_of<kWork.softcap>(z, first, sm90::kBox, from, tile, lane, sums);
      if (!write) continue;
      wait_for_store(lane);
      stage_box(z, first, lane, smem);
      store_box(tile, tile.n0 + first, row, lane, smem, maps);
    }
    if constexpr (kPartialTiles) {
      if (write) clear_rest_of_panel(tile, row, lane, smem, maps);
    }
    Base::write_sums(sums, tile, row, lane);
  }

  // Copies the bias of the tile to shared memory, while its mainloop runs. The vector has zeros up to a multiple of kTileN;
  // the tile may end behind it, in columns that are beyond the vocabulary.
  //
  // No copy has a predicate, so some lanes repeat those of others: ptxas 13.0 encodes the second of two predicated ones
  // with a descriptor in an odd uniform register, an illegal instruction.
  __device__ __forceinline__ void load_bias(const Tile& tile, int lane,
                                            const sm90::EpilogueSmem& smem) const {
    sm90::copy_async_wait();  // for those of a tile whose results are not needed
    const int last = round_up(vocab, sm90::kTileN) - 4;
#pragma unroll
    for (int i = 0; i < kColumns; i += 32 * 4) {
      const int column = i + lane * 4 % std::min(kColumns - i, 32 * 4);
      copy_async(
          reinterpret_cast<Vec<float, 4>*>(smem.memory + sm90::kResultBoxBytes + column * sizeof(float)),
          transform.bias + min(tile.n0 + column, last));
    }
  }
  static __device__ __forceinline__ void add_bias(float (&z)[sm90::kSums], int first, int count, int lane,
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
  // Until the box before has been read from shared memory.
  static __device__ __forceinline__ void wait_for_store(int lane) {
    if (lane == 0) sm90::bulk_store_wait_read();
    __syncwarp();
  }
  // Vectors of 16 bytes of a row are swizzled: vector v of row r is v ^ r % 8.
  static __device__ __forceinline__ void stage_box(const float (&z)[sm90::kSums], int first, int lane,
                                                   const sm90::EpilogueSmem& smem) {
    const int r = lane % 16, odd = lane / 16;
    T* const row = reinterpret_cast<T*>(smem.memory) + r * sm90::kBox;
#pragma unroll
    for (int v = 0; v < sm90::kBox / 8; v += 2)
      stage_vectors<T>(z, first / 2 + 4 * v, row + (((v + odd) ^ r) & 7) * 8);
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
  // The last panel may end 64 columns behind the last tile.
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
};

}  // namespace liger::linear_ce
