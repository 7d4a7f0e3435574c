// How far the references of a shard of the classes may be from that of the whole row.
#pragma once

#include "lm_head/sm90/epilogues/common.cuh"

namespace liger::lm_head {

// An exponential is stored relative to a reference that is at most this far, in nats, below that of the whole row.
// Beyond it they are rescaled: the scale of a row that has its one-hot term as an element divides by the
// distance's exponential, and their product must stay in the range of bf16.
inline constexpr float kMostDistance = 40.0f;

// Multiplies the exponentials of a row of a chunk, one block. A barrier has to follow.
template <typename T>
__device__ __forceinline__ void rescale_row(const Panels& exponentials, int panels, int row, float factor) {
  constexpr int kVectors = sm90::kPanel / 8;
  for (int i = threadIdx.x; i < panels * kVectors; i += kRowThreads) {
    uint4* const vectors = reinterpret_cast<uint4*>(exponentials.row_at(row, i / kVectors * sm90::kPanel));
    vectors[i % kVectors] = scaled_elements<T>(vectors[i % kVectors], factor);
  }
}

}  // namespace liger::lm_head
