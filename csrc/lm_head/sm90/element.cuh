// SPDX-License-Identifier: BSD-3-Clause

// The 16-bit type of operands and results, bfloat16 or float16: conversions, and constants of its range.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace liger::lm_head {

// An element, bfloat16 or float16; host code knows the type only at run time. Kernels take pointers from
// elements_of<T>().
struct Element16 {
  uint16_t bits;
};
template <typename T>
__host__ __device__ __forceinline__ T* elements_of(Element16* memory) {
  static_assert(sizeof(T) == sizeof(Element16));
  return reinterpret_cast<T*>(memory);
}

// bfloat16 has the exponent range of float32. float16 has 2^-24 to 65504, so exponentials and scaled rows are
// multiplied by powers of two (docs/lab/fused_linear_ce.md, "float16").
template <typename T>
inline constexpr bool kSmallRange = std::is_same_v<T, __half>;

// Exponentials are stored times 2^kOffset, which preserves small ones, down to 2^-25 / 2^kOffset. A smaller
// offset would let fewer rows reach the upper end of the range.
template <typename T>
inline constexpr int kOffset = kSmallRange<T> ? 2 : 0;

// A row is shifted down if its exponentials in one tile sum to 2^kLargestSumExponent or more. Twice that sum
// is still finite.
inline constexpr int kLargestSumExponent = 15;

// Packs two elements into a word, the first into its lower half.
template <typename T>
__device__ __forceinline__ uint32_t pack_pair(float low, float high) {
  uint32_t word;
  if constexpr (std::is_same_v<T, __half>) {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  }
  return word;
}
template <typename T>
__device__ __forceinline__ float low_of(uint32_t pair) {
  if constexpr (std::is_same_v<T, __half>) {
    return __low2float(reinterpret_cast<const __half2&>(pair));
  } else {
    return __uint_as_float(pair << 16);
  }
}
template <typename T>
__device__ __forceinline__ float high_of(uint32_t pair) {
  if constexpr (std::is_same_v<T, __half>) {
    return __high2float(reinterpret_cast<const __half2&>(pair));
  } else {
    return __uint_as_float(pair & 0xffff0000u);
  }
}

// Multiplies eight elements by a factor.
template <typename T>
__device__ __forceinline__ uint4 scaled_elements(uint4 v, float factor) {
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    uint32_t& word = (&v.x)[j];
    const float2 f = {low_of<T>(word), high_of<T>(word)};
    word = pack_pair<T>(f.x * factor, f.y * factor);
  }
  return v;
}

// The largest absolute value of eight elements.
template <typename T>
__device__ __forceinline__ float largest_of(uint4 v) {
  float largest = 0.0f;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const uint32_t word = (&v.x)[j];
    largest = fmaxf(largest, fmaxf(fabsf(low_of<T>(word)), fabsf(high_of<T>(word))));
  }
  return largest;
}

// 2^(biased_exponent - 127), for biased exponents from 1 to 254.
__device__ __forceinline__ float power_of_two(int biased_exponent) {
  return __uint_as_float(static_cast<uint32_t>(biased_exponent) << 23);
}
// 2^exponent, for exponents from -126 to 127.
__device__ __forceinline__ float pow2(int exponent) {
  return power_of_two(exponent + 127);
}
// e with 2^e <= |x| < 2^(e + 1); -127 for zero and subnormal numbers, 128 for infinity and NaN.
__device__ __forceinline__ int exponent_of(float x) {
  return static_cast<int>(__float_as_uint(x) >> 23 & 0xff) - 127;
}

// Per-row data that only float16 needs, for a chunk; all null with bfloat16. The exponentials of a shifted
// row are stored times 2^-shift.
struct RangeRows {
  float* reference;            // over the temperature; a lower bound of the logarithm of the sum
  float* largest;              // largest absolute value in the row of the input
  int* shift;                  // largest shift of the row so far
  unsigned char* tile_shifts;  // (rows, column tiles)
  uint32_t* largest_scaled;    // bits of the largest absolute value in all rows times their scales
};

// Before numbers are rounded to float16, they are multiplied by 2^unit_exponent(largest), which brings the
// largest absolute value between 2^14 and 2^15. The exponent is 0 if `largest` is infinite or NaN.
__device__ __forceinline__ int unit_exponent(float largest) {
  const int exponent = exponent_of(largest);
  return exponent > 127 ? 0 : min(14 - exponent, 100);
}

}  // namespace liger::lm_head
