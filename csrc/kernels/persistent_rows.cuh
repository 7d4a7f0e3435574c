// How rows lie in the shared memory of blocks that stay on the device and take row after row: what
// cross_entropy_persistent.cuh, divergence_persistent.cuh and softmax_persistent.cuh have in common.
//
// A block, or a cluster of blocks where one cannot hold a row, has a slice of each row, in pieces. A warp has
// a part of its own in every piece, with a barrier: one bulk copy, or one for each tensor whose rows are read
// together, brings it, and nobody else reads it.
//
//   PersistentShape   every piece has the same parts, so that some warps have nothing in the last one
//   EvenShape         all warps share what is left over whole pieces, and the memory ends with it
#pragma once

#include "common/cluster.cuh"
#include "common/integers.h"
#include "kernels/span.cuh"

namespace liger {

// How rows lie in blocks; pieces == 0 where they do not.
struct PersistentPlan {
  int blocks;  // of a row
  int slice;   // vectors of a row that a block has
  int pieces;  // of shared memory that they take
};

// Of an instance: threads of a block, the vectors of a piece for each of them, what a warp leaves for the
// others when they meet, and how many vectors are kept for one of a row.
template <int kThreads_, int kVectors_, typename Slot_, int kKept_ = 1>
struct PersistentShape {
  static constexpr int kThreads = kThreads_, kVectors = kVectors_, kWarps = kThreads / 32, kKept = kKept_;
  static constexpr int kPart = 32 * kVectors, kPiece = kThreads * kVectors;  // vectors
  static constexpr int kPieceBytes = kKept * kPiece * 16 + kWarps * static_cast<int>(sizeof(uint64_t));
  using Slot = Slot_;

  // Dynamic shared memory: pieces, their barriers, and two sets of slots for what warps leave.
  static constexpr int shared_bytes(const PersistentPlan& plan) {
    return plan.pieces * kPieceBytes + 2 * kWarps * plan.blocks * static_cast<int>(sizeof(Slot));
  }

  // The fewest blocks, from so many to so many, whose shared memory holds a row.
  static PersistentPlan plan(int64_t row_vectors, int fewest, int most, int shared_memory_optin) {
    for (int blocks = fewest; blocks <= most; ++blocks) {
      const int64_t slice = ceil_div(row_vectors, blocks), pieces = ceil_div(slice, kPiece);
      if (pieces > (shared_memory_optin - shared_bytes({blocks, 0, 0})) / kPieceBytes) continue;
      return {blocks, static_cast<int>(slice), static_cast<int>(pieces)};
    }
    return {0, 0, 0};
  }
};

struct EvenPlan : PersistentPlan {
  int own;  // vectors of a row that a warp has, at most
};

// The same where a warp has as much of the last piece as any other, of blocks of which kResident share a
// multiprocessor.
template <int kThreads_, int kVectors_, typename Slot_, int kKept_, int kResident_>
struct EvenShape {
  static constexpr int kThreads = kThreads_, kVectors = kVectors_, kWarps = kThreads / 32;
  static constexpr int kKept = kKept_, kResident = kResident_;
  static constexpr int kPart = 32 * kVectors, kPiece = kThreads * kVectors;  // vectors
  using Slot = Slot_;

  // Dynamic shared memory: what warps have, two sets of slots for what they leave, a slot of each for what
  // comes of it, the barriers of these sets, and those of the parts.
  static constexpr int shared_bytes(const EvenPlan& plan) {
    constexpr int kBarrier = sizeof(uint64_t), kSlot = sizeof(Slot);
    return kWarps * (plan.own * kKept * 16 + 2 * plan.blocks * kSlot + plan.pieces * kBarrier) +
           2 * (kSlot + kBarrier);
  }

  // As of PersistentShape. Each block takes 1 KB of a multiprocessor beside what it can use.
  static EvenPlan plan(int64_t row_vectors, int fewest, int most, int shared_memory_optin) {
    const int available = (shared_memory_optin + 1024) / kResident - 1024;
    for (int blocks = fewest; blocks <= most; ++blocks) {
      const int64_t slice = ceil_div(row_vectors, blocks);
      if (slice * kKept * 16 > available) continue;
      const int vectors = static_cast<int>(slice), whole = vectors / kPiece, left = vectors % kPiece;
      const EvenPlan plan{{blocks, vectors, whole + (left > 0)}, whole * kPart + ceil_div(left, kWarps)};
      if (shared_bytes(plan) <= available) return plan;
    }
    return {{0, 0, 0}, 0};
  }
};

#if __CUDA_ARCH__ >= 900
// The vectors of a row that one of its blocks has.
template <typename T>
struct Slice {
  const T* row;
  Span span;
  int begin, count;
  bool live;  // not ignored

  __device__ __forceinline__ Slice(const T* row, int columns, const PersistentPlan& plan, int rank,
                                   bool live = true)
      : row(row),
        span(span_of(row, columns)),
        begin(min(rank * plan.slice, span.vectors)),
        count(min(begin + plan.slice, span.vectors) - begin),
        live(live) {}

  __device__ __forceinline__ int column(int vector) const { return span.head + (begin + vector) * kVec<T>; }
  // The single element at either end of the row that is this thread's, or -1.
  __device__ __forceinline__ int edge_column(int rank, int columns) const {
    return rank == 0 && threadIdx.x < span.edges() ? span.edge_column(threadIdx.x, columns) : -1;
  }
};

// The parts of all pieces that a warp keeps. In a piece the Shape::kKept tensors lie one behind the other.
template <typename T, typename Shape>
struct KeptParts {
  static constexpr int N = kVec<T>, kTensor = Shape::kPiece * N, kPieceStep = Shape::kKept * kTensor;
  T* first;                     // this lane's first vector of the first piece
  uint64_t* arrived;            // a barrier for each piece
  typename Shape::Slot* slots;  // of the next merge
  int to_other_slots;           // of the one after
  uint32_t phase = 0;

  __device__ __forceinline__ KeptParts(unsigned char* memory, const PersistentPlan& plan) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    first = reinterpret_cast<T*>(memory) + (warp * Shape::kPart + lane) * N;
    uint64_t* const barriers =
        reinterpret_cast<uint64_t*>(memory + plan.pieces * Shape::kKept * Shape::kPiece * 16);
    arrived = barriers + warp * plan.pieces;
    slots = reinterpret_cast<typename Shape::Slot*>(barriers + Shape::kWarps * plan.pieces);
    to_other_slots = Shape::kWarps * plan.blocks;
    if (lane == 0) {
      for (int k = 0; k < plan.pieces; ++k) mbarrier_init(&arrived[k]);
      mbarrier_init_fence();
    }
    __syncwarp();
  }
  __device__ __forceinline__ void swap_slots() {
    slots += to_other_slots;
    to_other_slots = -to_other_slots;
  }
  // By one lane: this warp's part of piece k, of rows that are equally far from a 16-byte boundary.
  template <int kTensors>
  __device__ __forceinline__ void load_part(const Slice<T>& s, const T* const (&rows)[kTensors],
                                            int k) const {
    const int vector = k * Shape::kPiece + threadIdx.x / 32 * Shape::kPart;
    const int bytes = max(0, min(Shape::kPart, s.count - vector)) * 16;
    // The barrier of a part without anything completes too, so that all are in the same phase.
    mbarrier_arrive_expect(&arrived[k], kTensors * bytes);
    if (bytes == 0) return;
#pragma unroll
    for (int t = 0; t < kTensors; ++t) {
      bulk_load(first + k * kPieceStep + t * kTensor, rows[t] + s.column(vector), bytes, &arrived[k]);
    }
  }
  __device__ __forceinline__ void wait(int k) const { mbarrier_wait(&arrived[k], phase); }
  // After all pieces of a row have been waited for.
  __device__ __forceinline__ void next_row() { phase ^= 1; }
  // body(count, part, column) for this lane's vectors of a piece: all of them at once, or one at a time in
  // the last part. part is the first one's place, that of the first tensor; the next ones are 32 further.
  template <typename Body>
  __device__ __forceinline__ void over_piece(const Slice<T>& s, int k, const Body& body) const {
    const int lane = threadIdx.x % 32, vector = k * Shape::kPiece + threadIdx.x / 32 * Shape::kPart;
    const int count = s.count - vector;
    T* const part = first + k * kPieceStep;
    const int column = s.column(vector + lane);
    if (count >= Shape::kPart) {
      body(std::integral_constant<int, Shape::kVectors>{}, part, column);
    } else {
#pragma unroll 1
      for (int u = 0; u * 32 + lane < count; ++u) {
        body(std::integral_constant<int, 1>{}, part + u * 32 * N, column + u * 32 * N);
      }
    }
  }
};
#endif

}  // namespace liger
