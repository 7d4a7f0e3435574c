// SPDX-License-Identifier: BSD-3-Clause

// Forward of LayerNorm and GroupNorm: y = (x - mean) * rstd * weight + bias over the rows of a matrix.
//
// A row that fits in the registers of a block is read once and written once (moment_norm_kernel, kGrouped or
// kBlock). A wider row is split into chunks and read twice: chunk_moments_kernel writes the moments of each
// chunk, then moment_norm_kernel (kChunk) combines the moments of a row and normalises.
//
// Grid: blocks of several rows, of one row, or of one chunk (RowMapping). With N = kVec<T> every row of x and
// y is aligned to 16 bytes and `hidden` is a multiple of N; N = 1 has no requirement.
#pragma once

#include <type_traits>

#include "device/rows.cuh"
#include "norm/forward_plan.cuh"
#include "norm/moments.cuh"

namespace liger {

// Affine maps an element to its weight and bias. It has a member template <typename T, int N, int V>
// Fragment, the registers of a thread for V vectors, with
//   prefetch(affine, j, row, vector)       called before the reductions
//   apply(affine, j, row, vector, values)  called after them
// where `vector` is the index in the row, an int unless rows are split into chunks.
template <typename RowOffsets, typename AffineT>
struct MomentNorm {
  using Affine = AffineT;
  const void* x;
  void* y;
  float *mean, *rstd;
  Moments* chunk_moments;  // workspace (rows, chunks); unused if a row fits in a block
  RowOffsets x_rows, y_rows;
  int64_t rows, hidden;
  float eps, inverse_hidden;
  Affine affine;
};

enum class RowMapping {
  kGrouped,  // several rows per block
  kBlock,    // one row per block
  kChunk,    // one chunk of a row per block
};

// Vectors per thread and block size for a chunk.
template <int N>
inline constexpr int kChunkWidth = N == 1 ? 8 : 4;
inline constexpr int kChunkThreads = 512;
template <int N>
inline constexpr int64_t kChunkVectors = int64_t{kChunkWidth<N>} * kChunkThreads;

template <typename T, int N, typename P>
__global__ void __launch_bounds__(kChunkThreads, 2) chunk_moments_kernel(const P p, int chunks) {
  constexpr int V = kChunkWidth<N>;
  __shared__ PartialMoments scratch[32];
  const int64_t row = blockIdx.x / chunks, first = (blockIdx.x % chunks) * kChunkVectors<N>;
  const int64_t vectors = min(p.hidden / N - first, kChunkVectors<N>);
  const auto in_row = [&](int j) { return threadIdx.x + j * kChunkThreads < vectors; };
  const T* from = static_cast<const T*>(p.x) + p.x_rows.offset(row) + first * N;
  Vec<T, N> x[V];
#pragma unroll
  for (int j = 0; j < V; ++j) {
    if (in_row(j)) x[j] = load<T, N>(from + (threadIdx.x + j * kChunkThreads) * N);
  }
  const Moments moments = block_moments(x, in_row, 1.0f / static_cast<float>(vectors * N), scratch);
  if (threadIdx.x == 0) p.chunk_moments[blockIdx.x] = moments;
}

// Minimum number of resident blocks per SM.
template <int V>
inline constexpr int kMomentBlocks = V == 2   ? 3
                                     : V == 4 ? 2
                                              : 1;

// lanes_log2_or_chunks: log2 of the threads per row (kGrouped), or chunks per row (kChunk).
template <typename T, int N, int V, RowMapping kMapping, typename P>
__global__ void __launch_bounds__(kForwardThreads<V>, kMomentBlocks<V>)
    moment_norm_kernel(const P p, int lanes_log2_or_chunks) {
  __shared__ PartialMoments scratch[32];
  const int lanes = kMapping == RowMapping::kGrouped ? 1 << lanes_log2_or_chunks : blockDim.x;
  const int lane = kMapping == RowMapping::kGrouped ? threadIdx.x & (lanes - 1) : threadIdx.x;
  using Index = std::conditional_t<kMapping == RowMapping::kChunk, int64_t, int>;
  int64_t row = blockIdx.x, vectors = p.hidden / N;
  Index first = 0;
  if constexpr (kMapping == RowMapping::kGrouped) {
    row = int64_t{blockIdx.x} * (blockDim.x >> lanes_log2_or_chunks) + (threadIdx.x >> lanes_log2_or_chunks);
  } else if constexpr (kMapping == RowMapping::kChunk) {
    // In the reverse order of chunk_moments_kernel: the chunks it has read last are most likely in L2.
    const int64_t chunk = gridDim.x - 1 - int64_t{blockIdx.x};
    row = chunk / lanes_log2_or_chunks;
    first = chunk % lanes_log2_or_chunks * kChunkVectors<N>;
    vectors = min(vectors - first, kChunkVectors<N>);
  }
  const bool active = kMapping != RowMapping::kGrouped || row < p.rows;
  const int row_vectors = static_cast<int>(vectors);
  const auto in_row = [&](int j) { return active && lane + j * lanes < row_vectors; };

  Vec<T, N> x[V];
  typename P::Affine::template Fragment<T, N, V> affine;
  if (active) {
    const T* from = static_cast<const T*>(p.x) + p.x_rows.offset(row) + first * N;
#pragma unroll
    for (int j = 0; j < V; ++j) {
      if (in_row(j)) x[j] = load<T, N>(from + (lane + j * lanes) * N);
    }
#pragma unroll
    for (int j = 0; j < V; ++j) {
      if (in_row(j)) affine.prefetch(p.affine, j, row, first + lane + j * lanes);
    }
  }

  Moments moments;
  if constexpr (kMapping == RowMapping::kGrouped) {
    moments = lane_moments(x, in_row, lanes, p.inverse_hidden);
  } else if constexpr (kMapping == RowMapping::kBlock) {
    moments = block_moments(x, in_row, p.inverse_hidden, scratch);
  } else {
    moments = combine_chunks(p.chunk_moments + row * lanes_log2_or_chunks, lanes_log2_or_chunks,
                             kChunkVectors<N> * N, p.hidden, reinterpret_cast<float*>(scratch));
  }

  if (!active) return;
  const float rstd = rsqrtf(fmaf(moments.squares, p.inverse_hidden, p.eps));
  if (lane == 0 && first == 0) {
    p.mean[row] = moments.mean;
    p.rstd[row] = rstd;
  }
  T* y = static_cast<T*>(p.y) + p.y_rows.offset(row) + first * N;
#pragma unroll
  for (int j = 0; j < V; ++j) {
    if (!in_row(j)) continue;
    float value[N];
    unpack(x[j], value);
#pragma unroll
    for (int i = 0; i < N; ++i) value[i] = (value[i] - moments.mean) * rstd;
    affine.apply(p.affine, j, row, first + lane + j * lanes, value);
    T* const to = y + (lane + j * lanes) * N;
    kMapping == RowMapping::kChunk ? store_whole(to, pack<T, N>(value)) : store(to, pack<T, N>(value));
  }
}

// Only rows of up to 64 vectors prefer two vectors per thread: at the occupancy of that kernel, the two
// moments need more registers than a thread has.
inline ForwardPlan plan_moment_norm(int64_t rows, int64_t vectors, bool vectorised) {
  return plan_norm_forward(rows, vectors, vectorised, 64);
}

// Chunks per row; 0 if a row fits in a block, which needs no p.chunk_moments.
template <typename T>
int moment_norm_chunks(int64_t hidden, bool vectorised) {
  const int n = vectorised ? kVec<T> : 1;
  if (plan_moment_norm(1, hidden / n, vectorised).width != 0) return 0;
  const int64_t chunk = vectorised ? kChunkVectors<kVec<T>> : kChunkVectors<1>;
  return static_cast<int>((hidden / n + chunk - 1) / chunk);
}

template <typename T, int N, typename P>
void launch_moment_norm_chunks(const P& p, int chunks, cudaStream_t stream) {
  const unsigned blocks = static_cast<unsigned>(p.rows * chunks);
  chunk_moments_kernel<T, N><<<blocks, kChunkThreads, 0, stream>>>(p, chunks);
  moment_norm_kernel<T, N, kChunkWidth<N>, RowMapping::kChunk>
      <<<blocks, kChunkThreads, 0, stream>>>(p, chunks);
}

template <typename T, int N, typename P>
void launch_moment_norm_rows(const P& p, cudaStream_t stream) {
  const ForwardPlan plan = plan_moment_norm(p.rows, p.hidden / N, N > 1);
  const auto launch = [&](auto kernel) {
    kernel<<<static_cast<unsigned>(plan.blocks), plan.threads, 0, stream>>>(p, plan.lanes_log2);
  };
  if constexpr (N == 1) {
    plan.grouped ? launch(moment_norm_kernel<T, 1, 8, RowMapping::kGrouped, P>)
                 : launch(moment_norm_kernel<T, 1, 8, RowMapping::kBlock, P>);
  } else if (plan.width == 2) {
    plan.grouped ? launch(moment_norm_kernel<T, N, 2, RowMapping::kGrouped, P>)
                 : launch(moment_norm_kernel<T, N, 2, RowMapping::kBlock, P>);
  } else if (plan.width == 4) {
    plan.grouped ? launch(moment_norm_kernel<T, N, 4, RowMapping::kGrouped, P>)
                 : launch(moment_norm_kernel<T, N, 4, RowMapping::kBlock, P>);
  } else {
    launch(moment_norm_kernel<T, N, 8, RowMapping::kBlock, P>);
  }
}

}  // namespace liger
