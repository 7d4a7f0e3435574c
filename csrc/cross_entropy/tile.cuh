// SPDX-License-Identifier: BSD-3-Clause

// The elementwise gradient of rows from their saved statistics: one read of the logits and one
// write of the gradient.
#pragma once

#include "cross_entropy/rule.cuh"

namespace liger::ce {

inline constexpr int kBackwardThreads = 256;
inline constexpr int kBackwardVectors = 4;  // per thread

// Writes one tile of a row; zeros if the row is ignored. grid: rows x tiles, blocks of kBackwardThreads.
// kAligned: the logits and the gradient of each row are equally far from a 16-byte boundary; otherwise loads
// and stores move single elements.
//
// The gradient may overwrite the logits: the thread that writes an element is the one that read it. Only the
// logit at the target is read by other threads too, and the value they get does not enter their gradient.
//
// coefficients(row, logits of the row, target of the row) returns GradientCoefficients; called for valid
// rows.
template <typename T, bool kExtras, bool kAligned, typename Coefficients>
__device__ __forceinline__ void write_tile(const Problem& p, void* out_, int64_t out_stride, int tiles,
                                           Coefficients coefficients) {
  constexpr int N = kAligned ? kVec<T> : 1;
  const int64_t index = blockIdx.x / tiles;
  const int tile = blockIdx.x % tiles;
  const T* logits = static_cast<const T*>(p.logits) + index * p.row_stride;
  T* out = static_cast<T*>(out_) + index * out_stride;
  const AlignedRow aligned = kAligned ? align_row(logits, p.vocab) : AlignedRow{0, p.vocab, 0};
  const int64_t y = p.targets[index];
  const bool ignored = y == p.targets.ignore_index;

  constexpr int kPerThread = kBackwardVectors * (kAligned ? 1 : kVec<T>);
  // Unsigned: the last tile may end beyond 2^31.
  const unsigned begin = tile * kBackwardThreads * kPerThread + threadIdx.x;
  const unsigned vectors = aligned.vectors;
  Vec<T, N> raw[kPerThread];
#pragma unroll
  for (int u = 0; u < kPerThread; ++u) {
    const unsigned v = begin + u * kBackwardThreads;
    if (v < vectors && !ignored) raw[u] = load<T, N>(logits + aligned.head + static_cast<int>(v) * N);
  }
  GradientCoefficients g = {};
  if (!ignored) g = coefficients(index, logits, y);
  Vec<T, N> zeros;
#pragma unroll
  for (int i = 0; i < N; ++i) zeros.v[i] = from_float<T>(0.0f);
#pragma unroll
  for (int u = 0; u < kPerThread; ++u) {
    const unsigned v = begin + u * kBackwardThreads;
    if (v >= vectors) break;
    const int column = aligned.head + static_cast<int>(v) * N;
    store(out + column, ignored ? zeros : gradient<kExtras>(raw[u], column, p, g));
  }
  if (tile == 0 && threadIdx.x < aligned.edges()) {
    const int column = aligned.edge_column(threadIdx.x, p.vocab);
    out[column] = ignored ? zeros.v[0] : gradient<kExtras>(Vec<T, 1>{logits[column]}, column, p, g).v[0];
  }
}

}  // namespace liger::ce
