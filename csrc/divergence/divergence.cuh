// The divergence of two rows of logits, and its gradient in the first. One block for each row: two reads of
// both rows for the loss (one for the largest logits and their sums, one for the terms), one for the
// gradient. On any device, for rows of any size; divergence_persistent.cuh takes one read for all three.
#pragma once

#include "cross_entropy/problem.cuh"
#include "device/reduce.cuh"
#include "device/vec.cuh"

namespace liger::divergence {

inline constexpr int kMaxThreads = 512;

// One class: p of the teacher, q of the student, and d = log(p / q).
struct Class {
  float d, p, q;
};

// A divergence is the sum of value() over the classes; slope() is the derivative of a term in log_q. A class
// without probability adds nothing, whatever its logarithm.
struct ForwardKl {
  static __device__ __forceinline__ float value(const Class& c, float) {
    return c.p > 0.0f ? c.p * c.d : 0.0f;
  }
  static __device__ __forceinline__ float slope(const Class& c, float) { return -c.p; }
};

struct ReverseKl {
  static __device__ __forceinline__ float value(const Class& c, float) {
    return c.q > 0.0f ? -c.q * c.d : 0.0f;
  }
  static __device__ __forceinline__ float slope(const Class& c, float beta) { return value(c, beta) + c.q; }
};

// beta * KL(p || m) + (1 - beta) * KL(q || m) with m = beta * p + (1 - beta) * q
struct Jsd {
  // log(p / m) and log(q / m), by the ratio of the smaller to the larger one: exact for p near q, and finite.
  static __device__ __forceinline__ float2 against_mixture(const Class& c, float beta) {
    const float of_larger = -log1pf((c.d > 0.0f ? 1.0f - beta : beta) * expm1f(-fabsf(c.d)));
    return c.d > 0.0f ? make_float2(of_larger, of_larger - c.d) : make_float2(of_larger + c.d, of_larger);
  }
  static __device__ __forceinline__ float value(const Class& c, float beta) {
    const float2 logs = against_mixture(c, beta);
    return (c.p > 0.0f ? beta * c.p * logs.x : 0.0f) + (c.q > 0.0f ? (1.0f - beta) * c.q * logs.y : 0.0f);
  }
  static __device__ __forceinline__ float slope(const Class& c, float beta) {
    return c.q > 0.0f ? (1.0f - beta) * c.q * against_mixture(c, beta).y : 0.0f;
  }
};

struct Tvd {
  static __device__ __forceinline__ float value(const Class& c, float) { return 0.5f * fabsf(c.p - c.q); }
  static __device__ __forceinline__ float slope(const Class& c, float) {
    return c.q == c.p ? 0.0f : copysignf(0.5f * c.q, c.q - c.p);
  }
};

struct Problem {
  const void* student;
  const void* teacher;
  int64_t student_stride, teacher_stride;
  int64_t rows;
  int vocab;
  ce::Targets targets;  // data is null where there are none
  float beta, inverse_temperature;
  float exp2_scale;  // log2(e) / temperature
  bool log_probs;
  // Times the gradient of the cross entropy of the target that of a row gets; not 0 at temperature 1 alone,
  // where that is softmax - onehot of the same softmax.
  float cross_entropy;
};

// One value per row, or the same for all, with a stride of 0; null for 1.
struct RowWeights {
  const float* data;
  int64_t stride;
  __device__ __forceinline__ float operator[](int64_t row) const {
    return data == nullptr ? 1.0f : data[row * stride];
  }
};

// What a launch writes.
struct Results {
  float* loss;   // (rows), times their weights
  float* stats;  // (5, rows), as csrc/library.cpp defines them
  float* hard;   // (rows), cross_entropy times that of the target, times their weights; null: not wanted
  RowWeights weights;
  void* gradient;  // rows x vocab, of the sum of the losses; perhaps the student's logits
  int64_t gradient_stride;
};

__device__ __forceinline__ bool ignored(const Problem& p, int64_t row) {
  return p.targets.data != nullptr && p.targets[row] == p.targets.ignore_index;
}

// Whether the target is a class. One that is none, and not ignored, makes the cross entropy of its row and
// the gradient nan.
__device__ __forceinline__ bool is_class(const Problem& p, int64_t target) {
  return target >= 0 && target < p.vocab;
}

// What makes a logit a log-probability: (z - max) / temperature - log_sum. The difference is taken first, so
// that what all logits have in common is lost to no rounding.
struct Normaliser {
  float max, log_sum, inverse_temperature;
  __device__ __forceinline__ float operator()(float z) const {
    return (z - max) * inverse_temperature - log_sum;
  }
};

__device__ __forceinline__ Class class_at(float student, float teacher, const Normaliser& of_student,
                                          const Normaliser& of_teacher) {
  // Of two logits that are near each other the difference is exact, that of their rounded logarithms is not.
  const float apart = (teacher - student) - (of_teacher.max - of_student.max);
  const float d = apart * of_student.inverse_temperature - (of_teacher.log_sum - of_student.log_sum);
  return {d, __expf(of_teacher(teacher)), __expf(of_student(student))};
}

// A thread's share of a row: its largest logit, and the sum of exp((z - largest) / temperature).
struct LogSum {
  float max = -INFINITY, sum = 0.0f;

  template <int N>
  __device__ __forceinline__ void add(const float (&z)[N], float inverse_temperature) {
    const float high = fmaxf(max, ce::reduce_pairwise<Max>(z));
    const float reference = ce::reference_of(high);
    sum *= __expf((max - reference) * inverse_temperature);
#pragma unroll
    for (int i = 0; i < N; ++i) sum += __expf((z[i] - reference) * inverse_temperature);
    max = high;
  }

  // Of the whole block.
  __device__ __forceinline__ Normaliser merged(float inverse_temperature, float* scratch) const {
    const float high = block_reduce<Max>(max, scratch);
    const float reference = ce::reference_of(high);
    const float total = block_reduce<Sum>(sum * __expf((max - reference) * inverse_temperature), scratch);
    return {high, logf(total), inverse_temperature};
  }
};

// body(column, student, teacher) for this thread's share of two rows, in vectors where both rows are equally
// far from a 16-byte boundary (kAligned), with single elements at their ends. Unsigned, since what lies past
// the last of 2^31 - 1 columns is no int.
template <typename T, bool kAligned, typename Body>
__device__ __forceinline__ void over_rows(const T* student, const T* teacher, int vocab, const Body& body) {
  constexpr int N = kAligned ? kVec<T> : 1, kUnroll = 2;
  const AlignedRow aligned = kAligned ? align_row(student, vocab) : AlignedRow{0, vocab, 0};
  const unsigned step = blockDim.x, vectors = static_cast<unsigned>(aligned.vectors);
  for (unsigned v = threadIdx.x; v < vectors; v += kUnroll * step) {
    Vec<T, N> x[kUnroll], y[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const unsigned column = aligned.head + (v + u * step) * N;
      if (v + u * step < vectors) x[u] = load<T, N>(student + column), y[u] = load<T, N>(teacher + column);
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (v + u * step < vectors) {
        float s[N], t[N];
        unpack(x[u], s);
        unpack(y[u], t);
        body(static_cast<int>(aligned.head + (v + u * step) * N), s, t);
      }
    }
  }
  if (threadIdx.x < aligned.edges()) {
    const int column = aligned.edge_column(threadIdx.x, vocab);
    const float s[1] = {to_float(student[column])}, t[1] = {to_float(teacher[column])};
    body(column, s, t);
  }
}

template <typename T>
__device__ __forceinline__ const T* row_at(const void* data, int64_t stride, int64_t row) {
  return static_cast<const T*>(data) + row * stride;
}

__device__ __forceinline__ void write_results(const Problem& p, const Results& r, int64_t row, float loss,
                                              const Normaliser& of_student, const Normaliser& of_teacher,
                                              float slope) {
  r.loss[row] = loss;
  const float columns[] = {of_student.max, of_student.log_sum, of_teacher.max, of_teacher.log_sum, slope};
#pragma unroll
  for (int i = 0; i < 5; ++i) r.stats[i * p.rows + row] = columns[i];
}

// The student's logit at the target of a row that has cross entropy: nan where the target is no class, 0 in
// ignored rows.
template <typename T>
__device__ __forceinline__ float target_logit(const Problem& p, int64_t row, bool ignored) {
  if (ignored) return 0.0f;
  const int64_t target = p.targets[row];
  return is_class(p, target) ? to_float(row_at<T>(p.student, p.student_stride, row)[target]) : NAN;
}

// Of a row with that logit at its target; of an ignored one all numbers are 0.
__device__ __forceinline__ float hard_loss(const Problem& p, float weight, const Normaliser& of_student,
                                           float logit) {
  return weight * p.cross_entropy * (of_student.log_sum - (logit - of_student.max));
}

// grid: rows. Any number of threads that is a multiple of 32. Writes losses and stats.
template <typename T, typename Rule, bool kAligned>
__global__ void __launch_bounds__(kMaxThreads) forward(const Problem p, const Results r) {
  __shared__ float scratch[32];
  const int64_t row = blockIdx.x;
  float value = 0.0f, slope = 0.0f;
  Normaliser of_student{0.0f, 0.0f, p.inverse_temperature}, of_teacher = of_student;
  if (!ignored(p, row)) {
    const T* student = row_at<T>(p.student, p.student_stride, row);
    const T* teacher = row_at<T>(p.teacher, p.teacher_stride, row);
    if (!p.log_probs) {
      LogSum of_s, of_t;
      over_rows<T, kAligned>(student, teacher, p.vocab, [&](int, const auto& s, const auto& t) {
        of_s.add(s, p.inverse_temperature);
        of_t.add(t, p.inverse_temperature);
      });
      of_student = of_s.merged(p.inverse_temperature, scratch);
      of_teacher = of_t.merged(p.inverse_temperature, scratch);
    }
    over_rows<T, kAligned>(student, teacher, p.vocab, [&](int, const auto& s, const auto& t) {
#pragma unroll
      for (int i = 0; i < sizeof(s) / sizeof(float); ++i) {
        const Class c = class_at(s[i], t[i], of_student, of_teacher);
        value += Rule::value(c, p.beta);
        slope += Rule::slope(c, p.beta);
      }
    });
    value = block_reduce<Sum>(value, scratch);
    slope = p.log_probs ? 0.0f : block_reduce<Sum>(slope, scratch);
  }
  if (threadIdx.x == 0) {
    const float weight = r.weights[row];
    write_results(p, r, row, weight * value, of_student, of_teacher, slope);
    if (r.hard != nullptr) {
      const float logit = target_logit<T>(p, row, ignored(p, row));
      r.hard[row] = hard_loss(p, weight, of_student, logit);
    }
  }
}

// grid: rows. Writes the gradient, in its own dtype G, from stats; over the student's logits, of the same
// dtype, is fine: one thread reads and writes an element. kAligned: the rows of all three are equally far, in
// elements, from a multiple of kVec<T> elements.
template <typename T, typename G, typename Rule, bool kAligned>
__global__ void __launch_bounds__(kMaxThreads) backward(const Problem p, const Results r) {
  const int64_t row = blockIdx.x;
  G* out = static_cast<G*>(r.gradient) + row * r.gradient_stride;
  if (ignored(p, row)) {
    for (unsigned column = threadIdx.x; column < static_cast<unsigned>(p.vocab); column += blockDim.x)
      out[column] = from_float<G>(0.0f);
    return;
  }
  const auto stat = [&](int i) { return r.stats[i * p.rows + row]; };
  const Normaliser of_student{stat(0), stat(1), p.inverse_temperature};
  const Normaliser of_teacher{stat(2), stat(3), p.inverse_temperature};
  const int64_t target = p.cross_entropy == 0.0f ? -1 : p.targets[row];
  const float hard = p.cross_entropy == 0.0f || is_class(p, target) ? p.cross_entropy : NAN;
  const float slope = stat(4) - hard, upstream = r.weights[row] * p.inverse_temperature;
  over_rows<T, kAligned>(row_at<T>(p.student, p.student_stride, row),
                         row_at<T>(p.teacher, p.teacher_stride, row), p.vocab,
                         [&](int column, const auto& s, const auto& t) {
                           constexpr int N = sizeof(s) / sizeof(float);
                           float grad[N];
#pragma unroll
                           for (int i = 0; i < N; ++i) {
                             const Class c = class_at(s[i], t[i], of_student, of_teacher);
                             const float taken = column + i == target ? hard : 0.0f;
                             grad[i] = upstream * (Rule::slope(c, p.beta) - c.q * slope - taken);
                           }
                           store(out + column, pack<G>(grad));
                         });
}

}  // namespace liger::divergence
