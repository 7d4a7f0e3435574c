// SPDX-License-Identifier: BSD-3-Clause

// Computes loss, metrics and gradient of rows of logits; the gradient may overwrite the logits. Softmax
// probabilities and float copies of the logits are never materialised. Two kernels compute the same results:
//
//   rows_streamed   any device, any row length: one block per row reads the row twice, once for the online
//                   softmax and once for the gradient
//   rows_smem       sm_90+: a block or a cluster stages the row in shared memory; one read and one write of
//                   global memory (cross_entropy/rows_smem.cuh)
//
// Rows may start at any address: 16-byte loads between the edge elements. Stores of the gradient are 16 bytes
// wide if its row is equally far from a 16-byte boundary as the logits, else single elements.
#pragma once

#include "cross_entropy/rule.cuh"

namespace liger::ce {

inline constexpr int kMaxThreads = 512;

// Block `rank` of `blocks` writes its part of a row of zeros.
template <typename T, bool kStreaming = false>
__device__ __forceinline__ void write_zeros(T* row, int vocab, int rank, int blocks) {
  const AlignedRow aligned = align_row(row, vocab);
  Vec<T, kVec<T>> zeros;
#pragma unroll
  for (int i = 0; i < kVec<T>; ++i) zeros.v[i] = from_float<T>(0.0f);
  T* body = row + aligned.head;
  const int step = static_cast<int>(blockDim.x) * blocks;
  for (int v = rank * static_cast<int>(blockDim.x) + static_cast<int>(threadIdx.x); v < aligned.vectors;
       v += step) {
    T* const at = body + static_cast<int64_t>(v) * kVec<T>;
    kStreaming ? store_streaming(at, zeros) : store_whole(at, zeros);
  }
  if (rank == 0 && threadIdx.x < aligned.edges()) row[aligned.edge_column(threadIdx.x, vocab)] = zeros.v[0];
}

// Merges the partial statistics in `slots`; every thread gets the same bits.
template <bool kExtras>
__device__ __forceinline__ void merge_slots(Stats<kExtras>& s, const Stats<kExtras>* slots, int count) {
  s = empty_stats<kExtras>();
  for (int i = threadIdx.x % 32; i < count; i += 32) merge(s, slots[i]);
  merge_warp(s);
}

// Merges the statistics of all threads of a block. slots: one per warp, in shared memory.
template <bool kExtras>
__device__ __forceinline__ void merge_block(Stats<kExtras>& s, Stats<kExtras>* slots) {
  merge_warp(s);
  if (threadIdx.x % 32 == 0) slots[threadIdx.x / 32] = s;
  __syncthreads();
  merge_slots(s, slots, blockDim.x / 32);
}

// The divisor of the gradient. A new one is the same in every block, and the first block writes it. All
// threads of a block call it.
__device__ __forceinline__ float denominator_of(const Problem& p) {
  if (p.new_denominator == nullptr) return *p.denominator;
  int valid = p.mean ? 0 : 1;
  for (int64_t first = 0; p.mean && first < p.rows; first += blockDim.x) {
    const int64_t row = first + threadIdx.x;
    const int64_t y = row < p.rows ? p.targets[row] : -1;
    valid += __syncthreads_count(y >= 0 && y < p.vocab && y != p.targets.ignore_index);
  }
  const float denominator = static_cast<float>(valid);
  if (blockIdx.x == 0 && threadIdx.x == 0) *p.new_denominator = denominator;
  return denominator;
}

// The statistics of the vectors and edge elements that this thread reads of a row; merge_block() reduces them
// over the block.
template <typename T, bool kExtras>
__device__ __forceinline__ Stats<kExtras> streamed_stats(const Problem& p, const T* logits,
                                                         const AlignedRow& aligned) {
  constexpr int N = kVec<T>, kUnroll = 4;
  const T* body = logits + aligned.head;
  const int step = blockDim.x;
  Stats<kExtras> stats = empty_stats<kExtras>();
  int v = threadIdx.x;
  for (; v + (kUnroll - 1) * step < aligned.vectors; v += kUnroll * step) {
    Vec<T, N> raw[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) raw[u] = load<T, N>(body + static_cast<int64_t>(v + u * step) * N);
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) accumulate(stats, raw[u], aligned.head + (v + u * step) * N, p);
  }
  Vec<T, N> last[kUnroll - 1];
#pragma unroll
  for (int u = 0; u < kUnroll - 1; ++u) {
    if (v + u * step < aligned.vectors) last[u] = load<T, N>(body + static_cast<int64_t>(v + u * step) * N);
  }
#pragma unroll
  for (int u = 0; u < kUnroll - 1; ++u) {
    if (v + u * step < aligned.vectors) accumulate(stats, last[u], aligned.head + (v + u * step) * N, p);
  }
  if (threadIdx.x < aligned.edges()) {
    const int column = aligned.edge_column(threadIdx.x, p.vocab);
    accumulate(stats, Vec<T, 1>{logits[column]}, column, p);
  }
  return stats;
}

// grid: rows. Block size: any multiple of 32 up to kMaxThreads.
template <typename T, bool kExtras>
__global__ void __launch_bounds__(kMaxThreads) rows_streamed(const Problem p) {
  constexpr int N = kVec<T>;
  __shared__ Stats<kExtras> slots[kMaxThreads / 32];
  const int64_t index = blockIdx.x;
  const T* logits = static_cast<const T*>(p.logits) + index * p.row_stride;
  const bool write_gradient = p.gradient != nullptr;
  T* out = static_cast<T*>(p.gradient) + index * p.gradient_stride;
  const AlignedRow aligned = align_row(logits, p.vocab);
  const float denominator = write_gradient || p.new_denominator != nullptr ? denominator_of(p) : 1.0f;
  const int64_t y = p.targets[index];
  if (y == p.targets.ignore_index) {
    if (write_gradient) write_zeros(out, p.vocab, 0, 1);
    if (threadIdx.x == 0) write_ignored(p, index);
    return;
  }

  const Row row = read_row<kExtras>(p, logits, index, y);
  const float upstream = row.token_weight / denominator;
  const int step = blockDim.x;
  Stats<kExtras> stats = streamed_stats<T, kExtras>(p, logits, aligned);
  merge_block(stats, slots);
  if (threadIdx.x == 0) write_results(p, row, stats);
  if (!write_gradient) return;

  const GradientCoefficients g = gradient_coefficients(p, row, upstream, stats.max, stats.sum);
  const bool out_aligned = same_alignment(logits, out);
#pragma unroll 2
  for (int v = threadIdx.x; v < aligned.vectors; v += step) {
    const int column = aligned.head + v * N;
    const Vec<T, N> d = gradient<kExtras>(load<T, N>(logits + column), column, p, g);
    out_aligned ? store(out + column, d) : store_elements(out + column, d);
  }
  if (threadIdx.x < aligned.edges()) {
    const int column = aligned.edge_column(threadIdx.x, p.vocab);
    out[column] = gradient<kExtras>(Vec<T, 1>{logits[column]}, column, p, g).v[0];
  }
}

}  // namespace liger::ce
