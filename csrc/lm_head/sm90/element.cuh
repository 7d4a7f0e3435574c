// The 16-bit type of operands and results, bfloat16 or float16: conversions, and what follows from its range.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace liger::lm_head {

// bfloat16 has the exponent range of float32. float16 has 2^-24 to 65504, so exponentials and scaled rows are
// multiplied by powers of two (docs/performance/fused_linear_ce_sm90.md, "float16").
template <typename T>
inline constexpr bool kSmallRange = std::is_same_v<T, __half>;

// Exponentials are stored times 2^kOffset, so that smaller ones are preserved: from 2^-25 / 2^kOffset on. With a
// smaller offset fewer rows reach the upper end.
template <typename T>
inline constexpr int kOffset = kSmallRange<T> ? 2 : 0;

// What one row of exponentials may sum to, per tile, before it is shifted down. Twice as much still is finite.
inline constexpr int kLargestSumExponent = 15;

// Two elements in a word, the first one in its lower half.
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

// Eight elements times a factor.
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

// What float16 needs to know of the rows of a chunk; all null with bfloat16. Where a row is shifted, exponentials are
// stored times 2^-shift.
struct RangeRows {
  float* reference;            // over the temperature; a lower bound of the logarithm of the sum
  float* largest;              // absolute value in the row of the input
  int* shift;                  // the largest one of the row so far
  unsigned char* tile_shifts;  // (rows, column tiles)
  uint32_t* largest_scaled;    // bits of the largest absolute value in all rows times their scales
};

// The exponent of the power of two by which numbers are multiplied before they are rounded to float16, so that the
// largest absolute value is between 2^14 and 2^15. 0 if that is an infinity or NaN.
__device__ __forceinline__ int unit_exponent(float largest) {
  const int exponent = exponent_of(largest);
  return exponent > 127 ? 0 : min(14 - exponent, 100);
}

}  // namespace liger::lm_head
