// SPDX-License-Identifier: BSD-3-Clause

// The sum over the choices of each token, in float32 and in their order; rounded once.
#pragma once

#include "experts/sm90/grouped_gemm.cuh"

namespace liger::experts {

inline constexpr int kSumThreads = 128;

// rows (pad + 1, 8 vectors): the pad, to which choices without an expert refer, has no effect. A block has a
// token, and a part of its columns.
template <typename T>
__global__ void __launch_bounds__(kSumThreads)
    sum_choices(const T* rows, RowIndices inverse, int choices, int pad, int vectors, T* out) {
  const int vector = blockIdx.y * kSumThreads + threadIdx.x;
  if (vector >= vectors) return;
  const int64_t token = blockIdx.x;
  float sums[8] = {};
#pragma unroll 4
  for (int choice = 0; choice < choices; ++choice) {
    const int row = inverse[token * choices + choice];
    if (row == pad) continue;
    const uint4 v = __ldg(reinterpret_cast<const uint4*>(rows) + int64_t{row} * vectors + vector);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      sums[2 * i] += lm_head::low_of<T>((&v.x)[i]);
      sums[2 * i + 1] += lm_head::high_of<T>((&v.x)[i]);
    }
  }
  uint4 words;
#pragma unroll
  for (int i = 0; i < 4; ++i) (&words.x)[i] = lm_head::pack_pair<T>(sums[2 * i], sums[2 * i + 1]);
  reinterpret_cast<uint4*>(out)[token * vectors + vector] = words;
}

}  // namespace liger::experts
