// The row rule of divergences where rows stay in shared memory: what passes over them add, and the gradient
// of a vector of logits.
//
// Arithmetic is what is scarce (docs/performance/divergence.md): exponentials are powers of 2 of
// fma(z, scale, -reference), in which any reference does, so that it may be rounded, and they are normalised
// by factors of whole rows. With y the exponents so made, e = 2^y and E their sums:
//
//   KL(p, q)   sum(p * log2(p / q)) = sum(e_p * (y_p - y_q)) / E_p - log2(E_p / E_q): one pass over the rows
//   tvd        a second pass, since its terms need the sums of both, which keeps the student's exponentials,
//              with the sign of q - p, in the place of the logits
//   jsd        a second pass, which keeps the logarithms of the mixture in the place of the teacher's logits
#pragma once

#include "device/cluster.cuh"
#include "divergence/divergence.cuh"

namespace liger::divergence {

inline constexpr float kLn2 = 0.6931471805599453f;

// Whose probabilities weight the differences of the exponents that the first pass adds.
enum class Cross { kNone, kOfStudent, kOfTeacher };

// Of two rows, or of parts of them: largest logits, sums of 2^(z * scale - reference(largest)), and the sum
// of e * (y - y of the other row). Plain data, since it lives in shared memory too.
struct alignas(16) PairStats {
  float student_max, student_sum, teacher_max, teacher_sum, cross;
};

// Of the second pass.
struct Sums {
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

// Lets the sums refer to larger maxima. What has seen nothing but -inf has a sum of 0 (or nan, to be kept).
template <Cross kCross>
__device__ __forceinline__ void raise(PairStats& s, float student_max, float teacher_max, float scale) {
  const float student_by = reference(student_max, scale) - reference(s.student_max, scale);
  const float teacher_by = reference(teacher_max, scale) - reference(s.teacher_max, scale);
  const float student_factor = s.student_max == -INFINITY ? 1.0f : exp2_fast(-student_by);
  const float teacher_factor = s.teacher_max == -INFINITY ? 1.0f : exp2_fast(-teacher_by);
  // A weight that has become 0 adds nothing, whatever it was multiplied by.
  if constexpr (kCross == Cross::kOfStudent) {
    const float moved = (s.cross + (teacher_by - student_by) * s.student_sum) * student_factor;
    s.cross = s.student_sum * student_factor == 0.0f ? 0.0f : moved;
  }
  if constexpr (kCross == Cross::kOfTeacher) {
    const float moved = (s.cross + (student_by - teacher_by) * s.teacher_sum) * teacher_factor;
    s.cross = s.teacher_sum * teacher_factor == 0.0f ? 0.0f : moved;
  }
  s.student_sum *= student_factor;
  s.teacher_sum *= teacher_factor;
  s.student_max = student_max;
  s.teacher_max = teacher_max;
}

template <Cross kCross>
__device__ __forceinline__ void merge(PairStats& a, PairStats b, float scale) {
  const float student_max = fmaxf(a.student_max, b.student_max);
  const float teacher_max = fmaxf(a.teacher_max, b.teacher_max);
  raise<kCross>(a, student_max, teacher_max, scale);
  raise<kCross>(b, student_max, teacher_max, scale);
  a.student_sum += b.student_sum;
  a.teacher_sum += b.teacher_sum;
  a.cross += b.cross;
}

// The largest of a warp, of which none is nan: as integers of the same order, by one instruction where an
// exchange between lanes takes five steps.
__device__ __forceinline__ float warp_largest(float x) {
  const auto ordered = [](int bits) { return bits ^ (bits >> 31 & 0x7fffffff); };
  return __int_as_float(ordered(__reduce_max_sync(0xffffffffu, ordered(__float_as_int(x)))));
}

// Every lane gets the same bits: maximum and addition commute.
template <Cross kCross>
__device__ __forceinline__ void merge_warp(PairStats& s, float scale) {
  raise<kCross>(s, warp_largest(s.student_max), warp_largest(s.teacher_max), scale);
  s.student_sum = warp_reduce<Sum>(s.student_sum);
  s.teacher_sum = warp_reduce<Sum>(s.teacher_sum);
  if constexpr (kCross != Cross::kNone) s.cross = warp_reduce<Sum>(s.cross);
}

__device__ __forceinline__ PairStats no_stats() {
  return {-INFINITY, 0.0f, -INFINITY, 0.0f, 0.0f};
}

template <Cross kCross>
__device__ __forceinline__ PairStats merge_slots(const PairStats* slots, int count, float scale) {
  const int lane = threadIdx.x % 32;
  PairStats s = lane < count ? slots[lane] : no_stats();
  for (int i = lane + 32; i < count; i += 32) merge<kCross>(s, slots[i], scale);
  merge_warp<kCross>(s, scale);
  return s;
}

__device__ __forceinline__ Sums merge_warp(const Sums& s) {
  return {warp_reduce<Sum>(s.value), warp_reduce<Sum>(s.slope)};
}
__device__ __forceinline__ Sums merge_slots(const Sums* slots, int count) {
  Sums s = {0.0f, 0.0f};
  for (int i = threadIdx.x % 32; i < count; i += 32) s.value += slots[i].value, s.slope += slots[i].slope;
  return merge_warp(s);
}

// Half types two at a time, without a conversion.
template <typename T, int N>
__device__ __forceinline__ float largest(const Vec<T, N>& x) {
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

// A thread's share of the statistics.
template <Cross kCross>
struct Running {
  PairStats stats = no_stats();
  float student_from = 0.0f, teacher_from = 0.0f;  // their references

  // Of several vectors, in one step: one comparison with the maxima for all of them.
  template <typename T, int N, int M>
  __device__ __forceinline__ void add(const Vec<T, N> (&student)[M], const Vec<T, N> (&teacher)[M],
                                      float scale) {
    float student_high = largest(student[0]), teacher_high = largest(teacher[0]);
#pragma unroll
    for (int m = 1; m < M; ++m) {
      student_high = fmaxf(student_high, largest(student[m]));
      teacher_high = fmaxf(teacher_high, largest(teacher[m]));
    }
    if (student_high > stats.student_max || teacher_high > stats.teacher_max) {
      raise<kCross>(stats, fmaxf(stats.student_max, student_high), fmaxf(stats.teacher_max, teacher_high),
                    scale);
      student_from = reference(stats.student_max, scale);
      teacher_from = reference(stats.teacher_max, scale);
    }
#pragma unroll
    for (int m = 0; m < M; ++m) {
      float s[N], t[N], of_s[N], of_t[N];
      unpack(student[m], s);
      unpack(teacher[m], t);
      exponents(s, scale, student_from);
      exponents(t, scale, teacher_from);
#pragma unroll
      for (int i = 0; i < N; ++i) of_s[i] = exp2_fast(s[i]), of_t[i] = exp2_fast(t[i]);
#pragma unroll
      for (int i = 0; i < N; ++i) {
        if constexpr (kCross == Cross::kOfStudent) {
          if (of_s[i] != 0.0f) stats.cross = fmaf(of_s[i], s[i] - t[i], stats.cross);
        }
        if constexpr (kCross == Cross::kOfTeacher) {
          if (of_t[i] != 0.0f) stats.cross = fmaf(of_t[i], t[i] - s[i], stats.cross);
        }
      }
      stats.student_sum += ce::reduce_pairwise<Sum>(of_s);
      stats.teacher_sum += ce::reduce_pairwise<Sum>(of_t);
    }
  }
};

// What all threads know of a row after the first pass.
struct alignas(16) Known {
  float scale;
  float student_from, teacher_from;      // references of the exponents
  float student_factor, teacher_factor;  // what makes exponentials probabilities
  float log_ratio;                       // log2 of (sum of the student / sum of the teacher)
  float cross;
  float equal;  // the student's less the teacher's logit where both probabilities are the same

  // Sets *of_student and *of_teacher, whose sums refer to the largest logits themselves.
  __device__ __forceinline__ Known(const PairStats& s, const Problem& p, Normaliser* of_student,
                                   Normaliser* of_teacher)
      : scale(p.exp2_scale),
        student_from(reference(s.student_max, scale)),
        teacher_from(reference(s.teacher_max, scale)),
        student_factor(1.0f / s.student_sum),
        teacher_factor(1.0f / s.teacher_sum),
        cross(s.cross) {
    const float student_log = log2f(s.student_sum), teacher_log = log2f(s.teacher_sum);
    log_ratio = student_log - teacher_log;
    // Less what was lost when the reference was rounded.
    const float student_exact = student_log - fmaf(ce::reference_of(s.student_max), scale, -student_from);
    const float teacher_exact = teacher_log - fmaf(ce::reference_of(s.teacher_max), scale, -teacher_from);
    equal = (s.student_max - s.teacher_max) + (student_exact - teacher_exact) / scale;
    *of_student = {s.student_max, student_exact * kLn2, p.inverse_temperature};
    *of_teacher = {s.teacher_max, teacher_exact * kLn2, p.inverse_temperature};
  }
};

// What follows for a row: its loss, the sum of s (docs/divergence.md), and the coefficients of its gradient.
struct Outcome {
  float loss, slope;
  float a, b, c;
};

// What terms() leaves for the gradient, in float32.
enum class Keeps { kNothing, kForStudent, kForTeacher };

// How a divergence is computed by passes over rows that stay:
//   kCross    what the first pass adds beside the sums
//   kTerms    whether a second pass adds terms()
//   kKeeps    what terms() replaces by what the gradient needs instead: nothing, both tensors' logits by what
//             becomes of s, or those of the teacher by what becomes of t
//   outcome   from what the passes have added; weight is that of the row, over the temperature
//   add       so many exponentials of the student to the gradient of each class
//   gradient  of a vector of logits, or of what was kept; it is left in s
template <typename Rule>
struct Passes;

template <>
struct Passes<ForwardKl> {
  static constexpr Cross kCross = Cross::kOfTeacher;
  static constexpr bool kTerms = false;
  static constexpr Keeps kKeeps = Keeps::kNothing;

  static __device__ __forceinline__ Outcome outcome(const Known& k, const Sums&, float, float weight) {
    return {kLn2 * (k.cross * k.teacher_factor + k.log_ratio), -1.0f, weight * k.student_factor,
            -weight * k.teacher_factor, 0.0f};
  }
  static __device__ __forceinline__ void add(Outcome& o, float exponentials) { o.a += exponentials; }
  template <int N>
  static __device__ __forceinline__ void gradient(float (&s)[N], float (&t)[N], const Known& k,
                                                  const Outcome& o) {
    exponents(s, k.scale, k.student_from);
    exponents(t, k.scale, k.teacher_from);
#pragma unroll
    for (int i = 0; i < N; ++i) s[i] = fmaf(o.a, exp2_fast(s[i]), o.b * exp2_fast(t[i]));
  }
};

template <>
struct Passes<ReverseKl> {
  static constexpr Cross kCross = Cross::kOfStudent;
  static constexpr bool kTerms = false;
  static constexpr Keeps kKeeps = Keeps::kNothing;

  // q * (log(q / p) - loss), in which the logarithms of the sums cancel.
  static __device__ __forceinline__ Outcome outcome(const Known& k, const Sums&, float, float weight) {
    const float mean = k.cross * k.student_factor, loss = kLn2 * (mean - k.log_ratio);
    return {loss, loss + 1.0f, weight * k.student_factor * kLn2, mean, 0.0f};
  }
  static __device__ __forceinline__ void add(Outcome& o, float exponentials) { o.c += exponentials; }
  template <int N>
  static __device__ __forceinline__ void gradient(float (&s)[N], float (&t)[N], const Known& k,
                                                  const Outcome& o) {
    exponents(s, k.scale, k.student_from);
    exponents(t, k.scale, k.teacher_from);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const float of_s = exp2_fast(s[i]);
      s[i] = of_s == 0.0f ? 0.0f : of_s * fmaf(o.a, (s[i] - t[i]) - o.b, o.c);
    }
  }
};

template <>
struct Passes<Tvd> {
  static constexpr Cross kCross = Cross::kNone;
  static constexpr bool kTerms = true;
  static constexpr Keeps kKeeps = Keeps::kForStudent;

  // The logits tell which probability is larger. Where both are the same either sign is as good.
  template <int N>
  static __device__ __forceinline__ void terms(float (&s)[N], const float (&t)[N], const Known& k, float,
                                               Sums& sums) {
    const float ratio = k.teacher_factor / k.student_factor;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const float of_s = exp2_fast(fmaf(s[i], k.scale, -k.student_from));
      const float of_t = exp2_fast(fmaf(t[i], k.scale, -k.teacher_from));
      const float with_sign = copysignf(of_s, (s[i] - t[i]) - k.equal);
      sums.value += fabsf(fmaf(-ratio, of_t, of_s));
      sums.slope += with_sign;
      s[i] = with_sign;
    }
  }
  // Rows without any difference have no gradient.
  static __device__ __forceinline__ Outcome outcome(const Known& k, const Sums& sums, float, float weight) {
    const float half = sums.value == 0.0f ? 0.0f : 0.5f, slope = half * k.student_factor * sums.slope;
    const float factor = weight * k.student_factor;
    return {0.5f * k.student_factor * sums.value, slope, factor * half, 0.0f, -factor * slope};
  }
  static __device__ __forceinline__ void add(Outcome& o, float exponentials) { o.c += exponentials; }
  template <int N>
  static __device__ __forceinline__ void gradient(float (&s)[N], const float (&)[N], const Known&,
                                                  const Outcome& o) {
#pragma unroll
    for (int i = 0; i < N; ++i) s[i] = fmaf(o.c, fabsf(s[i]), o.a * s[i]);
  }
};

template <>
struct Passes<Jsd> {
  static constexpr Cross kCross = Cross::kNone;
  static constexpr bool kTerms = true;
  static constexpr Keeps kKeeps = Keeps::kForTeacher;
  // Exponents are no smaller, so that p / q is finite; 2^-100 of the largest probability adds nothing.
  static constexpr float kLeast = -100.0f;

  // With r = p / q and l = log2(m / q) = log2(beta * r + 1 - beta) a term is q * (beta * r * (log2(r) - l) -
  // (1 - beta) * l), in bits. l is kept.
  template <int N>
  static __device__ __forceinline__ void terms(float (&s)[N], float (&t)[N], const Known& k, float beta,
                                               Sums& sums) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const float of_student = fmaxf(fmaf(s[i], k.scale, -k.student_from), kLeast);
      const float of_teacher = fmaxf(fmaf(t[i], k.scale, -k.teacher_from), kLeast);
      const float log_r = (of_teacher - of_student) + k.log_ratio;
      const float share = beta * exp2_fast(log_r), mixture = share + (1.0f - beta);
      const float l = log2_fast(mixture), e = exp2_fast(of_student);
      sums.value = fmaf(e, fmaf(share, log_r, -mixture * l), sums.value);
      sums.slope = fmaf(e, l, sums.slope);
      t[i] = l;
    }
  }
  // s = -(1 - beta) * q * l / log2(e)
  static __device__ __forceinline__ Outcome outcome(const Known& k, const Sums& sums, float beta,
                                                    float weight) {
    const float mean = k.student_factor * sums.slope, factor = -(1.0f - beta) * kLn2;
    const float coefficient = weight * factor * k.student_factor;
    return {kLn2 * k.student_factor * sums.value, factor * mean, coefficient, 0.0f, -coefficient * mean};
  }
  static __device__ __forceinline__ void add(Outcome& o, float exponentials) { o.c += exponentials; }
  template <int N>
  static __device__ __forceinline__ void gradient(float (&s)[N], float (&l)[N], const Known& k,
                                                  const Outcome& o) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const float of_s = exp2_fast(fmaf(s[i], k.scale, -k.student_from));
      s[i] = of_s * fmaf(o.a, l[i], o.c);
    }
  }
};
#endif

}  // namespace liger::divergence
