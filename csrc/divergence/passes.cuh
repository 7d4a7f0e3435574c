// The row rule of divergences for rows staged in shared memory: the sums that passes over two rows
// accumulate, and the gradient of a vector of logits.
//
// Arithmetic limits these kernels (docs/performance/divergence.md). So exponentials are powers of 2 of
// y = fma(z, scale, -reference), and a factor per row normalises them. The reference may be rounded, because
// any value near the maximum serves. With e = 2^y and E the sum of e over a row:
//
//   KL(p, q)   sum(p * log2(p / q)) = sum(e_p * (y_p - y_q)) / E_p - log2(E_p / E_q): one pass over the rows
//   tvd        a second pass, because its terms need both sums; it overwrites the logits in shared memory
//              with the student's exponentials, which get the sign of q - p
//   jsd        a second pass, which overwrites the teacher's logits in shared memory with the logarithms of
//              the mixture
#pragma once

#include "device/cluster.cuh"
#include "divergence/divergence.cuh"

namespace liger::divergence {

inline constexpr float kLn2 = 0.6931471805599453f;

// The cross term that the first pass sums: differences of exponents, weighted by the exponentials of one row.
enum class CrossTerm { kNone, kStudentWeights, kTeacherWeights };

// Statistics of two rows or of parts of them: maxima of the logits, sums of 2^(z * scale - reference(max,
// scale)), and the sum of e * (y - y of the other row). An aggregate without initialisers, because shared
// memory holds it too.
struct alignas(16) PairStats {
  float student_max, student_sum, teacher_max, teacher_sum, cross_sum;
};

// The sums of the second pass.
struct TermSums {
  float value, slope;
};

#if __CUDA_ARCH__ >= 900

__device__ __forceinline__ float log2_fast(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float reference(float max, float scale) {
  return ce::reference_of(max) * scale;
}

// Rescales the sums to maxima that are at least the current ones. If all logits so far were -inf, the sum is
// 0, or nan after a nan logit, and the factor of 1 preserves both.
template <CrossTerm kCross>
__device__ __forceinline__ void rescale(PairStats& s, float student_max, float teacher_max, float scale) {
  const float student_shift = reference(student_max, scale) - reference(s.student_max, scale);
  const float teacher_shift = reference(teacher_max, scale) - reference(s.teacher_max, scale);
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

__device__ __forceinline__ TermSums merge_warp(const TermSums& s) {
  return {warp_reduce<Sum>(s.value), warp_reduce<Sum>(s.slope)};
}
__device__ __forceinline__ TermSums merge_slots(const TermSums* slots, int count) {
  TermSums s = {0.0f, 0.0f};
  for (int i = threadIdx.x % 32; i < count; i += 32) s.value += slots[i].value, s.slope += slots[i].slope;
  return merge_warp(s);
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
__device__ __forceinline__ void exponents(float (&z)[N], float scale, float from) {
#pragma unroll
  for (int i = 0; i < N; ++i) z[i] = fmaf(z[i], scale, -from);
}

// Online statistics of the vectors that one thread reads.
template <CrossTerm kCross>
struct OnlineStats {
  PairStats stats = empty_stats();
  float student_reference = 0.0f, teacher_reference = 0.0f;  // of the current maxima

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
      student_reference = reference(stats.student_max, scale);
      teacher_reference = reference(stats.teacher_max, scale);
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

// Constants of a row that every thread has after the first pass.
struct alignas(16) RowConstants {
  float scale;
  float student_reference, teacher_reference;  // references of the exponents
  float student_factor, teacher_factor;        // exponential -> probability
  float log_ratio;                             // log2(student's sum / teacher's sum)
  float cross_sum;
  float equal_gap;  // student's minus teacher's logit of a class with p == q

  // Also sets *log_q and *log_p.
  __device__ __forceinline__ RowConstants(const PairStats& s, const Problem& p, LogSoftmax* log_q,
                                          LogSoftmax* log_p)
      : scale(p.exp2_scale),
        student_reference(reference(s.student_max, scale)),
        teacher_reference(reference(s.teacher_max, scale)),
        student_factor(1.0f / s.student_sum),
        teacher_factor(1.0f / s.teacher_sum),
        cross_sum(s.cross_sum) {
    const float student_log = log2f(s.student_sum), teacher_log = log2f(s.teacher_sum);
    log_ratio = student_log - teacher_log;
    // The sums above are relative to the rounded references; these logarithms are relative to the maxima.
    const float log_student_sum =
        student_log - fmaf(ce::reference_of(s.student_max), scale, -student_reference);
    const float log_teacher_sum =
        teacher_log - fmaf(ce::reference_of(s.teacher_max), scale, -teacher_reference);
    equal_gap = (s.student_max - s.teacher_max) + (log_student_sum - log_teacher_sum) / scale;
    *log_q = {s.student_max, log_student_sum * kLn2, p.inverse_temperature};
    *log_p = {s.teacher_max, log_teacher_sum * kLn2, p.inverse_temperature};
  }
};

// The result of a row: its loss, the sum of s (docs/divergence.md), and the coefficients of its gradient.
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
//   result()            the row result from the sums; weight: that of the row, over the temperature
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
    exponents(s, k.scale, k.student_reference);
    exponents(t, k.scale, k.teacher_reference);
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
    exponents(s, k.scale, k.student_reference);
    exponents(t, k.scale, k.teacher_reference);
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

  // The difference of the logits determines which probability is larger. If p == q, both signs are correct.
  template <int N>
  static __device__ __forceinline__ void terms(float (&s)[N], const float (&t)[N], const RowConstants& k,
                                               float, TermSums& sums) {
    const float ratio = k.teacher_factor / k.student_factor;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const float exp_s = exp2_fast(fmaf(s[i], k.scale, -k.student_reference));
      const float exp_t = exp2_fast(fmaf(t[i], k.scale, -k.teacher_reference));
      const float signed_exp = copysignf(exp_s, (s[i] - t[i]) - k.equal_gap);
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
  static __device__ __forceinline__ void terms(float (&s)[N], float (&t)[N], const RowConstants& k,
                                               float beta, TermSums& sums) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const float student_exponent = fmaxf(fmaf(s[i], k.scale, -k.student_reference), kMinExponent);
      const float teacher_exponent = fmaxf(fmaf(t[i], k.scale, -k.teacher_reference), kMinExponent);
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
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const float exp_s = exp2_fast(fmaf(s[i], k.scale, -k.student_reference));
      s[i] = exp_s * fmaf(o.a, l[i], o.c);
    }
  }
};
#endif

}  // namespace liger::divergence
