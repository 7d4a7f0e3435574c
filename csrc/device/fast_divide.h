// SPDX-License-Identifier: BSD-3-Clause

// Division by a launch-time constant through a multiplication and a shift: an integer division takes dozens
// of instructions on a GPU.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace liger {

// Quotients n / d for n below 2^31. 2^shift is the smallest power of two that is at least d, and magic =
// floor(2^32 * (2^shift - d) / d) + 1. Then n / d = floor((n + floor(n * magic / 2^32)) / 2^shift)
// (Granlund and Montgomery, "Division by invariant integers using multiplication", PLDI 1994).
struct FastDivide {
  uint32_t divisor = 1, magic = 1, shift = 0;

  FastDivide() = default;
  explicit FastDivide(uint32_t d) : divisor(d) {
    while ((uint64_t{1} << shift) < d) ++shift;
    magic = static_cast<uint32_t>((uint64_t{1} << 32) * ((uint64_t{1} << shift) - d) / d + 1);
  }

  __host__ __device__ __forceinline__ uint32_t quotient(uint32_t n) const {
    return (static_cast<uint32_t>(uint64_t{n} * magic >> 32) + n) >> shift;
  }
  __host__ __device__ __forceinline__ uint32_t remainder(uint32_t n, uint32_t quotient) const {
    return n - quotient * divisor;
  }
};

}  // namespace liger
