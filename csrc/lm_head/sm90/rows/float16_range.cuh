// SPDX-License-Identifier: BSD-3-Clause

// Parts of the row kernels that handle the small range of float16.
#pragma once

#include "device/reduce.cuh"
#include "lm_head/sm90/epilogues/common.cuh"

namespace liger::lm_head {

// The rows of the weight, one per class.
template <typename T>
struct Classes {
  const T* weight;
  int64_t stride;
  int vocab, hidden;
};

// The largest of 16 logits of a row, over the temperature. The classes are equally spaced; each warp computes
// two logits.
template <typename T>
__device__ __forceinline__ float largest_sample(const Classes<T>& p, const uint4* x,
                                                const LogitTransform& transform, float inverse_temperature,
                                                float* scratch) {
  constexpr int kWarps = kRowThreads / 32, kPerWarp = 2, kSamples = kWarps * kPerWarp;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  int64_t columns[kPerWarp];
  const uint4* w[kPerWarp];
  float sums[kPerWarp] = {};
#pragma unroll
  for (int k = 0; k < kPerWarp; ++k) {
    columns[k] = (2 * (warp + k * kWarps) + 1) * int64_t{p.vocab} / (2 * kSamples);
    w[k] = reinterpret_cast<const uint4*>(p.weight + columns[k] * p.stride);
  }
  for (int i = lane; i < p.hidden / 8; i += 32) {
    const uint4 a = x[i];
#pragma unroll
    for (int k = 0; k < kPerWarp; ++k) {
      const uint4 b = w[k][i];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const uint32_t u = (&a.x)[j], v = (&b.x)[j];
        sums[k] = fmaf(low_of<T>(u), low_of<T>(v), sums[k]);
        sums[k] = fmaf(high_of<T>(u), high_of<T>(v), sums[k]);
      }
    }
  }
  float largest = -INFINITY;
#pragma unroll
  for (int k = 0; k < kPerWarp; ++k) {
    float z = warp_reduce<Sum>(sums[k]);
    if (transform.bias != nullptr) z += transform.bias[columns[k]];
    largest = fmaxf(largest, transform.cap(z) * inverse_temperature);
  }
  return block_reduce<Max>(largest, scratch);
}

// Raises the shift of a row's tiles to `shift` where it is smaller. The caller must call a barrier next.
template <typename T>
__device__ __forceinline__ void shift_tiles(const RangeRows& range, const Panels& exponentials, int vocab,
                                            int row, int shift) {
  constexpr int kVectors = sm90::kPanel / 8, kVectorsOfTile = sm90::kPingpongColumns / 8;
  const int tiles = sm90::logits_tiles(vocab), panels = sm90::panels(vocab);
#pragma unroll 2
  for (int i = threadIdx.x; i < panels * kVectors; i += kRowThreads) {
    // The last panel may end after the last tile, in zeros.
    const int tile = min(i / kVectorsOfTile, tiles - 1);
    const int more = shift - range.tile_shifts[int64_t{row} * tiles + tile];
    if (more <= 0) continue;
    uint4* const row_of_panel =
        reinterpret_cast<uint4*>(exponentials.row_at(row, i / kVectors * sm90::kPanel));
    uint4* const vector = row_of_panel + i % kVectors;
    *vector = scaled_elements<T>(*vector, pow2(-more));
  }
}

// The shift of a row: the largest shift of its tiles, or more if one of its elements contains the one-hot
// term, which is `one_hot` times an exponential of 1.
__device__ __forceinline__ int row_shift(int of_tiles, float one_hot, int offset) {
  constexpr int kMaxShift = 120;  // keeps powers of two normal
  return min(max(of_tiles, exponent_of(one_hot) + offset - (kLargestSumExponent - 1)), kMaxShift);
}

// True if the gradient of the target's logit is a small difference between its exponential and `one_hot`. If
// the element contains the one-hot term, the difference is taken in float32. With a separate one-hot term the
// exponential is multiplied by a rounded row of the input, and the error is relative to the exponential.
__device__ __forceinline__ bool is_mostly_target(float exponential, float one_hot) {
  return exponential > 0.5f * one_hot;
}

// float16, after apply_rule() or row_gradients(): scales the gathered rows for the weight gradient. grid:
// rows of the chunk.
template <typename T>
__global__ void __launch_bounds__(kRowThreads)
    scale_rows(const ChunkRows chunk, T* input, int hidden, const float* scale,
               const uint32_t* largest_scaled) {
  const int row = blockIdx.x;
  if (row >= chunk()) return;
  const float unit = pow2(unit_exponent(__uint_as_float(*largest_scaled)));
  const float factor = scale[row] * unit;
  uint4* const x = reinterpret_cast<uint4*>(input + int64_t{row} * hidden);
  for (int i = threadIdx.x; i < hidden / 8; i += kRowThreads) x[i] = scaled_elements<T>(x[i], factor);
}

}  // namespace liger::lm_head
