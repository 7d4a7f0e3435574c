// Rows of logits -> loss, metrics and the gradient, which may overwrite the logits. Softmax probabilities and
// float copies of the logits are never materialised. Three kernels compute the same results:
//
//   rows_streamed     any device, any row length: one block per row reads the row twice, once for the online
//                     softmax and once for the gradient
//   rows_smem         sm_90+: one block or one cluster per row stages the row in shared memory; one read and
//                     one write of global memory
//   rows_persistent   sm_90+: the same for long rows, by persistent blocks or clusters
//                     (cross_entropy/rows_persistent.cuh)
//
// Rows may start at any address: 16-byte loads between the edge elements. Stores of the gradient are 16 bytes
// wide if its row is equally far from a 16-byte boundary as the logits, else single elements.
#pragma once

#include "cross_entropy/rule.cuh"
#include "device/cluster.cuh"

namespace liger::ce {

inline constexpr int kMaxThreads = 512;
inline constexpr int kMaxCluster = 8;  // the portable cluster size
inline constexpr int kStages = 4;      // of rows_smem: bulk copies of a row with one mbarrier each

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

#if __CUDA_ARCH__ >= 900
// Merges the statistics of all blocks of a cluster, each of which must have started. slots: one per warp of
// the cluster, at the same offset in the shared memory of each block. The next merge needs other slots,
// because a block may still read these.
template <bool kExtras>
__device__ __forceinline__ void merge_cluster(Stats<kExtras>& s, Stats<kExtras>* slots, int rank,
                                              int blocks) {
  if (blocks == 1) {
    merge_block(s, slots);
    return;
  }
  const int warps = blockDim.x / 32;
  merge_warp(s);
  cluster_all_gather(s, slots, rank, blocks);
  merge_slots(s, slots, warps * blocks);
}
#endif

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
  const int64_t y = p.targets[index];
  if (y == p.targets.ignore_index) {
    if (write_gradient) write_zeros(out, p.vocab, 0, 1);
    if (threadIdx.x == 0) write_ignored(p, index);
    return;
  }

  const Row row = read_row<kExtras>(p, logits, index, y);
  const float upstream = write_gradient ? row.token_weight / *p.denominator : 0.0f;
  const int step = blockDim.x;
  Stats<kExtras> stats = streamed_stats<T, kExtras>(p, logits, aligned);
  merge_block(stats, slots);
  if (threadIdx.x == 0) write_results(p, row, stats);
  if (!write_gradient) return;

  const GradientCoefficients g =
      gradient_coefficients(p, row, stats.max + logf(stats.sum), upstream, stats.max, stats.sum);
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

// grid: rows x blocks; the blocks of a row are one cluster. Block `rank` stages the vectors [rank, rank + 1)
// x slice. Block size: any multiple of 32 up to kMaxThreads. Dynamic shared memory: `slice` vectors.
template <typename T, bool kExtras>
__global__ void __launch_bounds__(kMaxThreads) rows_smem(const Problem p, int slice, int blocks) {
#if __CUDA_ARCH__ >= 900
  constexpr int N = kVec<T>;
  extern __shared__ __align__(128) unsigned char shared_row[];
  __shared__ Stats<kExtras> slots[kMaxThreads / 32 * kMaxCluster];
  __shared__ uint64_t arrived[kStages];
  const int64_t index = blockIdx.x / blocks;
  const int rank = blockIdx.x % blocks;
  const T* logits = static_cast<const T*>(p.logits) + index * p.row_stride;
  T* out = static_cast<T*>(p.gradient) + index * p.gradient_stride;
  const int64_t y = p.targets[index];
  if (y == p.targets.ignore_index) {
    write_zeros(out, p.vocab, rank, blocks);
    if (rank == 0 && threadIdx.x == 0) write_ignored(p, index);
    return;
  }
  if (blocks > 1) cluster_arrive_relaxed();

  const AlignedRow aligned = align_row(logits, p.vocab);
  const int begin = min(rank * slice, aligned.vectors), count = min(begin + slice, aligned.vectors) - begin;
  const int first_column = aligned.head + begin * N;
  const int step = blockDim.x;
  const int stage = ((slice + kStages - 1) / kStages + step - 1) / step * step;
  const T* smem_row = reinterpret_cast<const T*>(shared_row);
  if (threadIdx.x == 0) {
#pragma unroll
    for (int i = 0; i < kStages; ++i) mbarrier_init(&arrived[i]);
    mbarrier_init_fence();
#pragma unroll
    for (int i = 0; i < kStages; ++i) {
      const int first = i * stage, vectors = min(count - first, stage);
      if (vectors <= 0) break;
      mbarrier_arrive_expect(&arrived[i], vectors * 16);
      bulk_load(shared_row + first * 16, logits + first_column + first * N, vectors * 16, &arrived[i]);
    }
  }
  const Row row = read_row<kExtras>(p, logits, index, y);
  const float upstream = row.token_weight / *p.denominator;
  const bool has_edge = rank == 0 && threadIdx.x < aligned.edges();
  const int edge_column = has_edge ? aligned.edge_column(threadIdx.x, p.vocab) : -1;
  Vec<T, 1> edge = {};
  if (edge_column >= 0) edge.v[0] = logits[edge_column];
  __syncthreads();  // makes the initialised mbarriers visible to all threads

  Stats<kExtras> stats = empty_stats<kExtras>();
  for (int i = 0; i < kStages && i * stage < count; ++i) {
    mbarrier_wait(&arrived[i], 0);
    const int stop = min(count, (i + 1) * stage);
#pragma unroll 2
    for (int v = i * stage + static_cast<int>(threadIdx.x); v < stop; v += step) {
      accumulate(stats, load<T, N>(smem_row + v * N), first_column + v * N, p);
    }
  }
  if (edge_column >= 0) accumulate(stats, edge, edge_column, p);
  __syncwarp();
  if (blocks > 1) cluster_wait();  // every block has started: its slots may be written
  merge_cluster(stats, slots, rank, blocks);
  if (rank == 0 && threadIdx.x == 0) write_results(p, row, stats);

  const GradientCoefficients g =
      gradient_coefficients(p, row, stats.max + logf(stats.sum), upstream, stats.max, stats.sum);
  const bool out_aligned = same_alignment(logits, out);
#pragma unroll 2
  for (int v = threadIdx.x; v < count; v += step) {
    const int column = first_column + v * N;
    const Vec<T, N> d = gradient<kExtras>(load<T, N>(smem_row + v * N), column, p, g);
    out_aligned ? store(out + column, d) : store_elements(out + column, d);
  }
  if (edge_column >= 0) out[edge_column] = gradient<kExtras>(edge, edge_column, p, g).v[0];
#endif
}

}  // namespace liger::ce
