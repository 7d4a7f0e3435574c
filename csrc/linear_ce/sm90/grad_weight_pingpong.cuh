// The epilogue of the weight gradient for gemm_kernel_pingpong.
#pragma once

#include "linear_ce/sm90/gemm_pingpong.cuh"
#include "linear_ce/sm90/grad_weight.cuh"

namespace liger::linear_ce {

// GradWeightEpilogue for a warp with 16 rows in each half of a tile. With 192 accumulators a thread has no registers for
// partial sums: they pass through shared memory, kInFlight segments at a time, those of the second half behind those
// of the first one. Their latency does not matter while the other warpgroup computes.
template <typename T, bool kPartialTiles>
struct PingpongGradWeightEpilogue : GradWeightEpilogue<T, kPartialTiles, sm90::kPingpongColumns> {
  using Base = GradWeightEpilogue<T, kPartialTiles, sm90::kPingpongColumns>;
  using Base::kColumns, Base::kHintSums, Base::kSegments, Base::vocab, Base::hidden, Base::one_hot,
      Base::input, Base::input_stride, Base::out, Base::first, Base::last, Base::panel_read_counts,
      Base::smoothing, Base::largest_scaled;
  static constexpr int kInFlight = 6, kHalves = sm90::kPingpongHalves;
  static constexpr int kSmemBytes = kInFlight * 32 * sizeof(uint4);
  static constexpr bool kMayBeNarrow = kPartialTiles;
  using Maps = sm90::Maps;
  struct Operands {
    float block_scale[kHalves][2];  // of the two rows of this lane
  };

  __device__ __forceinline__ int columns_of(const Tile& tile) const {
    return TileWidth<kPartialTiles, kColumns>(tile, hidden).columns;
  }

  __device__ __forceinline__ Operands prefetch(const Tile& tile, int row, int lane,
                                               const sm90::EpilogueSmem& smem) const {
    Operands e{};
    if (first) return e;
    forget_value(lane);
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      const int at = row + half * sm90::kBox;
      if (tile.m0 + at >= vocab) continue;
#pragma unroll
      for (int h = 0; h < 2; ++h)
        e.block_scale[half][h] = power_of_two(Base::scale_exponents_of(tile, at, lane)[8 * h]);
    }
    Base::by_width(tile, [&](auto partial) {
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) copy_segment<partial.value>(i, tile, row, lane, smem);
    });
    return e;
  }

  __device__ __forceinline__ void store(float (&sums)[kHalves][sm90::kSums], const Operands& e,
                                        const Tile& tile, int row, int lane, const sm90::EpilogueSmem& smem,
                                        const Maps&) const {
    if (tile.m0 + row >= vocab) return;
    forget_value(lane);
    if (panel_read_counts != nullptr) {
      const int own = tile.m0 / sm90::kTileM;
      if (threadIdx.x % 128 == 0) Base::count_panel_read(own);
      Base::wait_for_panel_reads(own);
    }
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      const int at = row + half * sm90::kBox;
      if (kPartialTiles && tile.m0 + at >= vocab) break;
      Base::by_width(tile, [&](auto partial) {
        store_half<partial.value>(sums[half], half, e.block_scale[half], tile, at, lane, smem);
      });
    }
  }

 private:
  // Keeps the compiler from computing addresses of the epilogue before the loop over tiles, for which it would spill.
  static __device__ __forceinline__ void forget_value(int& value) { asm volatile("" : "+r"(value)); }

  __device__ __forceinline__ uint4* slot(int segment, int lane, const sm90::EpilogueSmem& smem) const {
    return reinterpret_cast<uint4*>(smem.memory) + segment % kInFlight * 32 + lane;
  }
  // Segment i of a tile, of both halves; a group of copies of its own, which may be empty.
  template <bool kPartial>
  __device__ __forceinline__ void copy_segment(int i, const Tile& tile, int row, int lane,
                                               const sm90::EpilogueSmem& smem) const {
    const int at = row + i / kSegments * sm90::kBox;
    if (i < kHalves * kSegments && tile.m0 + at < vocab) {
      const auto from = Base::template segments<kPartial>(tile, at, lane);
      if (from.has(i % kSegments)) sm90::copy_async(slot(i, lane, smem), from.at(i % kSegments), kHintSums);
    }
    sm90::copy_async_commit();
  }

  // at: the first row of this warp in the half.
  template <bool kPartial>
  __device__ __forceinline__ void store_half(float (&sums)[sm90::kSums], int half,
                                             const float (&block_scale)[2], const Tile& tile, int at,
                                             int lane, const sm90::EpilogueSmem& smem) const {
    const TileWidth<kPartial, kColumns> width(tile, hidden);
    const int row = at - half * sm90::kBox;
    if constexpr (kSmallRange<T>) {
      const float unit = pow2(-unit_exponent(__uint_as_float(*largest_scaled)));
#pragma unroll
      for (int i = 0; i < kColumns / 2; ++i) sums[i] *= unit;
    }
    if (!first) {
#pragma unroll
      for (int i = 0; i < kSegments; ++i) {
        sm90::copy_async_wait_groups<kInFlight - 1>();
        const int segment = half * kSegments + i;
        if (width.has(i * 16)) Base::add(sums, 8 * i, *slot(segment, lane, smem), block_scale);
        copy_segment<kPartial>(segment + kInFlight, tile, row, lane, smem);
      }
      __syncwarp();  // all lanes have read their segments of these rows, which write_rows() overwrites
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int r = tile.m0 + at + lane / 4 + 8 * h;
      const OneHot target = one_hot[r];
      if (target.index >= 0) {
        subtract_row<8>(sums, h, target.amount, input + target.index * input_stride + tile.n0, lane, width);
      }
      if (smoothing.vector != nullptr && r < vocab)
        subtract_rank_one<kColumns>(sums, h, smoothing.amount_of(r), smoothing.vector + tile.n0, lane);
    }
    if (!last) {
      float inverse_scale[2];
      Base::choose_block_scales(sums, inverse_scale, tile, at, lane);
      const auto to = Base::template segments<kPartial>(tile, at, lane);
#pragma unroll
      for (int i = 0; i < kSegments; ++i) {
        if (to.has(i)) sm90::store_with_hint(to.at(i), Base::scaled(sums, 8 * i, inverse_scale), kHintSums);
      }
      return;
    }
    write_rows(sums, out + (tile.m0 + at) * int64_t{hidden} + tile.n0, hidden,
               kPartialTiles ? vocab - tile.m0 - at : 16, lane, width);
  }
};

}  // namespace liger::linear_ce
