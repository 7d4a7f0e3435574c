// The epilogue of the logits GEMM in pieces, for gemm_kernel_overlapped: bfloat16 only.
#pragma once

#include "linear_ce/sm90/exponentials.cuh"
#include "linear_ce/sm90/gemm_overlapped.cuh"

namespace liger::linear_ce {

// A piece is 16 columns, as many as one stmatrix writes. Panels have 128 columns and tiles 192, so exponentials are
// stored in boxes of 64 columns, half a row of a panel. Rows and panels beyond the chunk are clipped by TMA.
template <bool kPartialTiles>
struct OverlappedExpEpilogue
    : ExpEpilogue<__nv_bfloat16, false, kPartialTiles, false, false, sm90::kOverlappedColumns> {
  using T = __nv_bfloat16;
  using Base = ExpEpilogue<T, false, kPartialTiles, false, false, sm90::kOverlappedColumns>;
  using Base::kColumns, Base::chunk, Base::vocab, Base::out, Base::write, Base::overflow, Base::phase;
  // A k-block takes 768 clocks, the exponentials of a piece 128 of the special function unit, for each of two warps.
  static constexpr int kPieces = sm90::kOverlappedPieces, kPieceColumns = kColumns / kPieces;
  static_assert(kPieceColumns == 16);
  struct Pending {
    Tile tile;
    float from[2], sum[2];
  };

  __device__ __forceinline__ bool begin(Pending& p, const Tile& tile, int row, int lane) const {
    p.tile = tile;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      p.from[h] = Base::reference_of(tile.m0 + row + lane / 4 + 8 * h);
      p.sum[h] = 0.0f;
    }
    return tile.m0 < chunk() && (phase == Phase::kAll || overflow[tile.m0 / sm90::kTileM]);
  }

  __device__ __forceinline__ bool ends_at_once(float (&z)[sm90::kSums], const Pending& p, int row,
                                               int lane) const {
    if (phase != Phase::kMaxima) return false;
    float logits[sm90::kSums];
#pragma unroll
    for (int first = 0; first < kColumns; first += kPieceColumns)
      copy_logits<kPartialTiles>(z, logits, first, p.tile, lane);
    Base::write_maxima(logits, p.tile, row, lane);
    return true;
  }

  template <int kPiece>
  __device__ __forceinline__ void piece(float (&z)[sm90::kSums], Pending& p, int row, int lane,
                                        const sm90::EpilogueSmem& smem, const CUtensorMap (&maps)[2]) const {
    constexpr int kFirst = kPiece * kPieceColumns, kInBox = kFirst % sm90::kBox;
    constexpr bool kBeginsBox = kInBox == 0, kEndsBox = kInBox + kPieceColumns == sm90::kBox;
    const Tile& tile = p.tile;
    // Without metrics only the sums are written.
    float unused[2] = {};
    int unused_column[2] = {};
    const LaneSums sums{p.sum, unused, unused, unused, unused_column};
    if constexpr (kPiece == 0) {
#pragma unroll
      for (int h = 0; h < 2; ++h) p.from[h] *= kLog2e;
    }
    // Without partial panels a box is inside of the vocabulary or beyond it.
    if (kPartialTiles || tile.n0 + kFirst - kInBox < vocab) {
      float e[sm90::kSums];
      const auto compute = [&](auto partial) __attribute__((always_inline)) {
        copy_logits<partial.value>(z, e, kFirst, tile, lane);
        Base::exponentials(e, kFirst, kPieceColumns, p.from, tile, lane, sums);
      };
      if constexpr (kPartialTiles) {
        // Without this branch, pieces are one block of instructions, which the compiler mixes until it spills.
        tile.n0 + kFirst + kPieceColumns <= vocab ? compute(std::false_type{}) : compute(std::true_type{});
      } else {
        compute(std::false_type{});
      }
      if (write) {
        if constexpr (kBeginsBox) wait_for_store(lane);
        // Vectors of 16 bytes of a row are swizzled: vector v of row r is v ^ r % 8.
        const int r = lane % 16, odd = lane / 16;
        T* const at = reinterpret_cast<T*>(smem.memory) + r * sm90::kBox;
        stage_vectors<T>(e, kFirst / 2, at + (((kInBox / 8 + odd) ^ r) & 7) * 8);
        if constexpr (kEndsBox) store_box(tile, tile.n0 + kFirst - kInBox, row, lane, smem, maps);
      }
    }
    finish_sums(p);
    if constexpr (kPiece == kPieces - 1) {
      if constexpr (kPartialTiles) {
        if (write) clear_rest_of_panel(tile, row, lane, smem, maps);
      }
      Base::write_sums(sums, tile, row, lane);
    }
  }

 private:
  // The logits of a piece, -inf beyond the vocabulary. A copy, and without branches: the compiler would serialise the
  // wgmmas of the other accumulators if these changed, also at a join of branches.
  template <bool kPartial>
  __device__ __forceinline__ void copy_logits(const float (&z)[sm90::kSums], float (&logits)[sm90::kSums],
                                              int first, const Tile& tile, int lane) const {
    const int left = vocab - tile.n0 - lane % 4 * 2;  // columns from that of this lane on
#pragma unroll
    for (int j = first / 8; j < (first + kPieceColumns) / 8; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i)
        logits[4 * j + i] = !kPartial || 8 * j + i % 2 < left ? z[4 * j + i] : -INFINITY;
    }
  }
  // Keeps the compiler from moving additions to later pieces, for which it would spill their operands.
  static __device__ __forceinline__ void finish_sums(Pending& p) {
#pragma unroll
    for (int h = 0; h < 2; ++h) asm volatile("" : "+f"(p.sum[h]));
  }
  // Until the box before has been read from shared memory.
  static __device__ __forceinline__ void wait_for_store(int lane) {
    if (lane == 0) sm90::bulk_store_wait_read();
    __syncwarp();
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
