// The epilogue of the input gradient.
#pragma once

#include "linear_ce/sm90/epilogues.cuh"

namespace liger::linear_ce {

template <typename T>
struct GradInput {
  ChunkRows chunk;
  int vocab, hidden;
  int rows_in_first;      // of the panels
  int k_splits;           // of the vocabulary, so that small chunks fill the device
  const float* scale;     // of the rows of the chunk
  const OneHot* one_hot;  // of the rows of the chunk
  const T* weight;
  int64_t weight_stride;
  T* out;  // (chunk.rows, hidden)
  // If k_splits > 1, their sums: (k_splits, chunk.rows, hidden), or those of add_in_turn().
  float* partial;
  int* turns;  // with kSerialSplitK, per tile: warps that have added, initially zero
  RankOneTerm smoothing;
};

template <typename T, bool kPartialTiles, int kTileColumns>
struct GradInputEpilogue : GradInput<T> {
  using Element = T;
  using GradInput<T>::chunk, GradInput<T>::vocab, GradInput<T>::hidden, GradInput<T>::k_splits,
      GradInput<T>::scale, GradInput<T>::one_hot, GradInput<T>::weight, GradInput<T>::weight_stride,
      GradInput<T>::out, GradInput<T>::partial, GradInput<T>::turns, GradInput<T>::smoothing;
  struct Operands {};
  __device__ __forceinline__ void prefetch(const Tile&, int, int, const sm90::EpilogueSmem&) const {}
  __device__ __forceinline__ Operands load(const Tile&, int, int) const { return {}; }
  static constexpr bool kAMn = false, kBMn = true, kPanels = true;
  static constexpr int kColumns = kTileColumns;
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

  __device__ __forceinline__ void store(float (&sums)[sm90::kSums], Operands, const Tile& tile, int row,
                                        int lane, const sm90::EpilogueSmem& smem) const {
    const int count = chunk();
    const TileWidth<kPartialTiles, kColumns> width(tile, hidden);
    if constexpr (sm90::kSerialSplitK) {
      if (k_splits > 1 && add_in_turn(sums, tile, row, lane)) return;
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int r = tile.m0 + row + lane / 4 + 8 * h;
      const bool valid = r < count;
      if (!sm90::kSerialSplitK && k_splits > 1) {
        float* const at =
            partial + (int64_t{tile.k_split} * chunk.rows + r) * hidden + tile.n0 + lane % 4 * 2;
        write_float_row(sums, h, at, valid, width);
        continue;
      }
      scale_row(sums, h, r, valid, tile, lane, width);
    }
    if (!sm90::kSerialSplitK && k_splits > 1) return;
    const int first = tile.m0 + row;
    write_rows(sums, out + int64_t{first} * hidden + tile.n0, hidden, count - first, lane, width);
  }

 protected:
  using Width = TileWidth<kPartialTiles, kTileColumns>;

  // Adds the sums of the splits before to these, in their order. True if more splits follow; then it has stored the result
  // for them, in the order of the accumulators: a warp has 16 rows of the tile, and a lane all of its own in vectors.
  //
  // The split before belongs to an earlier tile, and all blocks are resident, so the wait ends.
  __device__ __forceinline__ bool add_in_turn(float (&sums)[sm90::kSums], const Tile& tile, int row,
                                              int lane) const {
    const int at = tile.m0 / sm90::kTileM * columns() + tile.n0 / kColumns;
    constexpr int kVectors = kColumns / 8;  // of a lane
    float4* const memory =
        reinterpret_cast<float4*>(partial) + (int64_t{at} * sm90::kWarps + row / 16) * kVectors * 32 + lane;
    if (tile.k_split > 0) {
      sm90::wait_for_count(turns + at, tile.k_split * sm90::kWarps);
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
    if (lane == 0) sm90::count_release(turns + at);
    return true;
  }
  // The columns of this lane of row h in float32, if it is valid.
  static __device__ __forceinline__ void write_float_row(const float (&sums)[sm90::kSums], int h, float* at,
                                                         bool valid, const Width& width) {
#pragma unroll
    for (int j = 0; j < kColumns / 8; ++j) {
      if (valid && width.has(8 * j)) {
        *reinterpret_cast<float2*>(at + 8 * j) = make_float2(sums[4 * j + 2 * h], sums[4 * j + 2 * h + 1]);
      }
    }
  }
  // Sums of row h, which is row r of the chunk -> its gradient.
  __device__ __forceinline__ void scale_row(float (&sums)[sm90::kSums], int h, int r, bool valid,
                                            const Tile& tile, int lane, const Width& width) const {
    const float factor = valid ? scale[r] : 0.0f;
#pragma unroll
    for (int j = 0; j < kColumns / 8; ++j) sums[4 * j + 2 * h] *= factor, sums[4 * j + 2 * h + 1] *= factor;
    const OneHot target = valid ? one_hot[r] : OneHot{0.0f, -1};
    if (target.index >= 0)
      subtract_row<kColumns / 8>(sums, h, target.amount, weight + target.index * weight_stride + tile.n0,
                                 lane, width);
    if (smoothing.vector != nullptr && valid)
      subtract_rank_one<kColumns>(sums, h, smoothing.amount_of(r), smoothing.vector + tile.n0, lane);
  }
};

// Split-K reduction of a row of grad_input, with scale and one-hot term: write(i, elements 4i to 4i + 3).
template <typename T, typename Write>
__device__ __forceinline__ void reduce_k_splits_of_row(const GradInput<T>& p, int row, const Write& write) {
  const float factor = p.scale[row];
  const OneHot one_hot = p.one_hot[row];
  const uint2* const target =
      reinterpret_cast<const uint2*>(p.weight + max(one_hot.index, 0) * p.weight_stride);
  const int64_t step = int64_t{p.chunk.rows} * p.hidden / 4;
  const float4* const from = reinterpret_cast<const float4*>(p.partial + int64_t{row} * p.hidden);
  for (int i = threadIdx.x; i < p.hidden / 4; i += kRowThreads) {
    float4 sum = from[i];
    for (int k_split = 1; k_split < p.k_splits; ++k_split) {
      const float4 more = from[i + k_split * step];
      sum.x += more.x, sum.y += more.y, sum.z += more.z, sum.w += more.w;
    }
    sum.x *= factor, sum.y *= factor, sum.z *= factor, sum.w *= factor;
    if (p.smoothing.vector != nullptr) {
      const float4 v = reinterpret_cast<const float4*>(p.smoothing.vector)[i];
      const float amount = p.smoothing.amount_of(row);
      sum.x = fmaf(-amount, v.x, sum.x), sum.y = fmaf(-amount, v.y, sum.y);
      sum.z = fmaf(-amount, v.z, sum.z), sum.w = fmaf(-amount, v.w, sum.w);
    }
    if (one_hot.index >= 0) {
      const uint2 w = target[i];
      sum.x = fmaf(-one_hot.amount, low_of<T>(w.x), sum.x);
      sum.y = fmaf(-one_hot.amount, high_of<T>(w.x), sum.y);
      sum.z = fmaf(-one_hot.amount, low_of<T>(w.y), sum.z);
      sum.w = fmaf(-one_hot.amount, high_of<T>(w.y), sum.w);
    }
    write(i, sum);
  }
}

// grid: rows of the chunk.
template <typename T>
__global__ void __launch_bounds__(kRowThreads) reduce_k_splits(const GradInput<T> p) {
  const int row = blockIdx.x;
  if (row >= p.chunk()) return;
  uint2* const to = reinterpret_cast<uint2*>(p.out + int64_t{row} * p.hidden);
  reduce_k_splits_of_row(p, row, [&](int i, float4 sum) {
    to[i] = make_uint2(pack_pair<T>(sum.x, sum.y), pack_pair<T>(sum.z, sum.w));
  });
}

}  // namespace liger::linear_ce
