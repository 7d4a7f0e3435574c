// How rows lie in the shared memory of blocks that stay on the device and take row after row: what
// cross_entropy_persistent.cuh and divergence_persistent.cuh have in common.
//
// A block, or a cluster of blocks where one cannot hold a row, has a slice of each row, in pieces. A warp has
// a part of its own in every piece, with a barrier: one bulk copy, or one for each tensor whose rows are read
// together, brings it, and nobody else reads it.
#pragma once

#include "common/cluster.cuh"
#include "common/integers.h"
#include "kernels/cross_entropy_problem.cuh"

namespace liger {

// How rows lie in blocks; pieces == 0 where they do not.
struct PersistentPlan {
  int blocks;  // of a row
  int slice;   // vectors of a row that a block has
  int pieces;  // of shared memory that they take
};

// Of an instance: threads of a block, the vectors of a piece for each of them, what a warp leaves for the
// others when they meet, how many vectors are kept for one of a row, and how many blocks share a
// multiprocessor.
template <int kThreads_, int kVectors_, typename Slot_, int kKept_ = 1, int kResident_ = 1>
struct PersistentShape {
  static constexpr int kThreads = kThreads_, kVectors = kVectors_, kWarps = kThreads / 32;
  static constexpr int kKept = kKept_, kResident = kResident_;
  static constexpr int kPart = 32 * kVectors, kPiece = kThreads * kVectors;  // vectors
  static constexpr int kPieceBytes = kKept * kPiece * 16 + kWarps * static_cast<int>(sizeof(uint64_t));
  using Slot = Slot_;

  // Dynamic shared memory: pieces, their barriers, and two sets of slots for what warps leave.
  static constexpr int shared_bytes(int pieces, int blocks) {
    return pieces * kPieceBytes + 2 * kWarps * blocks * static_cast<int>(sizeof(Slot));
  }

  // The fewest blocks, from so many to so many, whose shared memory holds a row. Each block takes 1 KB of a
  // multiprocessor beside what it can use.
  static PersistentPlan plan(int64_t row_vectors, int fewest, int most, int shared_memory_optin) {
    const int available = (shared_memory_optin + 1024) / kResident - 1024;
    for (int blocks = fewest; blocks <= most; ++blocks) {
      const int64_t slice = ceil_div(row_vectors, blocks), pieces = ceil_div(slice, kPiece);
      if (pieces > (available - shared_bytes(0, blocks)) / kPieceBytes) continue;
      return {blocks, static_cast<int>(slice), static_cast<int>(pieces)};
    }
    return {0, 0, 0};
  }
};

#if __CUDA_ARCH__ >= 900
// The vectors of a row that one of its blocks has.
template <typename T>
struct Slice {
  const T* logits;  // of the row
  Span span;
  int begin, count;
  bool live;  // not ignored

  __device__ __forceinline__ Slice(const T* row, int vocab, const PersistentPlan& plan, int rank,
                                   int64_t target, int64_t ignore_index)
      : logits(row),
        span(span_of(logits, vocab)),
        begin(min(rank * plan.slice, span.vectors)),
        count(min(begin + plan.slice, span.vectors) - begin),
        live(target != ignore_index) {}

  __device__ __forceinline__ int column(int vector) const { return span.head + (begin + vector) * kVec<T>; }
};
#endif

}  // namespace liger
