// SPDX-License-Identifier: BSD-3-Clause

// The largest distance between the reference of a shard and the reference of the whole row.
#pragma once

#include "lm_head/sm90/epilogues/common.cuh"

namespace liger::lm_head {

// Exponentials are stored relative to a reference at most this far, in nats, below the reference of the whole
// row. Beyond the limit they are rescaled: if an element contains the one-hot term, it is divided by the
// scale of its row, which contains the exponential of the distance, and must stay in the range of bf16.
inline constexpr float kMaxDistance = 40.0f;

// Multiplies the exponentials of a row of a chunk; one block calls it, and must call a barrier next.
template <typename T>
__device__ __forceinline__ void rescale_row(const Panels& exponentials, int panels, int row, float factor) {
  constexpr int kVectors = sm90::kPanel / 8;
  for (int i = threadIdx.x; i < panels * kVectors; i += kRowThreads) {
    uint4* const vectors = reinterpret_cast<uint4*>(exponentials.row_at(row, i / kVectors * sm90::kPanel));
    vectors[i % kVectors] = scaled_elements<T>(vectors[i % kVectors], factor);
  }
}

}  // namespace liger::lm_head
