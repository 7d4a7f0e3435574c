// SPDX-License-Identifier: BSD-3-Clause

// The epilogues of the grouped GEMMs:
//
// - GateUpEpilogue: gate and up of the gathered rows of x, with their biases, and their product.
// - RowsEpilogue: (product W_down + bias) * routing weight; and rows of the gradient of x.
// - GradProductEpilogue: from the gradient of the product, the gradients of gate and up times the routing
//   weight, the product times the routing weight, and sums for the gradient of the routing weight.
// - GradMatrixEpilogue: the gradient of the matrix of each expert.
//
// A lane stores 8 neighbouring columns: transpose_quad() exchanges words of 32 columns within four lanes.
#pragma once

#include "device/quad.cuh"
#include "experts/sm90/gate.cuh"
#include "experts/sm90/grouped_gemm.cuh"

namespace liger::experts {

using lm_head::high_of;
using lm_head::low_of;
using lm_head::pack_pair;
using Sums = sm90::Sums<kColumns>;
using TileSums = Sums[kHalves];

__device__ __forceinline__ void store_words(void* to, uint32_t (&words)[4], int lane, bool valid) {
  transpose_quad(words, lane);
  if (valid) store_vector(to, words);
}

// kInterleaved: gate and up are the even and odd columns; else a tile has kHalfColumns columns of gate, then
// as many of up. kIsSilu: gate.is_silu().
template <typename T, bool kBMajorMn, bool kInterleaved, bool kIsSilu, bool kGathers>
struct GateUpEpilogue {
  using Element = T;
  static constexpr bool kGather = kGathers, kBMn = kBMajorMn, kWeights = false;
  static constexpr int kSharing = 4;
  static constexpr int kStagingBytes = 0;
  static_assert(kInterleaved || !kBMn);
  Groups groups;
  GatheredRows<T> a;
  Gate gate;
  const T* bias;  // (experts, 2 intermediate) or null
  T* gate_up;     // (rows, 2 intermediate) or null
  T* product;     // (rows, intermediate)
  int intermediate;

  __device__ __forceinline__ void start(TileSums& sums, const ExpertTile& tile, int, int lane,
                                        uint32_t) const {
    const int n0 = tile.column_tile * kHalfColumns;
    const T* const own = bias == nullptr ? nullptr : bias + int64_t{tile.expert} * 2 * intermediate;
    if constexpr (kInterleaved) {
      start_with_bias(sums, own, {2 * n0, 2 * n0 + kHalfColumns}, {2 * intermediate, 2 * intermediate}, lane);
    } else {
      start_with_bias(sums, own, {n0, intermediate + n0}, {intermediate, 2 * intermediate}, lane);
    }
  }
  __device__ __forceinline__ void store(Sums& sums, const ExpertTile& tile, int row, int lane,
                                        uint32_t) const {
    const int n0 = tile.column_tile * kHalfColumns, quad = lane % 4;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int r = row + lane / 4 + 8 * h;
      const bool valid = r < tile.rows;
      T* const out = product + int64_t{tile.first_row + r} * intermediate + n0 + quad * 8;
      T* const kept = gate_up + int64_t{tile.first_row + r} * 2 * intermediate;
      if constexpr (kInterleaved) {
        store_interleaved(sums, h, n0, kept, out, lane, valid);
      } else {
#pragma unroll
        for (int i = 0; i < kHalfColumns / 32; ++i) {
          uint32_t gates[4], ups[4], products[4];
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            const int at = sum_index(4 * i + j, h, 0), at_up = sum_index(4 * i + j + kHalfColumns / 8, h, 0);
            const float2 g = {sums[at], sums[at + 1]}, u = {sums[at_up], sums[at_up + 1]};
            gates[j] = pack_pair<T>(g.x, g.y), ups[j] = pack_pair<T>(u.x, u.y);
            products[j] = pack_pair<T>(gate.template product<T, kIsSilu>(g.x, u.x),
                                       gate.template product<T, kIsSilu>(g.y, u.y));
          }
          const bool stored = valid && n0 + 32 * i + quad * 8 < intermediate;
          if (gate_up != nullptr) {
            store_words(kept + n0 + 32 * i + quad * 8, gates, lane, stored);
            store_words(kept + intermediate + n0 + 32 * i + quad * 8, ups, lane, stored);
          }
          store_words(out + 32 * i, products, lane, stored);
        }
      }
    }
  }

 private:
  // n0: the first column of the product; gate and up are in columns from 2 n0 on.
  __device__ __forceinline__ void store_interleaved(Sums& sums, int h, int n0, T* kept, T* out, int lane,
                                                    bool valid) const {
    const int quad = lane % 4;
#pragma unroll
    for (int i = 0; i < kHalfColumns / 32; ++i) {
      uint32_t products[4];
#pragma unroll
      for (int part = 0; part < 2; ++part) {
        uint32_t pairs[4];
        float values[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int at = sum_index(8 * i + 4 * part + j, h, 0);
          const float g = sums[at], u = sums[at + 1];
          pairs[j] = pack_pair<T>(g, u);
          values[j] = gate.template product<T, kIsSilu>(g, u);
        }
#pragma unroll
        for (int m = 0; m < 2; ++m) products[2 * part + m] = exchange(values[2 * m], values[2 * m + 1], lane);
        const int column = 2 * n0 + 64 * i + 32 * part + quad * 8;
        if (gate_up != nullptr) store_words(kept + column, pairs, lane, valid && column < 2 * intermediate);
      }
      transpose_quad(products, lane);
      // interleaved_word(): lanes 1 and 2 have each other's word.
      if (valid && n0 + 32 * i + quad * 8 < intermediate)
        store_vector(out + 32 * i, {products[0], products[2], products[1], products[3]});
    }
  }
  // Columns 4 j + l % 4 of j = 2 m and 2 m + 1 become two neighbouring columns per lane (interleaved_word).
  __device__ __forceinline__ uint32_t exchange(float even, float odd, int lane) const {
    const bool second = lane & 1;
    const float other = __shfl_xor_sync(0xffffffffu, second ? even : odd, 1);
    return second ? pack_pair<T>(other, odd) : pack_pair<T>(even, other);
  }
};

template <typename T, bool kBMajorMn>
struct RowsEpilogue {
  using Element = T;
  static constexpr bool kGather = false, kBMn = kBMajorMn, kWeights = false;
  static constexpr int kStagingBytes = 0;
  Groups groups;
  const T* bias;         // (experts, columns) or null
  const float* weights;  // (rows,) or null
  T* out;                // (rows, columns)
  int columns;           // a multiple of 8

  __device__ __forceinline__ void start(TileSums& sums, const ExpertTile& tile, int, int lane,
                                        uint32_t) const {
    const int n0 = tile.column_tile * kColumns;
    start_with_bias(sums, bias == nullptr ? nullptr : bias + int64_t{tile.expert} * columns,
                    {n0, n0 + kHalfColumns}, {columns, columns}, lane);
  }
  __device__ __forceinline__ void store(Sums& sums, const ExpertTile& tile, int row, int lane,
                                        uint32_t) const {
    const int n0 = tile.column_tile * kColumns, quad = lane % 4;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int r = row + lane / 4 + 8 * h;
      const bool valid = r < tile.rows;
      const float weight = weights != nullptr && valid ? __ldg(weights + tile.first_row + r) : 1.0f;
      T* const to = out + int64_t{tile.first_row + r} * columns + n0 + quad * 8;
      const int left = valid ? columns - n0 - quad * 8 : 0;
#pragma unroll
      for (int i = 0; i < kColumns / 32; ++i) {
        uint32_t words[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int at = sum_index(4 * i + j, h, 0);
          words[j] = pack_pair<T>(sums[at] * weight, sums[at + 1] * weight);
        }
        store_words(to + 32 * i, words, lane, 32 * i < left);
      }
    }
  }
};

template <typename T, bool kBMajorMn, bool kInterleaved, bool kIsSilu, bool kGathers>
struct GradProductEpilogue {
  using Element = T;
  static constexpr bool kGather = kGathers, kBMn = kBMajorMn, kWeights = false;
  static constexpr int kSharing = 4;
  // A part of gate and up: 8 rows and 32 columns of each, twice per warp. Rows of gate are 80 bytes apart,
  // and rows of up follow; rows of both are 160 bytes apart. So eight rows are in different banks.
  static constexpr int kPitch = kInterleaved ? 160 : 80, kUpBytes = 8 * 80, kPartBytes = 2 * kUpBytes,
                       kStagingBytes = 2 * kPartBytes;
  static constexpr int kColumnParts = kColumns / 32, kParts = 2 * kColumnParts;  // of a half
  Groups groups;
  GatheredRows<T> a;
  Gate gate;
  const float* weights;  // (rows,)
  T* gate_up;            // (rows, 2 intermediate), overwritten with its gradient
  T* product;            // (rows, intermediate)
  float* sums_of_rows;   // (column tiles, rows): of product times gradient
  int64_t rows;
  int intermediate;

  __device__ __forceinline__ void start(TileSums& sums, const ExpertTile& tile, int row, int lane,
                                        uint32_t staging) const {
    for (auto& half : sums) sm90::clear<kColumns>(half);
    // Of the tile before, beyond its rows.
    wait_async(0);
    copy(tile, row, lane, staging, 0), copy(tile, row, lane, staging, 1);
  }
  __device__ __forceinline__ void store(Sums& sums, const ExpertTile& tile, int row, int lane,
                                        uint32_t staging) const {
    const int n0 = tile.column_tile * kColumns, quad = lane % 4, own = lane / 4;
    const int64_t at_row = int64_t{tile.first_row + row + own} * intermediate;
    T* const out = product + at_row + n0 + quad * 8;
    T* const kept = gate_up + 2 * at_row + (kInterleaved ? 2 * n0 : n0);
    const int rows_left = tile.rows - row - own, left = intermediate - n0;
    // This lane reads its words of the row.
    const uint32_t from = staging + own * kPitch + quad * (kInterleaved ? 8 : 4);
    if (left < kColumns) {
      // Beyond the last column the gradient is grad_y times 0: NaN where grad_y is infinite.
#pragma unroll
      for (int i = 0; i < kColumns / 2; ++i)
        if (i / 4 * 8 >= left) sums[i] = 0.0f;
    }
    float row_weights[2];
#pragma unroll
    for (int h = 0; h < 2; ++h)
      row_weights[h] = 8 * h < rows_left ? __ldg(weights + tile.first_row + row + own + 8 * h) : 0.0f;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const bool valid = 8 * h < rows_left;
      const float weight = row_weights[h];
      float total = 0.0f;
#pragma unroll
      for (int i = 0; i < kColumnParts; ++i) {
        const int part = h * kColumnParts + i;
        wait_async(1);
        __syncwarp();
        // Gates and ups of two columns, or gate and up of one column each.
        uint32_t first[4], second[4], products[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const uint32_t at = from + j * (kInterleaved ? 32 : 16) + part % 2 * kPartBytes;
          if constexpr (kInterleaved) {
            load_shared(at, first[j], second[j]);
          } else {
            load_shared(at, first[j]), load_shared(at + kUpBytes, second[j]);
          }
        }
        __syncwarp();
        copy(tile, row, lane, staging, part + 2);
        T* const gradient =
            kept + 16 * h * intermediate + (kInterleaved ? 64 * i + quad * 4 : 32 * i + quad * 8);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int at = sum_index(4 * i + j, h, 0);
          float2 g = {low_of<T>(first[j]), high_of<T>(first[j])},
                 u = {low_of<T>(second[j]), high_of<T>(second[j])};
          if constexpr (kInterleaved) {
            const float up = g.y;
            g.y = u.x, u.x = up;
          }
          const float2 grad = {sums[at], sums[at + 1]};
          const Gate::Result x = gate.template backward<T, kIsSilu>(g.x, u.x),
                             y = gate.template backward<T, kIsSilu>(g.y, u.y);
          total = fmaf(x.product, grad.x, fmaf(y.product, grad.y, total));
          const float2 weighted = {weight * grad.x, weight * grad.y};
          products[j] = pack_pair<T>(weight * x.product, weight * y.product);
          const float2 of_gate = {weighted.x * x.grad_gate, weighted.y * y.grad_gate},
                       of_up = {weighted.x * x.grad_up, weighted.y * y.grad_up};
          if constexpr (kInterleaved) {
            if (valid && 32 * i + 8 * j + quad * 2 < left)
              *reinterpret_cast<uint2*>(gradient + 16 * j) =
                  make_uint2(pack_pair<T>(of_gate.x, of_up.x), pack_pair<T>(of_gate.y, of_up.y));
          } else {
            first[j] = pack_pair<T>(of_gate.x, of_gate.y), second[j] = pack_pair<T>(of_up.x, of_up.y);
          }
        }
        const bool inside = valid && 32 * i + quad * 8 < left;
        if constexpr (!kInterleaved) {
          store_words(gradient, first, lane, inside);
          store_words(gradient + intermediate, second, lane, inside);
        }
        store_words(out + 8 * h * intermediate + 32 * i, products, lane, inside);
      }
      total += __shfl_xor_sync(0xffffffffu, total, 1);
      total += __shfl_xor_sync(0xffffffffu, total, 2);
      if (valid && quad == 0)
        sums_of_rows[tile.column_tile * rows + tile.first_row + row + own + 8 * h] = total;
    }
  }

 private:
  // Part p of the warp's rows from `row` on; parts from kParts on are of the rows of the other half, 64
  // below. A part is copied while the two parts before it are computed, the first two during the mainloop.
  __device__ __forceinline__ void copy(const ExpertTile& tile, int row, int lane, uint32_t staging,
                                       int p) const {
    const int i = p % kColumnParts, quad = lane % 4, n0 = tile.column_tile * kColumns;
    const int r = row + p / kParts * kBox + p / kColumnParts % 2 * 8 + lane / 4, left = intermediate - n0;
    const T* const source = gate_up + int64_t{tile.first_row + r} * 2 * intermediate +
                            (kInterleaved ? 2 * n0 + 64 * i : n0 + 32 * i) + quad * 8;
    const uint32_t to = staging + lane / 4 * kPitch + quad * 16 + p % 2 * kPartBytes;
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      const int column = kInterleaved ? 64 * i + 32 * m + quad * 8 : 32 * i + quad * 8;
      copy_or_zero(to + m * (kInterleaved ? 64 : kUpBytes), source + m * (kInterleaved ? 32 : intermediate),
                   r < tile.rows && column < (kInterleaved ? 2 * left : left));
    }
    commit_async();
  }
};

// a[rows of e].T @ b[rows of e] for every expert e, or with kTransposed the transpose of it.
template <typename T, bool kTransposed, bool kGathers, int kSharingWarps>
struct GradMatrixEpilogue {
  using Element = T;
  static constexpr bool kGather = kGathers, kBMn = true, kWeights = true;
  static constexpr int kSharing = kSharingWarps, kStagingBytes = 0;
  Groups groups;
  GatheredRows<T> a;
  const T* b;   // (rows, columns)
  T* out;       // (experts, a.columns, columns), or (experts, columns, a.columns)
  int columns;  // a multiple of 8

  __device__ __forceinline__ int rows_left(const ExpertTile& tile) const {
    return a.columns - tile.row_tile * kRows;
  }
  __device__ __forceinline__ void start(TileSums& sums, const ExpertTile&, int, int, uint32_t) const {
    for (auto& half : sums) sm90::clear<kColumns>(half);
  }
  __device__ __forceinline__ void store(Sums& sums, const ExpertTile& tile, int row, int lane,
                                        uint32_t) const {
    const int m0 = tile.row_tile * kRows + row, n0 = tile.column_tile * kColumns, quad = lane % 4;
    T* const matrix = out + int64_t{tile.expert} * a.columns * columns;
    if constexpr (kTransposed) {
      // Lanes of a quad store 8 rows each of two columns: m and n are of this lane.
      const int m = m0 + (quad & 1) * 8, n = n0 + lane / 4 + (quad >> 1) * 8;
      T* const to = matrix + int64_t{n} * a.columns + m;
#pragma unroll
      for (int j = 0; j < kColumns / 8; j += 2) {
        uint32_t words[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int at = sum_index(j + i / 2, i % 2, 0);
          words[i] = transpose_matrix(pack_pair<T>(sums[at], sums[at + 1]));
        }
        store_words(to + int64_t{8 * j} * a.columns, words, lane, m < a.columns && n + 8 * j < columns);
      }
    } else {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int m = m0 + lane / 4 + 8 * h;
        T* const to = matrix + int64_t{m} * columns + n0 + quad * 8;
        const int left = m < a.columns ? columns - n0 - quad * 8 : 0;
#pragma unroll
        for (int i = 0; i < kColumns / 32; ++i) {
          uint32_t words[4];
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            const int at = sum_index(4 * i + j, h, 0);
            words[j] = pack_pair<T>(sums[at], sums[at + 1]);
          }
          store_words(to + 32 * i, words, lane, 32 * i < left);
        }
      }
    }
  }
};

}  // namespace liger::experts
