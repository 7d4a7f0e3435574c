// The epilogue of the input gradient.
#pragma once

#include "linear_ce/sm90/epilogues.cuh"

namespace liger::linear_ce {

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

}  // namespace liger::linear_ce
