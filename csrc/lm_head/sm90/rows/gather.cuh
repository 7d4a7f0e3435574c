// SPDX-License-Identifier: BSD-3-Clause

// The valid rows of a chunk before GEMM 1: gathered, with the logits of their targets and references.
#pragma once

#include "device/vec.cuh"
#include "lm_head/sm90/epilogues/exponentials.cuh"
#include "lm_head/sm90/rows/float16_range.cuh"

namespace liger::lm_head {

// For each class the first row of the chunk with that target. The epilogue of dW adds the one-hot term of
// that row in float32. Further rows of the class have the term in their exponentials, so the work of the
// epilogue does not depend on how frequent a class is. Null without a weight gradient.
struct FirstRowOfClass {
  unsigned long long* memory;  // (vocab) OneHot; initially all bits set
  __device__ __forceinline__ void claim(int64_t target, int row) const {
    if (memory != nullptr) atomicMin(memory + target, static_cast<unsigned long long>(row) << 32);
  }
  __device__ __forceinline__ bool is_first(int row, int64_t target) const {
    return memory == nullptr || reinterpret_cast<const OneHot*>(memory + target)->index == row;
  }
  __device__ __forceinline__ void set(int64_t target, float amount) const {
    if (memory != nullptr) reinterpret_cast<OneHot*>(memory + target)->amount = amount;
  }
};

// Gathers the valid rows of the chunk and computes their target logits. Rows beyond the count become zeros,
// because 0 * x could be NaN otherwise. grid: rows of the chunk, rounded up to pairs of tiles; one row per
// block.
template <typename T>
struct Gather {
  ChunkRows chunk;
  const int* index;  // of the valid rows of the chunk
  ce::Targets targets;
  const T *input, *weight;
  int64_t input_stride, weight_stride;
  int vocab, hidden;
  float inverse_temperature;
  T* out;               // (chunk.rows, hidden)
  float* target_logit;  // over the temperature, one per block
  int* overflow;
  FirstRowOfClass first_row;
  LogitTransform transform;
  // With label smoothing: class_weight @ weight, class_weight @ bias (null without one), and the sum of the
  // weighted logits of each row of the chunk.
  const float *class_sum, *bias_sum;
  float* weighted_sum;
  RangeRows range;  // with kSmallRange
};

template <typename T>
__global__ void __launch_bounds__(kRowThreads) gather(const Gather<T> p) {
  __shared__ float scratch[32];
  const int row = blockIdx.x, count = p.chunk();
  if (row % sm90::kTileM == 0 && threadIdx.x == 0) p.overflow[row / sm90::kTileM] = 0;
  uint4* const out = reinterpret_cast<uint4*>(p.out + int64_t{row} * p.hidden);
  if (row >= count) {
    if (row < p.chunk.rows) {
      for (int i = threadIdx.x; i < p.hidden / 8; i += kRowThreads) out[i] = make_uint4(0, 0, 0, 0);
    }
    // The row is zero, so its logits are 0, or the bias, which may be large. The reference makes all
    // exponentials 0.
    if (threadIdx.x == 0) p.target_logit[row] = p.transform.bias != nullptr ? INFINITY : 0.0f;
    if constexpr (kSmallRange<T>) {
      if (threadIdx.x == 0) p.range.reference[row] = p.target_logit[row];
      if (threadIdx.x == 0 && row < p.chunk.rows) p.range.shift[row] = 0;
    }
    return;
  }
  const int source = p.index[row];
  const int64_t target = p.targets[source];
  const bool valid = target >= 0 && target < p.vocab;
  const uint4* const x = reinterpret_cast<const uint4*>(p.input + source * p.input_stride);
  const uint4* const w = reinterpret_cast<const uint4*>(p.weight + (valid ? target : 0) * p.weight_stride);
  float sum = 0.0f, weighted_sum = 0.0f, largest = 0.0f;
  for (int i = threadIdx.x; i < p.hidden / 8; i += kRowThreads) {
    const uint4 a = x[i], b = w[i];
    out[i] = a;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const uint32_t u = (&a.x)[j], v = (&b.x)[j];
      sum = fmaf(low_of<T>(u), low_of<T>(v), sum);
      sum = fmaf(high_of<T>(u), high_of<T>(v), sum);
      if constexpr (kSmallRange<T>)
        largest = fmaxf(largest, fmaxf(fabsf(low_of<T>(u)), fabsf(high_of<T>(u))));
      if (p.class_sum != nullptr) {
        const float2 s = reinterpret_cast<const float2*>(p.class_sum + 8 * i)[j];
        weighted_sum = fmaf(low_of<T>(u), s.x, weighted_sum);
        weighted_sum = fmaf(high_of<T>(u), s.y, weighted_sum);
      }
    }
  }
  sum = block_reduce<Sum>(sum, scratch);
  if (p.class_sum != nullptr) {
    weighted_sum = block_reduce<Sum>(weighted_sum, scratch);
    if (threadIdx.x == 0) p.weighted_sum[row] = weighted_sum + (p.bias_sum != nullptr ? *p.bias_sum : 0.0f);
  }
  float sample = 0.0f;
  if constexpr (kSmallRange<T>) {
    largest = block_reduce<Max>(largest, scratch);
    sample = largest_sample<T>({p.weight, p.weight_stride, p.vocab, p.hidden}, x, p.transform,
                               p.inverse_temperature, scratch);
  }
  if (threadIdx.x == 0) {
    if (valid && p.transform.bias != nullptr) sum += p.transform.bias[target];
    p.target_logit[row] = valid ? p.transform.cap(sum) * p.inverse_temperature : 0.0f;
    if constexpr (kSmallRange<T>) {
      p.range.reference[row] = valid ? fmaxf(sample, p.target_logit[row]) : sample;
      p.range.largest[row] = largest;
      p.range.shift[row] = 0;
    }
    if (valid) p.first_row.claim(target, source);
  }
}

// For tiles with overflow: computes a reference from the row maxima of the logits before the softcap; no sum
// relative to it overflows. Rows beyond the count get the reference of gather(). grid: rows of the chunk.
struct Recompute {
  ChunkRows chunk;
  const int* overflow;
  const float* maxima;
  int columns;  // of maxima
  float inverse_temperature;
  float* reference;  // over the temperature; not written for other tiles
  LogitTransform transform;
  RangeRows range;  // with kSmallRange; the shifts are reset
};

template <typename T>
__global__ void __launch_bounds__(kRowThreads) recompute_reference(const Recompute p) {
  __shared__ float scratch[32];
  const int row = blockIdx.x;
  if (!p.overflow[row / sm90::kTileM]) return;
  if constexpr (kSmallRange<T>) {
    if (threadIdx.x == 0) p.range.shift[row] = 0;
    for (int i = threadIdx.x; i < p.columns; i += kRowThreads)
      p.range.tile_shifts[int64_t{row} * p.columns + i] = 0;
  }
  if (row >= p.chunk()) {
    if (threadIdx.x == 0) p.reference[row] = p.transform.bias != nullptr ? INFINITY : 0.0f;
    return;
  }
  float max = -INFINITY;
  for (int i = threadIdx.x; i < p.columns; i += kRowThreads)
    max = fmaxf(max, p.maxima[int64_t{row} * p.columns + i]);
  max = block_reduce<Max>(max, scratch);
  if (threadIdx.x == 0) p.reference[row] = ce::reference_of(p.transform.cap(max) * p.inverse_temperature);
}

}  // namespace liger::lm_head
