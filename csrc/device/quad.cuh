// SPDX-License-Identifier: BSD-3-Clause

// Exchanges within the four lanes that share the rows of an accumulator.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace liger {

// Transposes 4 x 4 words over the four lanes of a quad.
__device__ __forceinline__ void transpose_quad(uint32_t (&w)[4], int lane) {
  const bool odd = lane & 1, upper = lane & 2;
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    const uint32_t other = __shfl_xor_sync(0xffffffffu, odd ? w[i] : w[i + 1], 1);
    (odd ? w[i] : w[i + 1]) = other;
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t other = __shfl_xor_sync(0xffffffffu, upper ? w[i] : w[i + 2], 2);
    (upper ? w[i] : w[i + 2]) = other;
  }
}

}  // namespace liger
