// Division by a number that is known at launch, as a multiplication: integer division costs a GPU thread
// dozens of instructions.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace liger {

// Quotients of numbers below 2^31. With 2^shift the first power of two that is not below the divisor d and
// magic = 2^32 * (2^shift - d) / d + 1, n / d is (n + floor(n * magic / 2^32)) / 2^shift
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
