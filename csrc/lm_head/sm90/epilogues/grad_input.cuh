// SPDX-License-Identifier: BSD-3-Clause

// The epilogue of the input gradient.
#pragma once

#include "lm_head/sm90/epilogues/common.cuh"

namespace liger::lm_head {

template <typename T>
struct GradInput {
  ChunkRows chunk;
  int vocab, hidden;
  int rows_in_first;      // of the panels
  int k_splits;           // split-K over the vocabulary, so that small chunks fill the device
  const float* scale;     // of the rows of the chunk
  const OneHot* one_hot;  // of the rows of the chunk
  const T* weight;
  int64_t weight_stride;
  T* out;           // (chunk.rows, hidden)
  float* partial;   // memory of serial_split_k(), if k_splits > 1
  int* semaphores;  // for serial_split_k(), one per tile: number of warps that have added, initially zero
  RankOneTerm smoothing;
};

template <typename T, bool kPartialTiles, int kTileColumns>
struct GradInputEpilogue : GradInput<T> {
  using Element = T;
  using GradInput<T>::chunk, GradInput<T>::vocab, GradInput<T>::hidden, GradInput<T>::k_splits,
      GradInput<T>::scale, GradInput<T>::one_hot, GradInput<T>::weight, GradInput<T>::weight_stride,
      GradInput<T>::out, GradInput<T>::partial, GradInput<T>::semaphores, GradInput<T>::smoothing;
  struct Operands {};
  __device__ __forceinline__ void prefetch(const Tile&, int, int, const sm90::EpilogueSmem&) const {}
  __device__ __forceinline__ Operands load(const Tile&, int, int) const { return {}; }
  static constexpr bool kAMn = false, kBMn = true, kPanels = true, kSecondB = false;
  static constexpr int kColumns = kTileColumns, kSmemBytes = 0;
  static constexpr CacheHint kHintA = CacheHint::kNormal, kHintB = CacheHint::kNormal;

  __device__ __forceinline__ int columns() const {
    return kPartialTiles ? ceil_div(hidden, kColumns) : hidden / kColumns;
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
    return {(at.across * sm90::kCluster + rank) * sm90::kTileM, at.along * kColumns, begin * sm90::kTileK,
            end - begin, k_split};
  }

  __device__ __forceinline__ void store(sm90::Sums<kColumns>& sums, Operands, const Tile& tile, int row,
                                        int lane, const sm90::EpilogueSmem& smem) const {
    const int count = chunk();
    const TileWidth<kPartialTiles, kColumns> width(tile, hidden);
    if (k_splits > 1 && serial_split_k(sums, tile, row, lane)) return;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int r = tile.m0 + row + lane / 4 + 8 * h;
      scale_row(sums, h, r, r < count, tile, lane, width);
    }
    const int first = tile.m0 + row;
    write_rows(sums, out + int64_t{first} * hidden + tile.n0, hidden, count - first, lane, width);
  }

 protected:
  using Width = TileWidth<kPartialTiles, kTileColumns>;

  // Adds the sums of the previous splits to `sums`. The last split gets the sums of the tile and false. Every
  // other split stores its sums for the next split, in the order of the accumulators (16 rows per warp, a
  // lane's accumulators in vectors), and gets true. A tile without rows (the second of the last pair) also
  // gets true.
  //
  // The previous split belongs to an earlier tile, and all blocks are resident, so the wait ends.
  __device__ __forceinline__ bool serial_split_k(sm90::Sums<kColumns>& sums, const Tile& tile, int row,
                                                 int lane) const {
    if (tile.m0 >= chunk()) return true;
    const int at = tile.m0 / sm90::kTileM * columns() + tile.n0 / kColumns;
    constexpr int kVectors = kColumns / 8;  // of a lane
    float4* const memory =
        reinterpret_cast<float4*>(partial) + (int64_t{at} * sm90::kWarps + row / 16) * kVectors * 32 + lane;
    if (tile.k_split > 0) {
      sm90::wait_for_count(semaphores + at, tile.k_split * sm90::kWarps);
      __syncwarp();
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        const float4 before = __ldcg(memory + i * 32);
        sums[4 * i] += before.x, sums[4 * i + 1] += before.y;
        sums[4 * i + 2] += before.z, sums[4 * i + 3] += before.w;
      }
    }
    if (tile.k_split == k_splits - 1) return false;
#pragma unroll
    for (int i = 0; i < kVectors; ++i)
      __stcg(memory + i * 32, make_float4(sums[4 * i], sums[4 * i + 1], sums[4 * i + 2], sums[4 * i + 3]));
    __syncwarp();
    if (lane == 0) sm90::count_release(semaphores + at);
    return true;
  }
  // Turns the sums of row h, which is row r of the chunk, into its gradient.
  __device__ __forceinline__ void scale_row(sm90::Sums<kColumns>& sums, int h, int r, bool valid,
                                            const Tile& tile, int lane, const Width& width) const {
    const float factor = valid ? scale[r] : 0.0f;
#pragma unroll
    for (int j = 0; j < kColumns / 8; ++j) sums[4 * j + 2 * h] *= factor, sums[4 * j + 2 * h + 1] *= factor;
    const OneHot target = valid ? one_hot[r] : OneHot{0.0f, -1};
    if (target.index >= 0)
      subtract_row<kRowLoads<kColumns>>(sums, h, target.amount,
                                        weight + target.index * weight_stride + tile.n0, lane, width);
    if (smoothing.vector != nullptr && valid)
      subtract_rank_one<kColumns>(sums, h, smoothing.amount_of(r), smoothing.vector + tile.n0, lane);
  }
};

}  // namespace liger::lm_head
