// SPDX-License-Identifier: BSD-3-Clause

// The row rule of divergences for rows staged in shared memory: the sums that passes over two rows
// accumulate, and the gradient of a vector of logits.
//
// With e = 2^y the exponentials of divergence/pair_stats.cuh, and E the sum of e over a row:
//
//   KL(p, q)   sum(p * log2(p / q)) = sum(e_p * (y_p - y_q)) / E_p - log2(E_p / E_q): one pass over the rows
//   tvd        a second pass, because its terms need both sums; it overwrites the logits in shared memory
//              with the student's exponentials, which get the sign of q - p
//   jsd        a second pass, which overwrites the teacher's logits in shared memory with the logarithms of
//              the mixture
#pragma once

#include "divergence/pair_stats.cuh"

namespace liger::divergence {

inline constexpr float kLn2 = 0.6931471805599453f;

// Sums of the second pass.
struct TermSums {
  float value, slope;
};

#if __CUDA_ARCH__ >= 900

__device__ __forceinline__ float log2_fast(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ TermSums merge_warp(const TermSums& s) {
  return {warp_reduce<Sum>(s.value), warp_reduce<Sum>(s.slope)};
}
__device__ __forceinline__ TermSums merge_slots(const TermSums* slots, int count) {
  TermSums s = {0.0f, 0.0f};
  for (int i = threadIdx.x % 32; i < count; i += 32) s.value += slots[i].value, s.slope += slots[i].slope;
  return merge_warp(s);
}

// Constants of a row that every thread has after the first pass.
struct alignas(16) RowConstants {
  float scale;
  float student_max, teacher_max;
  float student_factor, teacher_factor;  // exponential -> probability
  float log_ratio;  // log2(student's sum / teacher's sum): y_q - y_p of a class with p == q
  float cross_sum;

  // Also sets *log_q and *log_p.
  __device__ __forceinline__ RowConstants(const PairStats& s, const Problem& p, LogSoftmax* log_q,
                                          LogSoftmax* log_p)
      : scale(p.exp2_scale),
        student_max(s.student_max),
        teacher_max(s.teacher_max),
        student_factor(1.0f / s.student_sum),
        teacher_factor(1.0f / s.teacher_sum),
        cross_sum(s.cross_sum) {
    const float student_log = log2f(s.student_sum), teacher_log = log2f(s.teacher_sum);
    log_ratio = student_log - teacher_log;
    // The sums above are relative to the rounded references; these logarithms are relative to the maxima.
    const float log_student_sum = student_log - exponent_of_max(student(), s.student_max);
    const float log_teacher_sum = teacher_log - exponent_of_max(teacher(), s.teacher_max);
    *log_q = {s.student_max, log_student_sum * kLn2, p.inverse_temperature};
    *log_p = {s.teacher_max, log_teacher_sum * kLn2, p.inverse_temperature};
  }
  __device__ __forceinline__ Reference student() const { return {student_max, scale}; }
  __device__ __forceinline__ Reference teacher() const { return {teacher_max, scale}; }

 private:
  __device__ __forceinline__ float exponent_of_max(const Reference& from, float max) const {
    return fmaf(ce::reference_of(max) - from.centre, scale, -from.exponent);
  }
};

// The result of a row: its loss, the sum of s (docs/guides/divergence.md), and the coefficients of its
// gradient.
struct RowResult {
  float loss, slope;
  float a, b, c;
};

// The logits in shared memory that the second pass overwrites with float32 values of terms() for the
// gradient.
enum class Overwrite { kNothing, kStudent, kTeacher };

// The passes of a divergence over two rows in shared memory:
//   kCross              the cross term of the first pass
//   kTerms              true if there is a second pass, which calls terms()
//   kOverwrite          the logits that terms() overwrites: kNothing; kStudent, with signed exponentials (two
//                       copies of half types hold their floats); kTeacher, with logarithms of the mixture
//   result()            the row result from the sums; weight: the row's weight over the temperature
//   add_exponentials()  adds a multiple of the student's exponentials to the gradient
//   gradient()          s and t, logits or values of terms() -> the gradient in s
template <typename Rule>
struct Passes;

template <>
struct Passes<ForwardKl> {
  static constexpr CrossTerm kCross = CrossTerm::kTeacherWeights;
  static constexpr bool kTerms = false;
  static constexpr Overwrite kOverwrite = Overwrite::kNothing;

  static __device__ __forceinline__ RowResult result(const RowConstants& k, const TermSums&, float,
                                                     float weight) {
    return {kLn2 * (k.cross_sum * k.teacher_factor + k.log_ratio), -1.0f, weight * k.student_factor,
            -weight * k.teacher_factor, 0.0f};
  }
  static __device__ __forceinline__ void add_exponentials(RowResult& o, float coefficient) {
    o.a += coefficient;
  }
  template <int N>
  static __device__ __forceinline__ void gradient(float (&s)[N], float (&t)[N], const RowConstants& k,
                                                  const RowResult& o) {
    exponents(s, k.scale, k.student());
    exponents(t, k.scale, k.teacher());
#pragma unroll
    for (int i = 0; i < N; ++i) s[i] = fmaf(o.a, exp2_fast(s[i]), o.b * exp2_fast(t[i]));
  }
};

template <>
struct Passes<ReverseKl> {
  static constexpr CrossTerm kCross = CrossTerm::kStudentWeights;
  static constexpr bool kTerms = false;
  static constexpr Overwrite kOverwrite = Overwrite::kNothing;

  // The gradient is q * (log(q / p) - loss); in this difference the logarithms of the sums cancel.
  static __device__ __forceinline__ RowResult result(const RowConstants& k, const TermSums&, float,
                                                     float weight) {
    const float mean = k.cross_sum * k.student_factor, loss = kLn2 * (mean - k.log_ratio);
    return {loss, loss + 1.0f, weight * k.student_factor * kLn2, mean, 0.0f};
  }
  static __device__ __forceinline__ void add_exponentials(RowResult& o, float coefficient) {
    o.c += coefficient;
  }
  template <int N>
  static __device__ __forceinline__ void gradient(float (&s)[N], float (&t)[N], const RowConstants& k,
                                                  const RowResult& o) {
    exponents(s, k.scale, k.student());
    exponents(t, k.scale, k.teacher());
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const float exp_s = exp2_fast(s[i]);
      s[i] = exp_s == 0.0f ? 0.0f : exp_s * fmaf(o.a, (s[i] - t[i]) - o.b, o.c);
    }
  }
};

template <>
struct Passes<Tvd> {
  static constexpr CrossTerm kCross = CrossTerm::kNone;
  static constexpr bool kTerms = true;
  static constexpr Overwrite kOverwrite = Overwrite::kStudent;

  // The difference of the exponents determines which probability is larger. If p == q, both signs are
  // correct.
  template <int N>
  static __device__ __forceinline__ void terms(float (&s)[N], float (&t)[N], const RowConstants& k, float,
                                               TermSums& sums) {
    const float ratio = k.teacher_factor / k.student_factor;
    exponents(s, k.scale, k.student());
    exponents(t, k.scale, k.teacher());
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const float exp_s = exp2_fast(s[i]), exp_t = exp2_fast(t[i]);
      const float signed_exp = copysignf(exp_s, (s[i] - t[i]) - k.log_ratio);
      sums.value += fabsf(fmaf(-ratio, exp_t, exp_s));
      sums.slope += signed_exp;
      s[i] = signed_exp;
    }
  }
  // A row with p == q in every class has the gradient 0.
  static __device__ __forceinline__ RowResult result(const RowConstants& k, const TermSums& sums, float,
                                                     float weight) {
    const float half = sums.value == 0.0f ? 0.0f : 0.5f, slope = half * k.student_factor * sums.slope;
    const float factor = weight * k.student_factor;
    return {0.5f * k.student_factor * sums.value, slope, factor * half, 0.0f, -factor * slope};
  }
  static __device__ __forceinline__ void add_exponentials(RowResult& o, float coefficient) {
    o.c += coefficient;
  }
  template <int N>
  static __device__ __forceinline__ void gradient(float (&s)[N], const float (&)[N], const RowConstants&,
                                                  const RowResult& o) {
#pragma unroll
    for (int i = 0; i < N; ++i) s[i] = fmaf(o.c, fabsf(s[i]), o.a * s[i]);
  }
};

template <>
struct Passes<Jsd> {
  static constexpr CrossTerm kCross = CrossTerm::kNone;
  static constexpr bool kTerms = true;
  static constexpr Overwrite kOverwrite = Overwrite::kTeacher;
  // Lower bound of the exponents, so that p / q is finite. 2^-100 of the largest probability changes no sum.
  static constexpr float kMinExponent = -100.0f;

  // With r = p / q and l = log2(m / q) = log2(beta * r + 1 - beta) a term is q * (beta * r * (log2(r) - l) -
  // (1 - beta) * l), in bits. l overwrites t.
  template <int N>
  static __device__ __forceinline__ void terms(const float (&s)[N], float (&t)[N], const RowConstants& k,
                                               float beta, TermSums& sums) {
    // A copy: gradient() takes the student's logits.
    float y[N];
#pragma unroll
    for (int i = 0; i < N; ++i) y[i] = s[i];
    exponents(y, k.scale, k.student());
    exponents(t, k.scale, k.teacher());
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const float student_exponent = fmaxf(y[i], kMinExponent);
      const float teacher_exponent = fmaxf(t[i], kMinExponent);
      const float log_r = (teacher_exponent - student_exponent) + k.log_ratio;
      const float weighted_ratio = beta * exp2_fast(log_r), mixture = weighted_ratio + (1.0f - beta);
      const float l = log2_fast(mixture), e = exp2_fast(student_exponent);
      sums.value = fmaf(e, fmaf(weighted_ratio, log_r, -mixture * l), sums.value);
      sums.slope = fmaf(e, l, sums.slope);
      t[i] = l;
    }
  }
  // s = -(1 - beta) * q * l / log2(e)
  static __device__ __forceinline__ RowResult result(const RowConstants& k, const TermSums& sums, float beta,
                                                     float weight) {
    const float mean = k.student_factor * sums.slope, factor = -(1.0f - beta) * kLn2;
    const float coefficient = weight * factor * k.student_factor;
    return {kLn2 * k.student_factor * sums.value, factor * mean, coefficient, 0.0f, -coefficient * mean};
  }
  static __device__ __forceinline__ void add_exponentials(RowResult& o, float coefficient) {
    o.c += coefficient;
  }
  template <int N>
  static __device__ __forceinline__ void gradient(float (&s)[N], float (&l)[N], const RowConstants& k,
                                                  const RowResult& o) {
    exponents(s, k.scale, k.student());
#pragma unroll
    for (int i = 0; i < N; ++i) s[i] = exp2_fast(s[i]) * fmaf(o.a, l[i], o.c);
  }
};
#endif

}  // namespace liger::divergence
