// SPDX-License-Identifier: BSD-3-Clause

// Skips ignored rows: an index of the rows with a valid target, and kernels that gather and scatter rows by
// it.
//
// The index is in ascending order. Its length stays in device memory, where kernels read it, so the host need
// not wait. Row j of the compacted rows is row index[j] >= j of the batch.
#pragma once

#include <algorithm>
#include <type_traits>

#include "cross_entropy/rule.cuh"

namespace liger::valid_rows {

inline constexpr int kIndexThreads = 1024;
inline constexpr int kIndexRows = 16;  // per thread and round
inline constexpr int kRowThreads = 256;
inline constexpr int kExpandThreads = 512;
inline constexpr int kExpandRows = 8;  // per thread and round

struct RowIndex {
  int32_t* index;     // (rows): the valid rows; undefined beyond their number
  int32_t* position;  // (rows of the batch): the position of a row in index; -1: ignored
  int32_t* count;     // the number of valid rows
};

// An index covers these rows of a batch, in this order: either all rows,
struct AllRows {
  __device__ __forceinline__ int64_t row(int64_t i) const { return i; }
  __device__ __forceinline__ int32_t position(int at) const { return at; }
};
// or two ranges of `length` rows with `gap` rows between them. Positions start at `offset`.
struct RowRanges {
  int64_t first, length, gap;
  int offset;
  __device__ __forceinline__ int64_t row(int64_t i) const { return first + i + (i < length ? 0 : gap); }
  __device__ __forceinline__ int32_t position(int at) const { return offset + at; }
};

// Fills the index. One block; 16384 rows per iteration. reported: null, or two numbers in pinned host memory:
// the number of valid rows and the number of rows before the first ignored row.
template <typename Index, typename Which>
__global__ void __launch_bounds__(kIndexThreads)
    index_valid_rows(const Index* targets, int64_t ignore_index, int64_t rows, RowIndex row_index,
                     int32_t* reported, const Which which) {
  __shared__ int warp_totals[2][32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int before = 0;  // valid rows of earlier iterations
  int buffer = 0;
  for (int64_t round = 0; round < rows; round += kIndexThreads * kIndexRows, buffer ^= 1) {
    // A warp takes consecutive rows, 32 at a time.
    const int64_t begin = round + warp * (32 * kIndexRows) + lane;
    Index target[kIndexRows];
#pragma unroll
    for (int i = 0; i < kIndexRows; ++i) {
      const int64_t row = begin + 32 * i;
      target[i] = row < rows ? targets[which.row(row)] : 0;
    }
    unsigned valid[kIndexRows];
    int total = 0;
#pragma unroll
    for (int i = 0; i < kIndexRows; ++i) {
      valid[i] = __ballot_sync(0xffffffffu, begin + 32 * i < rows && target[i] != ignore_index);
      total += __popc(valid[i]);
    }
    if (lane == 0) warp_totals[buffer][warp] = total;
    __syncthreads();
    int running = warp_totals[buffer][lane];
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) {
      const int lower = __shfl_up_sync(0xffffffffu, running, offset);
      if (lane >= offset) running += lower;
    }
    int place = before + __shfl_sync(0xffffffffu, running, warp) - total;
    before += __shfl_sync(0xffffffffu, running, 31);
#pragma unroll
    for (int i = 0; i < kIndexRows; ++i) {
      const int64_t row = begin + 32 * i;
      const bool is_valid = valid[i] >> lane & 1;
      const int at = place + __popc(valid[i] & ((1u << lane) - 1));
      if (is_valid) row_index.index[at] = static_cast<int32_t>(which.row(row));
      if (row < rows) {
        row_index.position[which.row(row)] = is_valid ? which.position(at) : -1;
        const bool first_ignored = !is_valid && at == row;
        if (first_ignored && reported != nullptr) reported[1] = at;
      }
      place += __popc(valid[i]);
    }
  }
  if (threadIdx.x == 0) {
    *row_index.count = before;
    if (reported != nullptr) {
      reported[0] = before;
      if (before == rows) reported[1] = before;
    }
  }
}

// Targets and token weights (or null) of the compacted rows; beyond the count the target is ignore_index.
template <typename Index>
__global__ void __launch_bounds__(kRowThreads)
    gather_targets(const Index* targets, int64_t ignore_index, const float* token_weight, int64_t rows,
                   RowIndex row_index, Index* targets_out, float* token_weight_out) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kRowThreads + threadIdx.x;
  if (i >= rows) return;
  const bool is_valid = i < *row_index.count;
  const int32_t row = is_valid ? row_index.index[i] : 0;
  targets_out[i] = is_valid ? targets[row] : static_cast<Index>(ignore_index);
  if (token_weight != nullptr) token_weight_out[i] = is_valid ? token_weight[row] : 0.0f;
}

template <typename T, int N>
__device__ __forceinline__ Vec<T, N> zero_vector() {
  Vec<T, N> zero;
#pragma unroll
  for (int i = 0; i < N; ++i) zero.v[i] = from_float<T>(0.0f);
  return zero;
}

// Source rows of copy_rows(); a negative row means zeros. The first choice: rows of an index from `first` on,
// and zeros beyond the count, which keep products finite,
struct GatheredRows {
  RowIndex row_index;
  int64_t first;
  __device__ __forceinline__ int64_t operator()(int64_t i) const {
    return first + i < *row_index.count ? row_index.index[first + i] : -1;
  }
};
// the second: rows at given positions, or the row itself without positions,
struct PermutedRows {
  const int32_t* position;
  __device__ __forceinline__ int64_t operator()(int64_t i) const {
    return position == nullptr ? i : position[i];
  }
};
// the third: the row itself unless it is ignored.
struct MaskedRows {
  ce::Targets targets;
  __device__ __forceinline__ int64_t operator()(int64_t i) const {
    return targets[i] == targets.ignore_index ? -1 : i;
  }
};

// out[i] = x[source_of(i)]. grid: rows of out; `vectors` vectors of N elements per row.
template <typename T, int N, typename Source>
__global__ void __launch_bounds__(kRowThreads)
    copy_rows(const T* x, int64_t x_stride, const Source source_of, int vectors, T* out, int64_t out_stride) {
  const int64_t i = blockIdx.x;
  const int64_t source = source_of(i);
  const T* from = x + source * x_stride;
  T* to = out + i * out_stride;
#pragma unroll 4
  for (int v = threadIdx.x; v < vectors; v += blockDim.x) {
    store(to + int64_t{v} * N, source >= 0 ? load<T, N>(from + int64_t{v} * N) : zero_vector<T, N>());
  }
}

// Scatters the compacted rows at the start of x to their rows, in place; ignored rows become zeros.
//
// A block processes a column strip of `lanes` vectors from the last row to the first. The source of a row has
// at most the index of the row, so no later iteration reads what this iteration writes; within an iteration
// all loads precede all stores.
template <typename T, int N>
__global__ void __launch_bounds__(kExpandThreads)
    expand_rows(T* x, int64_t stride, const int32_t* position, int64_t rows, int vectors, int lanes) {
  const int slot = threadIdx.x / lanes, slots = kExpandThreads / lanes;
  const int64_t v = static_cast<int64_t>(blockIdx.x) * lanes + threadIdx.x % lanes;
  const bool inside = v < vectors;
  T* column = x + v * N;
  for (int64_t last = rows - 1; last >= 0; last -= slots * kExpandRows) {
    if (position[last] == last) return;  // no ignored row up to here
    Vec<T, N> values[kExpandRows];
#pragma unroll
    for (int i = 0; i < kExpandRows; ++i) {
      const int64_t row = last - (i * slots + slot);
      const int32_t from = row >= 0 ? position[row] : -1;
      values[i] = inside && from >= 0 ? load<T, N>(column + from * stride) : zero_vector<T, N>();
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kExpandRows; ++i) {
      const int64_t row = last - (i * slots + slot);
      if (inside && row >= 0) store_whole(column + row * stride, values[i]);
    }
  }
}

// Per-row results of cross entropy, for the compacted rows or for all rows; null if not requested.
struct Results {
  float *loss, *z_loss, *logprobs, *entropy;
  int64_t* predicted;
};

// Scatters results; ignored rows get 0, and -1 as prediction. (A template, so that several sources may
// include it.)
template <typename Position>
__global__ void __launch_bounds__(kRowThreads)
    expand_results(Results compacted, Results all, const Position* position, int64_t rows) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kRowThreads + threadIdx.x;
  if (row >= rows) return;
  const Position from = position[row];
  const auto move = [&](const float* values, float* out) {
    if (out != nullptr) out[row] = from >= 0 ? values[from] : 0.0f;
  };
  move(compacted.loss, all.loss);
  move(compacted.z_loss, all.z_loss);
  move(compacted.logprobs, all.logprobs);
  move(compacted.entropy, all.entropy);
  if (all.predicted != nullptr) all.predicted[row] = from >= 0 ? compacted.predicted[from] : -1;
}

// --- launches ----------------------------------------------------------------------------------------------
// The caller checks for launch errors. A batch has fewer than 2^31 rows, and rows are contiguous.

// Calls body(kVec<T>) if both are aligned to vectors, else body(1).
template <typename T, typename Body>
void with_vectors(const T* a, int64_t a_stride, const T* b, int64_t b_stride, int64_t columns, Body&& body) {
  const bool whole = columns % kVec<T> == 0 && a_stride % kVec<T> == 0 && b_stride % kVec<T> == 0 &&
                     is_aligned16(a) && is_aligned16(b);
  if (whole) {
    body(std::integral_constant<int, kVec<T>>{});
  } else {
    body(std::integral_constant<int, 1>{});
  }
}

// Calls body(typed pointer to the targets).
template <typename Body>
void with_targets(const ce::Targets& targets, Body&& body) {
  if (targets.is_int32) {
    body(static_cast<const int32_t*>(targets.data));
  } else {
    body(static_cast<const int64_t*>(targets.data));
  }
}

inline unsigned row_threads(int64_t vectors) {
  // Every thread gets at least two vectors.
  return static_cast<unsigned>(std::clamp<int64_t>((vectors + 63) / 64 * 32, 32, kRowThreads));
}

inline unsigned blocks_of(int64_t rows) {
  return static_cast<unsigned>((rows + kRowThreads - 1) / kRowThreads);
}

template <typename Which>
void launch_index_valid_rows(const ce::Targets& targets, int64_t rows, const RowIndex& row_index,
                             int32_t* reported, cudaStream_t stream, const Which& which) {
  with_targets(targets, [&](auto* typed) {
    index_valid_rows<<<1, kIndexThreads, 0, stream>>>(typed, targets.ignore_index, rows, row_index, reported,
                                                      which);
  });
}
inline void launch_index_valid_rows(const ce::Targets& targets, int64_t rows, const RowIndex& row_index,
                                    int32_t* reported, cudaStream_t stream) {
  launch_index_valid_rows(targets, rows, row_index, reported, stream, AllRows{});
}

// targets_out has the type of the targets.
inline void launch_gather_targets(const ce::Targets& targets, const float* token_weight, int64_t rows,
                                  const RowIndex& row_index, void* targets_out, float* token_weight_out,
                                  cudaStream_t stream) {
  if (rows == 0) return;
  with_targets(targets, [&](auto* typed) {
    using Index = std::remove_const_t<std::remove_pointer_t<decltype(typed)>>;
    gather_targets<<<blocks_of(rows), kRowThreads, 0, stream>>>(
        typed, targets.ignore_index, token_weight, rows, row_index, static_cast<Index*>(targets_out),
        token_weight_out);
  });
}

// rows: number of rows of out.
template <typename T, typename Source>
void launch_copy_rows(const T* x, int64_t x_stride, const Source& source, int64_t rows, int64_t columns,
                      T* out, int64_t out_stride, cudaStream_t stream) {
  if (rows == 0 || columns == 0) return;
  with_vectors(x, x_stride, out, out_stride, columns, [&](auto n) {
    const int64_t vectors = columns / n;
    copy_rows<T, n><<<static_cast<unsigned>(rows), row_threads(vectors), 0, stream>>>(
        x, x_stride, source, static_cast<int>(vectors), out, out_stride);
  });
}

template <typename T>
void launch_expand_rows(T* x, int64_t stride, const int32_t* position, int64_t rows, int64_t columns,
                        cudaStream_t stream) {
  if (rows == 0 || columns == 0) return;
  with_vectors(x, stride, x, stride, columns, [&](auto n) {
    const int64_t vectors = columns / n;
    // The launch has at least 128 blocks unless strips would be narrower than a 32-byte sector.
    constexpr int kBytes = n * static_cast<int>(sizeof(T));
    int lanes = 32 / kBytes;
    while (lanes < 32 && vectors / (2 * lanes) >= 128) lanes *= 2;
    expand_rows<T, n><<<static_cast<unsigned>((vectors + lanes - 1) / lanes), kExpandThreads, 0, stream>>>(
        x, stride, position, rows, static_cast<int>(vectors), lanes);
  });
}

inline void launch_expand_results(const Results& compacted, const Results& all, const int32_t* position,
                                  int64_t rows, cudaStream_t stream) {
  if (rows == 0) return;
  expand_results<<<blocks_of(rows), kRowThreads, 0, stream>>>(compacted, all, position, rows);
}

}  // namespace liger::valid_rows
