// Forward of the norms by mean and variance, LayerNorm and GroupNorm: every element is read once and written
// once, where a block can hold a row. Rows wider than that are cut into chunks and read twice.
#pragma once

#include <type_traits>

#include "device/rows.cuh"
#include "norm/forward_plan.cuh"
#include "norm/moments.cuh"

namespace liger {

// Affine: where the weight and the bias of an element are. It has
//   template <typename T, int N, int V> Held: what a thread keeps of them, with fetch(affine, j, row,
//   vector), before the sums, and apply(affine, j, row, vector, values), where `vector` counts those of the
//   row, as an int where a block holds a row.
template <typename RowsOf, typename AffineOf>
struct MomentNorm {
  using Affine = AffineOf;
  const void* x;
  void* y;
  float *mean, *rstd;
  Moments* parts;  // of chunks, where rows are too wide for a block
  RowsOf x_rows, y_rows;
  int64_t rows, hidden;
  float eps, inverse_hidden;
  Affine affine;
};

enum class Spread { kGrouped, kBlock, kChunk };

// Vectors per thread and threads of a block that works on a chunk.
template <int N>
inline constexpr int kChunkWidth = N == 1 ? 8 : 4;
inline constexpr int kChunkThreads = 512;
template <int N>
inline constexpr int64_t kChunkVectors = int64_t{kChunkWidth<N>} * kChunkThreads;

template <typename T, int N, typename P>
__global__ void __launch_bounds__(kChunkThreads, 2) chunk_moments_kernel(const P p, int parts) {
  constexpr int V = kChunkWidth<N>;
  __shared__ PartMoments scratch[32];
  const int64_t row = blockIdx.x / parts, first = (blockIdx.x % parts) * kChunkVectors<N>;
  const int64_t vectors = min(p.hidden / N - first, kChunkVectors<N>);
  const auto held = [&](int j) { return threadIdx.x + j * kChunkThreads < vectors; };
  const T* from = static_cast<const T*>(p.x) + p.x_rows.offset(row) + first * N;
  Vec<T, N> x[V];
#pragma unroll
  for (int j = 0; j < V; ++j) {
    if (held(j)) x[j] = load<T, N>(from + (threadIdx.x + j * kChunkThreads) * N);
  }
  const Moments moments = block_moments(x, held, 1.0f / static_cast<float>(vectors * N), scratch);
  if (threadIdx.x == 0) p.parts[blockIdx.x] = moments;
}

// Blocks per SM.
template <int V>
inline constexpr int kMomentBlocks = V == 2   ? 3
                                     : V == 4 ? 2
                                              : 1;

// argument: the logarithm of the threads per row (kGrouped), or the number of chunks per row (kChunk).
template <typename T, int N, int V, Spread kSpread, typename P>
__global__ void __launch_bounds__(kForwardThreads<V>, kMomentBlocks<V>)
    moment_norm_kernel(const P p, int argument) {
  __shared__ PartMoments scratch[32];
  const int lanes = kSpread == Spread::kGrouped ? 1 << argument : blockDim.x;
  const int lane = kSpread == Spread::kGrouped ? threadIdx.x & (lanes - 1) : threadIdx.x;
  using Index = std::conditional_t<kSpread == Spread::kChunk, int64_t, int>;
  int64_t row = blockIdx.x, vectors = p.hidden / N;
  Index first = 0;
  if constexpr (kSpread == Spread::kGrouped) {
    row = int64_t{blockIdx.x} * (blockDim.x >> argument) + (threadIdx.x >> argument);
  } else if constexpr (kSpread == Spread::kChunk) {
    // The other way round than before: the last chunks are the most likely ones still to be in the L2 cache.
    const int64_t chunk = gridDim.x - 1 - int64_t{blockIdx.x};
    row = chunk / argument;
    first = chunk % argument * kChunkVectors<N>;
    vectors = min(vectors - first, kChunkVectors<N>);
  }
  const bool active = kSpread != Spread::kGrouped || row < p.rows;
  const int held_vectors = static_cast<int>(vectors);
  const auto held = [&](int j) { return active && lane + j * lanes < held_vectors; };

  Vec<T, N> x[V];
  typename P::Affine::template Held<T, N, V> affine;
  if (active) {
    const T* from = static_cast<const T*>(p.x) + p.x_rows.offset(row) + first * N;
#pragma unroll
    for (int j = 0; j < V; ++j) {
      if (held(j)) x[j] = load<T, N>(from + (lane + j * lanes) * N);
    }
#pragma unroll
    for (int j = 0; j < V; ++j) {
      if (held(j)) affine.fetch(p.affine, j, row, first + lane + j * lanes);
    }
  }

  Moments moments;
  if constexpr (kSpread == Spread::kGrouped) {
    moments = lane_moments(x, held, lanes, p.inverse_hidden);
  } else if constexpr (kSpread == Spread::kBlock) {
    moments = block_moments(x, held, p.inverse_hidden, scratch);
  } else {
    moments = join_parts(p.parts + row * argument, argument, kChunkVectors<N> * N, p.hidden,
                         reinterpret_cast<float*>(scratch));
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
    if (!held(j)) continue;
    float value[N];
    unpack(x[j], value);
#pragma unroll
    for (int i = 0; i < N; ++i) value[i] = (value[i] - moments.mean) * rstd;
    affine.apply(p.affine, j, row, first + lane + j * lanes, value);
    T* const to = y + (lane + j * lanes) * N;
    kSpread == Spread::kChunk ? store_whole(to, pack<T, N>(value)) : store(to, pack<T, N>(value));
  }
}

// Of all but the shortest rows threads have four vectors: two moments take more registers than two vectors
// leave.
inline ForwardPlan plan_moment_norm(int64_t rows, int64_t vectors, bool vectorised) {
  return plan_norm_forward(rows, vectors, vectorised, 64);
}

// Chunks per row; 0 where a block holds a row, and p.parts is not needed.
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
  moment_norm_kernel<T, N, kChunkWidth<N>, Spread::kChunk><<<blocks, kChunkThreads, 0, stream>>>(p, chunks);
}

template <typename T, int N, typename P>
void launch_moment_norm_rows(const P& p, cudaStream_t stream) {
  const ForwardPlan plan = plan_moment_norm(p.rows, p.hidden / N, N > 1);
  const auto launch = [&](auto kernel) {
    kernel<<<static_cast<unsigned>(plan.blocks), plan.threads, 0, stream>>>(p, plan.lanes_log2);
  };
  if constexpr (N == 1) {
    plan.grouped ? launch(moment_norm_kernel<T, 1, 8, Spread::kGrouped, P>)
                 : launch(moment_norm_kernel<T, 1, 8, Spread::kBlock, P>);
  } else if (plan.width == 2) {
    plan.grouped ? launch(moment_norm_kernel<T, N, 2, Spread::kGrouped, P>)
                 : launch(moment_norm_kernel<T, N, 2, Spread::kBlock, P>);
  } else if (plan.width == 4) {
    plan.grouped ? launch(moment_norm_kernel<T, N, 4, Spread::kGrouped, P>)
                 : launch(moment_norm_kernel<T, N, 4, Spread::kBlock, P>);
  } else {
    launch(moment_norm_kernel<T, N, 8, Spread::kBlock, P>);
  }
}

}  // namespace liger
