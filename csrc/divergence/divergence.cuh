// SPDX-License-Identifier: BSD-3-Clause

// The divergence of two rows of logits, and its gradient with respect to the first, the student's.
// Probabilities are never materialised. These kernels run on any device and for rows of any length, with one
// block per row: the loss reads both rows twice (once for the online softmax, once for the terms), the
// gradient reads them once more. divergence/rows_smem.cuh needs a single read.
//
// Rows may start at any address. Accesses are 16 bytes wide if student, teacher and gradient are aligned
// alike, else single elements.
#pragma once

#include "cross_entropy/problem.cuh"
#include "device/reduce.cuh"
#include "device/vec.cuh"

namespace liger::divergence {

inline constexpr int kMaxThreads = 512;

// One class: the probabilities p of the teacher and q of the student, and d = log(p / q).
struct Class {
  float d, p, q;
};

// A divergence is the sum of value() over the classes; slope() is the derivative of a term with respect to
// log(q). A class of probability 0 adds 0; 0 * d might be nan.
struct ForwardKl {
  static __device__ __forceinline__ float value(const Class& c, float) {
    return c.p == 0.0f ? 0.0f : c.p * c.d;  // NaN stays
  }
  static __device__ __forceinline__ float slope(const Class& c, float) { return -c.p; }
};

struct ReverseKl {
  static __device__ __forceinline__ float value(const Class& c, float) {
    return c.q == 0.0f ? 0.0f : -c.q * c.d;
  }
  static __device__ __forceinline__ float slope(const Class& c, float beta) { return value(c, beta) + c.q; }
};

// beta * KL(p || m) + (1 - beta) * KL(q || m) with m = beta * p + (1 - beta) * q
struct Jsd {
  // Returns log(p / m) and log(q / m). Only the ratio of the smaller to the larger probability enters expm1f,
  // so the result is finite, and accurate for p near q.
  static __device__ __forceinline__ float2 against_mixture(const Class& c, float beta) {
    const float log_larger = -log1pf((c.d > 0.0f ? 1.0f - beta : beta) * expm1f(-fabsf(c.d)));
    return c.d > 0.0f ? make_float2(log_larger, log_larger - c.d) : make_float2(log_larger + c.d, log_larger);
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
  ce::Targets targets;  // data is null without targets
  float beta, inverse_temperature;
  float exp2_scale;  // log2(e) / temperature
  bool log_probs;
  // The factor of the cross entropy of the target; its gradient is added to the gradient of the divergence.
  // It is 0 unless the temperature is 1: then both gradients contain the same softmax.
  float cross_entropy;
};

// One value per row, or one for all rows (stride 0). Without data every weight is 1.
struct RowWeights {
  const float* data;
  int64_t stride;
  __device__ __forceinline__ float operator[](int64_t row) const {
    return data == nullptr ? 1.0f : data[row * stride];
  }
};

// The outputs of a launch, and the weights of the rows.
struct Results {
  float* loss;   // (rows), weighted
  float* stats;  // (5, rows), as csrc/library.cpp defines them
  float* hard;   // (rows), Problem::cross_entropy times the cross entropy, weighted; null: not requested
  RowWeights weights;
  void* gradient;  // rows x vocab, of the sum of the losses; may be the student's logits
  int64_t gradient_stride;
};

__device__ __forceinline__ bool ignored(const Problem& p, int64_t row) {
  return p.targets.data != nullptr && p.targets[row] == p.targets.ignore_index;
}

// True if the target is in [0, vocab). Any other target that is not ignored makes the cross entropy of its
// row and the gradient nan.
__device__ __forceinline__ bool is_class(const Problem& p, int64_t target) {
  return target >= 0 && target < p.vocab;
}

// The log-probability of a logit: (z - max) / temperature - log_sum. Subtracting first removes an offset that
// all logits share before anything is rounded.
struct LogSoftmax {
  float max, log_sum, inverse_temperature;
  __device__ __forceinline__ float operator()(float z) const {
    return (z - max) * inverse_temperature - log_sum;
  }
};

__device__ __forceinline__ Class class_at(float student, float teacher, const LogSoftmax& log_q,
                                          const LogSoftmax& log_p) {
  // The maximum of its own row is subtracted from each logit first: the offset of one row would cost the
  // other row precision.
  const float difference = (teacher - log_p.max) - (student - log_q.max);
  const float d = difference * log_q.inverse_temperature - (log_p.log_sum - log_q.log_sum);
  return {d, __expf(log_p(teacher)), __expf(log_q(student))};
}

// Online softmax over the logits that one thread reads: their maximum and the sum of
// exp((z - max) / temperature).
struct LogSumExp {
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

  // Reduces over the block; every thread gets the result.
  __device__ __forceinline__ LogSoftmax reduce_block(float inverse_temperature, float* scratch) const {
    const float high = block_reduce<Max>(max, scratch);
    const float reference = ce::reference_of(high);
    const float total = block_reduce<Sum>(sum * __expf((max - reference) * inverse_temperature), scratch);
    return {high, logf(total), inverse_temperature};
  }
};

// Calls body(column, student, teacher) for the part of two rows that this thread reads: vectors if both rows
// are equally far from a 16-byte boundary (kAligned), and single edge elements. The indices are unsigned,
// because an index past the last of 2^31 - 1 columns does not fit into an int.
template <typename T, bool kAligned, typename Body>
__device__ __forceinline__ void for_each_vector(const T* student, const T* teacher, int vocab,
                                                const Body& body) {
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
                                              const LogSoftmax& log_q, const LogSoftmax& log_p, float slope) {
  r.loss[row] = loss;
  const float columns[] = {log_q.max, log_q.log_sum, log_p.max, log_p.log_sum, slope};
#pragma unroll
  for (int i = 0; i < 5; ++i) r.stats[i * p.rows + row] = columns[i];
}

// The student's logit at the target: nan if the target is outside [0, vocab), 0 in ignored rows. Needs
// targets.
template <typename T>
__device__ __forceinline__ float target_logit(const Problem& p, int64_t row, bool ignored) {
  if (ignored) return 0.0f;
  const int64_t target = p.targets[row];
  return is_class(p, target) ? to_float(row_at<T>(p.student, p.student_stride, row)[target]) : NAN;
}

// The weighted cross entropy of a row. logit: the student's at the target. In an ignored row log_q and logit
// are 0, and so is the loss.
__device__ __forceinline__ float hard_loss(const Problem& p, float weight, const LogSoftmax& log_q,
                                           float logit) {
  return weight * p.cross_entropy * (log_q.log_sum - (logit - log_q.max));
}

// Writes losses and stats. grid: rows. Block size: any multiple of 32 up to kMaxThreads. kAligned: the rows
// of student and teacher are equally far from a 16-byte boundary.
template <typename T, typename Rule, bool kAligned>
__global__ void __launch_bounds__(kMaxThreads) forward(const Problem p, const Results r) {
  __shared__ float scratch[32];
  const int64_t row = blockIdx.x;
  float value = 0.0f, slope = 0.0f;
  LogSoftmax log_q{0.0f, 0.0f, p.inverse_temperature}, log_p = log_q;
  if (!ignored(p, row)) {
    const T* student = row_at<T>(p.student, p.student_stride, row);
    const T* teacher = row_at<T>(p.teacher, p.teacher_stride, row);
    if (!p.log_probs) {
      LogSumExp student_sum, teacher_sum;
      for_each_vector<T, kAligned>(student, teacher, p.vocab, [&](int, const auto& s, const auto& t) {
        student_sum.add(s, p.inverse_temperature);
        teacher_sum.add(t, p.inverse_temperature);
      });
      log_q = student_sum.reduce_block(p.inverse_temperature, scratch);
      log_p = teacher_sum.reduce_block(p.inverse_temperature, scratch);
    }
    for_each_vector<T, kAligned>(student, teacher, p.vocab, [&](int, const auto& s, const auto& t) {
#pragma unroll
      for (int i = 0; i < sizeof(s) / sizeof(float); ++i) {
        const Class c = class_at(s[i], t[i], log_q, log_p);
        value += Rule::value(c, p.beta);
        slope += Rule::slope(c, p.beta);
      }
    });
    value = block_reduce<Sum>(value, scratch);
    slope = p.log_probs ? 0.0f : block_reduce<Sum>(slope, scratch);
  }
  if (threadIdx.x == 0) {
    const float weight = r.weights[row];
    write_results(p, r, row, weight * value, log_q, log_p, slope);
    if (r.hard != nullptr) {
      const float logit = target_logit<T>(p, row, ignored(p, row));
      r.hard[row] = hard_loss(p, weight, log_q, logit);
    }
  }
}

// Writes the gradient, of dtype G, from stats. grid: rows. Block size as for forward(). If G is T, the
// gradient may overwrite the student's logits: the thread that writes an element is the one that read it.
// kAligned: the rows of student, teacher and gradient are equally far, in elements, from a multiple of
// kVec<T> elements.
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
  const LogSoftmax log_q{stat(0), stat(1), p.inverse_temperature};
  const LogSoftmax log_p{stat(2), stat(3), p.inverse_temperature};
  const int64_t target = p.cross_entropy == 0.0f ? -1 : p.targets[row];
  const float hard = p.cross_entropy == 0.0f || is_class(p, target) ? p.cross_entropy : NAN;
  const float slope = stat(4) - hard, upstream = r.weights[row] * p.inverse_temperature;
  for_each_vector<T, kAligned>(row_at<T>(p.student, p.student_stride, row),
                               row_at<T>(p.teacher, p.teacher_stride, row), p.vocab,
                               [&](int column, const auto& s, const auto& t) {
                                 constexpr int N = sizeof(s) / sizeof(float);
                                 float grad[N];
#pragma unroll
                                 for (int i = 0; i < N; ++i) {
                                   const Class c = class_at(s[i], t[i], log_q, log_p);
                                   const float one_hot = column + i == target ? hard : 0.0f;
                                   grad[i] = upstream * (Rule::slope(c, p.beta) - c.q * slope - one_hot);
                                 }
                                 store(out + column, pack<G>(grad));
                               });
}

}  // namespace liger::divergence
