// SPDX-License-Identifier: BSD-3-Clause

// Statistics of two rows of logits, which the first pass of a divergence sums: maxima, sums of exponentials
// and a cross term.
//
// Arithmetic limits these kernels (docs/lab/divergence.md). So exponentials are powers of 2 of
// y = fma(z, scale, -reference), and a factor per row normalises them. The reference may be rounded, because
// any value near the maximum serves; where the rounding is not small, y is (z - max) * scale instead.
#pragma once

#include "device/cluster.cuh"
#include "divergence/divergence.cuh"

namespace liger::divergence {

// The cross term that the first pass sums: differences of exponents, weighted by the exponentials of one row.
enum class CrossTerm { kNone, kStudentWeights, kTeacherWeights };

// Statistics of two rows or of parts of them: maxima of the logits, sums of 2^y for the Reference of the
// maximum, and the sum of e * (y - y of the other row). An aggregate without initialisers, because shared
// memory holds it too.
struct alignas(16) PairStats {
  float student_max, student_sum, teacher_max, teacher_sum, cross_sum;
};

#if __CUDA_ARCH__ >= 900

// y = (z - centre) * scale - exponent. One of the two is 0.
struct Reference {
  // From here on the product max * scale is off by 1 or more.
  static constexpr float kLargest = 0x1p24f;
  float centre, exponent;

  __device__ __forceinline__ Reference(float max, float scale) {
    const float z = ce::reference_of(max), product = z * scale;
    const bool rounded = fabsf(product) >= kLargest;
    centre = rounded ? z : 0.0f;
    exponent = rounded ? 0.0f : product;
  }
  // The amount by which y is smaller for another reference.
  __device__ __forceinline__ float shift_to(const Reference& other, float scale) const {
    return fmaf(other.centre - centre, scale, other.exponent - exponent);
  }
};

// Rescales the sums to maxima that are at least the current ones. If all logits so far were -inf, the sum is
// 0, or nan after a nan logit, and the factor of 1 preserves both.
template <CrossTerm kCross>
__device__ __forceinline__ void rescale(PairStats& s, float student_max, float teacher_max, float scale) {
  const Reference student_from(s.student_max, scale), teacher_from(s.teacher_max, scale);
  const float student_shift = student_from.shift_to({student_max, scale}, scale);
  const float teacher_shift = teacher_from.shift_to({teacher_max, scale}, scale);
  const float student_factor = s.student_max == -INFINITY ? 1.0f : exp2_fast(-student_shift);
  const float teacher_factor = s.teacher_max == -INFINITY ? 1.0f : exp2_fast(-teacher_shift);
  // If the sum of the weights underflows to 0, the cross sum is 0 as well, where 0 * inf would be nan.
  if constexpr (kCross == CrossTerm::kStudentWeights) {
    const float shifted = (s.cross_sum + (teacher_shift - student_shift) * s.student_sum) * student_factor;
    s.cross_sum = s.student_sum * student_factor == 0.0f ? 0.0f : shifted;
  }
  if constexpr (kCross == CrossTerm::kTeacherWeights) {
    const float shifted = (s.cross_sum + (student_shift - teacher_shift) * s.teacher_sum) * teacher_factor;
    s.cross_sum = s.teacher_sum * teacher_factor == 0.0f ? 0.0f : shifted;
  }
  s.student_sum *= student_factor;
  s.teacher_sum *= teacher_factor;
  s.student_max = student_max;
  s.teacher_max = teacher_max;
}

template <CrossTerm kCross>
__device__ __forceinline__ void merge(PairStats& a, PairStats b, float scale) {
  const float student_max = fmaxf(a.student_max, b.student_max);
  const float teacher_max = fmaxf(a.teacher_max, b.teacher_max);
  rescale<kCross>(a, student_max, teacher_max, scale);
  rescale<kCross>(b, student_max, teacher_max, scale);
  a.student_sum += b.student_sum;
  a.teacher_sum += b.teacher_sum;
  a.cross_sum += b.cross_sum;
}

// Maximum over a warp; no value may be nan. As integers of the same order the floats need one redux
// instruction instead of five shuffles.
__device__ __forceinline__ float warp_max(float x) {
  const auto ordered = [](int bits) { return bits ^ (bits >> 31 & 0x7fffffff); };
  return __int_as_float(ordered(__reduce_max_sync(0xffffffffu, ordered(__float_as_int(x)))));
}

// Every lane gets the same bits, because maximum and addition are commutative.
template <CrossTerm kCross>
__device__ __forceinline__ void merge_warp(PairStats& s, float scale) {
  rescale<kCross>(s, warp_max(s.student_max), warp_max(s.teacher_max), scale);
  s.student_sum = warp_reduce<Sum>(s.student_sum);
  s.teacher_sum = warp_reduce<Sum>(s.teacher_sum);
  if constexpr (kCross != CrossTerm::kNone) s.cross_sum = warp_reduce<Sum>(s.cross_sum);
}

__device__ __forceinline__ PairStats empty_stats() {
  return {-INFINITY, 0.0f, -INFINITY, 0.0f, 0.0f};
}

template <CrossTerm kCross>
__device__ __forceinline__ PairStats merge_slots(const PairStats* slots, int count, float scale) {
  const int lane = threadIdx.x % 32;
  PairStats s = lane < count ? slots[lane] : empty_stats();
  for (int i = lane + 32; i < count; i += 32) merge<kCross>(s, slots[i], scale);
  merge_warp<kCross>(s, scale);
  return s;
}

// The maximum of a vector. Half types are compared in pairs, without conversion to float.
template <typename T, int N>
__device__ __forceinline__ float vector_max(const Vec<T, N>& x) {
  float z[N];
  if constexpr (kPaired<T, N> && N > 2) {
    using Pair = std::conditional_t<std::is_same_v<T, __half>, __half2, __nv_bfloat162>;
    const Pair* pairs = reinterpret_cast<const Pair*>(&x);
    Pair high = pairs[0];
#pragma unroll
    for (int i = 1; i < N / 2; ++i) high = __hmax2(high, pairs[i]);
    float two[2];
    unpack(*reinterpret_cast<const Vec<T, 2>*>(&high), two);
    return fmaxf(two[0], two[1]);
  } else {
    unpack(x, z);
    return ce::reduce_pairwise<Max>(z);
  }
}

template <int N>
__device__ __forceinline__ void exponents(float (&z)[N], float scale, const Reference& from) {
  // A branch: most rows skip these subtractions.
  if (from.centre != 0.0f) {
#pragma unroll
    for (int i = 0; i < N; ++i) z[i] -= from.centre;
  }
#pragma unroll
  for (int i = 0; i < N; ++i) z[i] = fmaf(z[i], scale, -from.exponent);
}

// Online statistics of the vectors that one thread reads.
template <CrossTerm kCross>
struct OnlineStats {
  PairStats stats = empty_stats();
  Reference student_reference{0.0f, 0.0f}, teacher_reference{0.0f, 0.0f};  // of the current maxima

  // Adds M vectors of each row at once, so that the maxima are compared only once.
  template <typename T, int N, int M>
  __device__ __forceinline__ void add(const Vec<T, N> (&student)[M], const Vec<T, N> (&teacher)[M],
                                      float scale) {
    float student_high = vector_max(student[0]), teacher_high = vector_max(teacher[0]);
#pragma unroll
    for (int m = 1; m < M; ++m) {
      student_high = fmaxf(student_high, vector_max(student[m]));
      teacher_high = fmaxf(teacher_high, vector_max(teacher[m]));
    }
    if (student_high > stats.student_max || teacher_high > stats.teacher_max) {
      rescale<kCross>(stats, fmaxf(stats.student_max, student_high), fmaxf(stats.teacher_max, teacher_high),
                      scale);
      student_reference = {stats.student_max, scale};
      teacher_reference = {stats.teacher_max, scale};
    }
#pragma unroll
    for (int m = 0; m < M; ++m) {
      float s[N], t[N], exp_s[N], exp_t[N];
      unpack(student[m], s);
      unpack(teacher[m], t);
      exponents(s, scale, student_reference);
      exponents(t, scale, teacher_reference);
#pragma unroll
      for (int i = 0; i < N; ++i) exp_s[i] = exp2_fast(s[i]), exp_t[i] = exp2_fast(t[i]);
#pragma unroll
      for (int i = 0; i < N; ++i) {
        if constexpr (kCross == CrossTerm::kStudentWeights) {
          if (exp_s[i] != 0.0f) stats.cross_sum = fmaf(exp_s[i], s[i] - t[i], stats.cross_sum);
        }
        if constexpr (kCross == CrossTerm::kTeacherWeights) {
          if (exp_t[i] != 0.0f) stats.cross_sum = fmaf(exp_t[i], t[i] - s[i], stats.cross_sum);
        }
      }
      stats.student_sum += ce::reduce_pairwise<Sum>(exp_s);
      stats.teacher_sum += ce::reduce_pairwise<Sum>(exp_t);
    }
  }
};
#endif

}  // namespace liger::divergence
