// SPDX-License-Identifier: BSD-3-Clause

// The row rule of cross entropy (docs/guides/cross_entropy.md), which all row kernels apply:
// online-softmax statistics of a row, the results and gradient coefficients computed from them, and the
// gradient of a vector of logits.
#pragma once

#include "cross_entropy/problem.cuh"

namespace liger::ce {

// --- statistics of a row -----------------------------------------------------------------------------------

// An aggregate without initialisers, because shared memory holds it too; empty_stats() is the identity of
// merge().
template <bool kExtras>
struct Stats {
  float max;
  float sum;  // of exp(z - max)
};
template <>
struct alignas(16) Stats<true> {
  float max;
  float sum;
  float entropy_sum;   // of exp(z - max) * (z - max)
  float weighted_sum;  // of class_weight * (z - max), so that an offset of all logits does not round it
  float weight_total;  // of class_weight
  float best;          // the largest logit before the softcap
  int best_column;     // the first column with that logit
};

inline constexpr int kNoColumn = 0x7fffffff;

template <bool kExtras>
__device__ __forceinline__ Stats<kExtras> empty_stats() {
  if constexpr (kExtras) {
    return {-INFINITY, 0.0f, 0.0f, 0.0f, 0.0f, -INFINITY, kNoColumn};
  } else {
    return {-INFINITY, 0.0f};
  }
}

// Rescales the sums to a maximum that is at least s.max. If all logits so far were -inf, the sum is 0, or nan
// after a nan logit, and the factor of 1 preserves both.
template <bool kExtras>
__device__ __forceinline__ void rescale(Stats<kExtras>& s, float max) {
  const float scale = s.max == -INFINITY ? 1.0f : exp_from(s.max, max);
  if constexpr (kExtras) {
    // Where sum * scale underflows, (s.max - max) * s.sum may be -inf, and -inf * 0 is NaN.
    s.entropy_sum = s.sum * scale == 0.0f ? 0.0f : (s.entropy_sum + (s.max - max) * s.sum) * scale;
    if (s.max != -INFINITY) s.weighted_sum = fmaf(s.max - max, s.weight_total, s.weighted_sum);
  }
  s.sum *= scale;
  s.max = max;
}

template <bool kExtras, typename T, int N>
__device__ __forceinline__ void accumulate(Stats<kExtras>& s, const Vec<T, N>& raw, int column,
                                           const Problem& p) {
  float z[N];
  unpack_logits<kExtras>(raw, column, p, z);
  if constexpr (kExtras) {
    if (p.extras & kArgmax) {
#pragma unroll
      for (int i = 0; i < N; ++i) {
        // Vectors are read in ascending order. Edge elements (N == 1) are read last but may have smaller
        // columns.
        const bool earlier = N == 1 && z[i] == s.best && column < s.best_column;
        if (z[i] > s.best || earlier) s.best = z[i], s.best_column = column + i;
      }
    }
  }
  apply_softcap<kExtras, T>(p, z);

  const float largest = reduce_pairwise<Max>(z);
  if (largest > s.max) rescale(s, largest);
  const float reference = reference_of(s.max);
  float e[N];
#pragma unroll
  for (int i = 0; i < N; ++i) e[i] = exp_from(z[i], reference);

  if constexpr (kExtras) {
    if (p.extras & kEntropy) {
#pragma unroll
      for (int i = 0; i < N; ++i) s.entropy_sum += e[i] == 0.0f ? 0.0f : e[i] * (z[i] - s.max);
    }
    if (p.extras & kSmoothing) {
      float w[N];
      if (p.class_weight != nullptr) load_unaligned<float, N>(p.class_weight + column, w);
#pragma unroll
      for (int i = 0; i < N; ++i) {
        const float below = z[i] - reference;
        s.weighted_sum += p.class_weight != nullptr ? w[i] * below : below;
      }
      s.weight_total += p.class_weight != nullptr ? reduce_pairwise<Sum>(w) : static_cast<float>(N);
    }
  }
  s.sum += reduce_pairwise<Sum>(e);
}

// accumulate() for U vectors, column_step columns apart. Without extras all of them are compared
// with the running maximum at once.
template <bool kExtras, typename T, int N, int U>
__device__ __forceinline__ void accumulate_all(Stats<kExtras>& s, const Vec<T, N> (&raw)[U], int column,
                                               int column_step, const Problem& p) {
  if constexpr (kExtras) {
#pragma unroll
    for (int u = 0; u < U; ++u) accumulate(s, raw[u], column + u * column_step, p);
  } else {
    float z[U * N];
#pragma unroll
    for (int u = 0; u < U; ++u) {
      float part[N];
      unpack(raw[u], part);
#pragma unroll
      for (int i = 0; i < N; ++i) z[u * N + i] = part[i];
    }
    const float largest = reduce_pairwise<Max>(z);
    if (largest > s.max) rescale(s, largest);
    const float reference = reference_of(s.max);
#pragma unroll
    for (int i = 0; i < U * N; ++i) z[i] = exp_from(z[i], reference);
    s.sum += reduce_pairwise<Sum>(z);
  }
}

template <bool kExtras>
__device__ __forceinline__ void merge(Stats<kExtras>& a, Stats<kExtras> b) {
  const float max = fmaxf(a.max, b.max);
  rescale(a, max);
  rescale(b, max);
  a.sum += b.sum;
  if constexpr (kExtras) {
    a.entropy_sum += b.entropy_sum;
    a.weighted_sum += b.weighted_sum;
    a.weight_total += b.weight_total;
    if (b.best > a.best || (b.best == a.best && b.best_column < a.best_column)) {
      a.best = b.best;
      a.best_column = b.best_column;
    }
  }
}

// Every lane gets the same bits, because maximum and addition are commutative.
template <bool kExtras>
__device__ __forceinline__ void merge_warp(Stats<kExtras>& s) {
  rescale(s, warp_reduce<Max>(s.max));
  s.sum = warp_reduce<Sum>(s.sum);
  if constexpr (kExtras) {
    s.entropy_sum = warp_reduce<Sum>(s.entropy_sum);
    s.weighted_sum = warp_reduce<Sum>(s.weighted_sum);
    s.weight_total = warp_reduce<Sum>(s.weight_total);
    const float best = warp_reduce<Max>(s.best);
    s.best_column = __reduce_min_sync(0xffffffffu, s.best == best ? s.best_column : kNoColumn);
    s.best = best;
  }
}

// --- results and gradient ----------------------------------------------------------------------------------

// The scalars that a row loads. They are not converted yet, so no instruction waits for the loads before
// make_row().
template <typename T>
struct RowInputs {
  int64_t target;
  T logit;  // at the target
  float class_weight, token_weight;
};

template <typename T>
__device__ __forceinline__ RowInputs<T> read_inputs(const Problem& p, const T* logits, int64_t index,
                                                    int64_t y) {
  RowInputs<T> in = {y, from_float<T>(0.0f), 1.0f, 1.0f};
  if (p.token_weight != nullptr) in.token_weight = p.token_weight[index];
  if (y >= 0 && y < p.vocab) {
    in.logit = logits[y];
    if (p.class_weight != nullptr) in.class_weight = p.class_weight[y];
  }
  return in;
}

struct Row {
  int64_t index;
  int target;          // -1 if it is outside [0, vocab)
  float class_weight;  // weight of the target; nan if the target is outside [0, vocab), which makes loss and
                       // gradient nan
  float token_weight;
  float z_target;
};

template <bool kExtras, typename T>
__device__ __forceinline__ Row make_row(const Problem& p, const RowInputs<T>& in, int64_t index) {
  Row row = {index, -1, NAN, in.token_weight, NAN};
  if (in.target >= 0 && in.target < p.vocab) {
    row.target = static_cast<int>(in.target);
    row.class_weight = in.class_weight;
    float z[1];
    unpack_logits<kExtras>(Vec<T, 1>{in.logit}, row.target, p, z);
    apply_softcap<kExtras, T>(p, z);
    row.z_target = z[0];
  }
  return row;
}

template <bool kExtras, typename T>
__device__ __forceinline__ Row read_row(const Problem& p, const T* logits, int64_t index, int64_t y) {
  return make_row<kExtras>(p, read_inputs(p, logits, index, y), index);
}

__device__ __forceinline__ float class_weight_sum(const Problem& p) {
  return p.class_weight != nullptr ? *p.weight_sum : static_cast<float>(p.vocab);
}

// The gradient of one row, with e = exp(z[v] - reference), before the derivative of the softcap:
//   e * (coef_exp + coef_log * (z[v] - reference)) - coef_class * w[v] - coef_target * [v == target]
struct GradientCoefficients {
  float reference, coef_exp, coef_target, coef_class;
  int target;
  float coef_log = 0.0f;  // read only with kCoefLog
};

// A lower bound of z - reference: a class of probability 0 would have 0 * -inf, which is nan.
inline constexpr float kMinLog = -1e30f;

// The logarithm of the sum of exp(z). It is rounded where logits are large, so only the z-loss reads it.
__device__ __forceinline__ float log_sum_exp(const Problem& p, float max, float sum) {
  return max + logf(sum) + (p.offset != nullptr ? *p.offset : 0.0f);
}

// upstream: the gradient of the row's loss, times its token weight. The probabilities of the row are
// exp(z - max) / sum.
__device__ __forceinline__ GradientCoefficients gradient_coefficients(const Problem& p, const Row& row,
                                                                      float upstream, float max, float sum) {
  GradientCoefficients g;
  g.reference = reference_of(max);
  g.target = row.target;
  g.coef_target = upstream * (1.0f - p.label_smoothing) * row.class_weight;
  g.coef_class = 0.0f;
  float total = g.coef_target;
  if (p.label_smoothing != 0.0f) {
    g.coef_class = upstream * (p.label_smoothing / static_cast<float>(p.vocab));
    total += g.coef_class * class_weight_sum(p);
  }
  if (p.lse_square_scale != 0.0f)
    total += upstream * 2.0f * p.lse_square_scale * row.class_weight * log_sum_exp(p, max, sum);
  g.coef_exp = total / sum;
  return g;
}

// kTarget: false if the target is not among these columns.
template <bool kExtras, bool kTarget = true, typename T, int N>
__device__ __forceinline__ Vec<T, N> gradient(const Vec<T, N>& raw, int column, const Problem& p,
                                              const GradientCoefficients& g) {
  float z[N], d[N];
  unpack_logits<kExtras>(raw, column, p, z);
  apply_softcap<kExtras, T>(p, z);
#pragma unroll
  for (int i = 0; i < N; ++i) d[i] = g.coef_exp * exp_from(z[i], g.reference);
  if constexpr (kExtras) {
    if (p.extras & kCoefLog) {
#pragma unroll
      for (int i = 0; i < N; ++i) {
        const float log = fmaxf(z[i] - g.reference, kMinLog);
        d[i] = exp_from(z[i], g.reference) * fmaf(g.coef_log, log, g.coef_exp);
      }
    }
    if (p.extras & kSmoothing) {
      float w[N];
      if (p.class_weight != nullptr) load_unaligned<float, N>(p.class_weight + column, w);
#pragma unroll
      for (int i = 0; i < N; ++i) d[i] -= p.class_weight != nullptr ? g.coef_class * w[i] : g.coef_class;
    }
  }
  const unsigned at = static_cast<unsigned>(g.target - column);
  if (kTarget && at < N) {
#pragma unroll
    for (int i = 0; i < N; ++i) d[i] -= at == static_cast<unsigned>(i) ? g.coef_target : 0.0f;
  }
  if constexpr (kExtras) {
    if (p.extras & kSoftcap) {
      const float inverse = 1.0f / p.softcap;
#pragma unroll
      for (int i = 0; i < N; ++i) d[i] *= fmaf(-z[i] * inverse, z[i] * inverse, 1.0f);
    }
  }
  return pack<T>(d);
}

__device__ __forceinline__ void write_ignored(const Problem& p, int64_t row) {
  if (p.loss != nullptr) p.loss[row] = 0.0f;
  if (p.z_loss != nullptr) p.z_loss[row] = 0.0f;
  if (p.row_max != nullptr) p.row_max[row] = 0.0f, p.row_sum[row] = 1.0f;
  if (p.logprobs != nullptr) p.logprobs[row] = 0.0f;
  if (p.entropy != nullptr) p.entropy[row] = 0.0f;
  if (p.predicted != nullptr) p.predicted[row] = -1;
}

template <bool kExtras>
__device__ __forceinline__ void write_results(const Problem& p, const Row& row, const Stats<kExtras>& s) {
  const float log_of_sum = logf(s.sum);
  const float logprob = (row.z_target - s.max) - log_of_sum;

  float loss = row.target >= 0 ? 0.0f : NAN;
  if (p.label_smoothing != 1.0f) loss -= (1.0f - p.label_smoothing) * row.class_weight * logprob;
  if constexpr (kExtras) {
    if (p.extras & kSmoothing) {
      loss += p.label_smoothing / static_cast<float>(p.vocab) *
              (class_weight_sum(p) * log_of_sum - s.weighted_sum);
    }
  }
  float z_loss = 0.0f;
  if (p.lse_square_scale != 0.0f) {
    const float lse = log_sum_exp(p, s.max, s.sum);
    z_loss = row.token_weight * p.lse_square_scale * row.class_weight * lse * lse;
  }
  const int64_t i = row.index;
  if (p.loss != nullptr) p.loss[i] = row.token_weight * loss + z_loss;
  if (p.z_loss != nullptr) p.z_loss[i] = z_loss;
  if (p.row_max != nullptr) p.row_max[i] = s.max, p.row_sum[i] = s.sum;
  if (p.logprobs != nullptr) p.logprobs[i] = logprob;
  if constexpr (kExtras) {
    if (p.entropy != nullptr) p.entropy[i] = log_of_sum - s.entropy_sum / s.sum;
    if (p.predicted != nullptr) p.predicted[i] = s.best_column == kNoColumn ? 0 : s.best_column;
  }
}

}  // namespace liger::ce
