// How rows lie in the shared memory of blocks that stay on the device and take row after row: what
// cross_entropy_persistent.cuh, divergence_persistent.cuh and softmax_persistent.cuh have in common.
//
// A block, or a cluster of blocks where one cannot hold a row, has a slice of each row, in pieces. A warp has
// a part of its own in every piece, with a barrier: one bulk copy, or one for each tensor whose rows are read
// together, brings it, and nobody else reads it. In whole pieces a lane has kVectors vectors; what is left
// over them all warps share, and the memory ends with it.
#pragma once

#include "device/aligned_row.cuh"
#include "device/cluster_reduce.cuh"
#include "device/integers.h"

namespace liger {

// How rows lie in blocks; pieces == 0 where they do not.
struct PersistentPlan {
  int blocks;  // of a row
  int slice;   // vectors of a row that a block has
  int own;     // vectors of a row that a warp has, at most
  int pieces;  // of a slice
};

// Of an instance: threads of a block, the vectors of a piece for each of them, what a warp leaves for the
// others when they meet, how many vectors are kept for one of a row, how many blocks share a multiprocessor,
// and the bytes that a block has beside all that, a multiple of 16.
template <int kThreads_, int kVectors_, typename Slot_, int kKept_, int kResident_, int kBeside_ = 0>
struct PersistentShape {
  static constexpr int kThreads = kThreads_, kVectors = kVectors_, kWarps = kThreads / 32;
  static constexpr int kKept = kKept_, kResident = kResident_;
  static constexpr int kPart = 32 * kVectors, kPiece = kThreads * kVectors;  // vectors
  using Meeting = liger::Meeting<Slot_, kWarps>;

  // Dynamic shared memory: what warps have, their meetings, what lies beside, and the barriers of the parts.
  static constexpr int kept_bytes(const PersistentPlan& plan) { return kWarps * plan.own * kKept * 16; }
  static constexpr int beside_at(const PersistentPlan& plan) {
    return kept_bytes(plan) + Meeting::bytes(plan.blocks);
  }
  static constexpr int shared_bytes(const PersistentPlan& plan) {
    return beside_at(plan) + kBeside_ + kWarps * plan.pieces * static_cast<int>(sizeof(uint64_t));
  }

  // The fewest blocks, from so many to so many, whose shared memory holds a row. Each takes 1 KB of a
  // multiprocessor beside what it can use.
  static constexpr PersistentPlan plan(int64_t row_vectors, int fewest, int most, int shared_memory_optin) {
    const int available = (shared_memory_optin + 1024) / kResident - 1024;
    for (int blocks = fewest; blocks <= most; ++blocks) {
      const int64_t slice = ceil_div(row_vectors, blocks);
      if (slice * kKept * 16 > available) continue;
      const int vectors = static_cast<int>(slice), whole = vectors / kPiece, left = vectors % kPiece;
      const int share = ceil_div(left, kWarps);
      // Where there is room, what is left is shared in steps of all lanes: fewer warps then take one.
      for (const int last : {round_up(share, 32), share}) {
        const PersistentPlan plan{blocks, vectors, whole * kPart + last, whole + (left > 0)};
        if (shared_bytes(plan) <= available) return plan;
      }
    }
    return {0, 0, 0, 0};
  }
};

#if __CUDA_ARCH__ >= 900
// The vectors of a row that one of its blocks has.
template <typename T>
struct Slice {
  const T* row;
  Span span;
  int begin, count;
  bool live;  // to be read

  __device__ __forceinline__ Slice(const T* row, int columns, const PersistentPlan& plan, int rank, bool live)
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

// The parts of all pieces that a warp keeps: those of the first tensor, then those of the next, and so on for
// Shape::kKept of them. Passes over a row call body(count, part, column) for this lane's vectors of each
// piece: all of them at once, or two and then single ones in the last part. part is the first one's place,
// that of the first tensor; the next ones are 32 further.
template <typename T, typename Shape>
struct KeptParts {
  static constexpr int N = kVec<T>, kPart = Shape::kPart, kPiece = Shape::kPiece;
  T* first;           // this warp's first vector
  uint64_t* arrived;  // a barrier for each piece
  int own, pieces, lane, warp;
  uint32_t phase = 0;

  // memory: Shape::shared_bytes(plan).
  __device__ __forceinline__ KeptParts(unsigned char* memory, const PersistentPlan& plan)
      : own(plan.own), pieces(plan.pieces), lane(threadIdx.x % 32) {
    // By an exchange the compiler sees that all lanes have the same warp: copies need no loop over lanes.
    warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
    first = reinterpret_cast<T*>(memory) + warp * Shape::kKept * step();
    const int barriers = Shape::shared_bytes(plan) - Shape::kWarps * pieces * int{sizeof(uint64_t)};
    arrived = reinterpret_cast<uint64_t*>(memory + barriers) + warp * pieces;
    if (lane == 0) {
      for (int k = 0; k < pieces; ++k) mbarrier_init(&arrived[k]);
      mbarrier_init_fence();
    }
    __syncwarp();
  }
  // Elements from a vector of a tensor to what is kept of the next one.
  __device__ __forceinline__ int step() const { return own * N; }

  // Starts the copies of rows that are equally far from a 16-byte boundary.
  template <int kTensors>
  __device__ __forceinline__ void load_row(const Slice<T>& s, const T* const (&rows)[kTensors]) const {
    if (lane == 0) {
      for (int k = 0; k < pieces; ++k) load_part(s, rows, k);
    }
  }
  // The first pass, which waits for the copies. done(begin, count): by all lanes after this warp's part of
  // each piece, which are vectors of the slice.
  template <typename Body>
  __device__ __forceinline__ void first_pass(const Slice<T>& s, const Body& body) {
    first_pass(s, body, [](int, int) {});
  }
  template <typename Body, typename Done>
  __device__ __forceinline__ void first_pass(const Slice<T>& s, const Body& body, const Done& done) {
    over_pieces(
        s, [&](int k) { mbarrier_wait(&arrived[k], phase); }, body,
        [&](int k) {
          const auto [begin, count] = part_of(s, k);
          if (count > 0) done(begin, count);
        });
    phase ^= 1;
  }
  template <typename Body>
  __device__ __forceinline__ void pass(const Slice<T>& s, const Body& body) const {
    over_pieces(s, [](int) {}, body, [](int) {});
  }
  // The last one: the parts of the next rows come to the places of those that all lanes are done with.
  template <int kTensors, typename Body>
  __device__ __forceinline__ void last_pass(const Slice<T>& s, const Slice<T>& next,
                                            const T* const (&rows)[kTensors], const Body& body) const {
    over_pieces(
        s, [](int) {}, body,
        [&](int k) {
          __syncwarp();
          if (lane == 0 && next.live) load_part(next, rows, k);
        });
  }

 private:
  // The first vector of this warp's part of a piece, and how many it has: none where that is not positive.
  __device__ __forceinline__ int2 part_of(const Slice<T>& s, int k) const {
    const int size = min(kPart, own - k * kPart), begin = k * kPiece + warp * size;
    return make_int2(begin, min(size, s.count - begin));
  }
  // By one lane.
  template <int kTensors>
  __device__ __forceinline__ void load_part(const Slice<T>& s, const T* const (&rows)[kTensors],
                                            int k) const {
    const auto [begin, count] = part_of(s, k);
    const int bytes = max(count, 0) * 16;
    // The barrier of a part without anything completes too, so that all are in the same phase.
    mbarrier_arrive_expect(&arrived[k], kTensors * bytes);
    if (bytes == 0) return;
    T* const part = first + k * kPart * N;
    const int column = s.column(begin);
#pragma unroll
    for (int t = 0; t < kTensors; ++t) bulk_load(part + t * step(), rows[t] + column, bytes, &arrived[k]);
  }
  template <typename Start, typename Body, typename Done>
  __device__ __forceinline__ void over_pieces(const Slice<T>& s, const Start& start, const Body& body,
                                              const Done& done) const {
    // Of so many pieces this warp has a whole part.
    const int whole = min(own / kPart, (s.count + kPiece - (warp + 1) * kPart) / kPiece);
    T* part = first + lane * N;
    int k = 0, column = s.column(warp * kPart + lane);
#pragma unroll 1
    for (; k < whole; ++k, part += kPart * N, column += kPiece * N) {
      start(k);
      body(std::integral_constant<int, Shape::kVectors>{}, part, column);
      done(k);
    }
#pragma unroll 1
    for (; k < pieces; ++k, part += kPart * N) {
      start(k);
      const auto [begin, count] = part_of(s, k);
      const int column = s.column(begin + lane);
      int at = 0;
      if constexpr (Shape::kVectors > 2) {
        static_assert(Shape::kVectors == 4);
        if (count >= 64) {
          body(std::integral_constant<int, 2>{}, part, column);
          at = 64;
        }
      }
#pragma unroll 1
      for (; at + lane < count; at += 32) {
        body(std::integral_constant<int, 1>{}, part + at * N, column + at * N);
      }
      done(k);
    }
  }
};
#endif

}  // namespace liger
