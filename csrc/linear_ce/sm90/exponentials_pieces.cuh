// The epilogue of the logits GEMM for gemm_kernel_pingpong: bfloat16 only.
#pragma once

#include "linear_ce/sm90/exponentials_overlapped.cuh"
#include "linear_ce/sm90/gemm_pingpong.cuh"

namespace liger::linear_ce {

// All pieces of OverlappedExpEpilogue after each other, for 16 rows of each half of a tile.
template <sm90::LogitsWork kWork, bool kPartialTiles, int kColumnsPerPiece = sm90::piece_columns(kWork)>
struct PiecesExpEpilogue : OverlappedExpEpilogue<kWork, kPartialTiles, kColumnsPerPiece> {
  using Base = OverlappedExpEpilogue<kWork, kPartialTiles, kColumnsPerPiece>;
  using Maps = sm90::OverlappedMaps;
  using typename Base::Operands;
  static constexpr int kHalves = sm90::kPingpongHalves;
  static constexpr bool kMayBeNarrow = false;
  __device__ __forceinline__ int columns_of(const Tile&) const { return Base::kColumns; }
  __device__ __forceinline__ Operands prefetch(const Tile&, int, int, const sm90::EpilogueSmem&) const {
    return {};
  }

  __device__ __forceinline__ void store(float (&z)[kHalves][sm90::kSums], const Operands&, const Tile& tile,
                                        int row, int lane, const sm90::EpilogueSmem& smem,
                                        const Maps& maps) const {
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      const int at = row + half * sm90::kBox;
      typename Base::Pending p;
      if (!Base::begin(p, tile, at, lane, smem)) return;
      if (Base::ends_at_once(z[half], p, at, lane, smem)) continue;
      [&]<int... piece>(std::integer_sequence<int, piece...>) __attribute__((always_inline)) {
        (Base::template piece<piece>(z[half], p, at, lane, smem, maps.results), ...);
      }(std::make_integer_sequence<int, Base::kPieces>{});
    }
  }
};

}  // namespace liger::linear_ce
