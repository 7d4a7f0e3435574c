// The row rule of cross entropy (docs/cross_entropy.md): running statistics of a row, what follows from them,
// and the gradient of a vector of logits. Shared by every kernel that looks at logits.
#pragma once

#include "cross_entropy/problem.cuh"

namespace liger::ce {

// --- statistics of a row -----------------------------------------------------------------------------------

// Plain data, since it lives in shared memory too: start from no_stats().
template <bool kExtras>
struct Stats {
  float max;
  float sum;  // of exp(z - max)
};
template <>
struct Stats<true> {
  float max;
  float sum;
  float spread;    // of exp(z - max) * (z - max)
  float weighted;  // of class_weight * z
  float best;      // largest logit before the softcap, and the first column that has it
  int best_column;
};

inline constexpr int kNoColumn = 0x7fffffff;

template <bool kExtras>
__device__ __forceinline__ Stats<kExtras> no_stats() {
  if constexpr (kExtras) {
    return {-INFINITY, 0.0f, 0.0f, 0.0f, -INFINITY, kNoColumn};
  } else {
    return {-INFINITY, 0.0f};
  }
}

// Lets the sums refer to a larger maximum. A thread that has seen nothing but -inf has sum 0 (or nan, to be
// kept).
template <bool kExtras>
__device__ __forceinline__ void raise(Stats<kExtras>& s, float max) {
  const float scale = s.max == -INFINITY ? 1.0f : exp_from(s.max, max);
  if constexpr (kExtras) s.spread = s.sum == 0.0f ? 0.0f : (s.spread + (s.max - max) * s.sum) * scale;
  s.sum *= scale;
  s.max = max;
}

template <bool kExtras, typename T, int N>
__device__ __forceinline__ void accumulate(Stats<kExtras>& s, const Vec<T, N>& raw, int column,
                                           const Problem& p) {
  float z[N];
  widen<kExtras>(raw, column, p, z);
  if constexpr (kExtras) {
    if (p.extras & kArgmax) {
#pragma unroll
      for (int i = 0; i < N; ++i) {
        // Vectors come in rising order; an edge, seen last, may precede them.
        const bool earlier = N == 1 && z[i] == s.best && column < s.best_column;
        if (z[i] > s.best || earlier) s.best = z[i], s.best_column = column + i;
      }
    }
  }
  cap<kExtras, T>(p, z);

  const float largest = reduce_pairwise<Max>(z);
  if (largest > s.max) raise(s, largest);
  const float reference = reference_of(s.max);
  float e[N];
#pragma unroll
  for (int i = 0; i < N; ++i) e[i] = exp_from(z[i], reference);

  if constexpr (kExtras) {
    if (p.extras & kEntropy) {
#pragma unroll
      for (int i = 0; i < N; ++i) s.spread += e[i] == 0.0f ? 0.0f : e[i] * (z[i] - s.max);
    }
    if (p.extras & kSmoothing) {
      float w[N];
      if (p.class_weight != nullptr) load_anywhere<float, N>(p.class_weight + column, w);
#pragma unroll
      for (int i = 0; i < N; ++i) s.weighted += p.class_weight != nullptr ? w[i] * z[i] : z[i];
    }
  }
  s.sum += reduce_pairwise<Sum>(e);
}

// accumulate() of several vectors, the columns of which are column_step apart. Without extras it is one step:
// one comparison with the maximum for all of them.
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
    if (largest > s.max) raise(s, largest);
    const float reference = reference_of(s.max);
#pragma unroll
    for (int i = 0; i < U * N; ++i) z[i] = exp_from(z[i], reference);
    s.sum += reduce_pairwise<Sum>(z);
  }
}

template <bool kExtras>
__device__ __forceinline__ void merge(Stats<kExtras>& a, Stats<kExtras> b) {
  const float max = fmaxf(a.max, b.max);
  raise(a, max);
  raise(b, max);
  a.sum += b.sum;
  if constexpr (kExtras) {
    a.spread += b.spread;
    a.weighted += b.weighted;
    if (b.best > a.best || (b.best == a.best && b.best_column < a.best_column)) {
      a.best = b.best;
      a.best_column = b.best_column;
    }
  }
}

// Every lane gets the same bits: maximum and addition commute.
template <bool kExtras>
__device__ __forceinline__ void merge_warp(Stats<kExtras>& s) {
  raise(s, warp_reduce<Max>(s.max));
  s.sum = warp_reduce<Sum>(s.sum);
  if constexpr (kExtras) {
    s.spread = warp_reduce<Sum>(s.spread);
    s.weighted = warp_reduce<Sum>(s.weighted);
    const float best = warp_reduce<Max>(s.best);
    s.best_column = __reduce_min_sync(0xffffffffu, s.best == best ? s.best_column : kNoColumn);
    s.best = best;
  }
}

// --- what follows from the statistics ----------------------------------------------------------------------

// What a row needs from memory beside its logits, as it was read: nothing waits for it before row_of().
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
  int target;          // -1 for one that is no class
  float class_weight;  // of the target; nan for one that is no class, and so is all that follows from it
  float token_weight;
  float z_target;
};

template <bool kExtras, typename T>
__device__ __forceinline__ Row row_of(const Problem& p, const RowInputs<T>& in, int64_t index) {
  Row row = {index, -1, NAN, in.token_weight, NAN};
  if (in.target >= 0 && in.target < p.vocab) {
    row.target = static_cast<int>(in.target);
    row.class_weight = in.class_weight;
    float z[1];
    widen<kExtras>(Vec<T, 1>{in.logit}, row.target, p, z);
    cap<kExtras, T>(p, z);
    row.z_target = z[0];
  }
  return row;
}

template <bool kExtras, typename T>
__device__ __forceinline__ Row read_row(const Problem& p, const T* logits, int64_t index, int64_t y) {
  return row_of<kExtras>(p, read_inputs(p, logits, index, y), index);
}

__device__ __forceinline__ float class_weight_sum(const Problem& p) {
  return p.class_weight != nullptr ? *p.weight_sum : static_cast<float>(p.vocab);
}

// The gradient of one row: probability * exp(z[v] - reference) - smooth * w[v] - hard * [v == target]
struct Gradient {
  float reference, probability, hard, smooth;
  int target;
  float log = 0.0f;  // with kLogs: of each probability times its logarithm
};

// A class without probability adds nothing, whatever its logarithm is multiplied by.
inline constexpr float kLeastLog = -1e30f;

// share: the row's part of the upstream gradient, its token weight included. The probabilities of the row are
// exp(z - reference) / sum, which may be put as the maximum and its sum, or as lse and 1.
__device__ __forceinline__ Gradient gradient_weights(const Problem& p, const Row& row, float lse, float share,
                                                     float reference, float sum) {
  Gradient g;
  g.reference = reference_of(reference);
  g.target = row.target;
  g.hard = share * (1.0f - p.label_smoothing) * row.class_weight;
  g.smooth = 0.0f;
  float total = g.hard;
  if (p.label_smoothing != 0.0f) {
    g.smooth = share * (p.label_smoothing / static_cast<float>(p.vocab));
    total += g.smooth * class_weight_sum(p);
  }
  if (p.lse_square_scale != 0.0f) total += share * 2.0f * p.lse_square_scale * row.class_weight * lse;
  g.probability = total / sum;
  return g;
}

// kTarget: whether the target may be among these classes.
template <bool kExtras, bool kTarget = true, typename T, int N>
__device__ __forceinline__ Vec<T, N> gradient(const Vec<T, N>& raw, int column, const Problem& p,
                                              const Gradient& g) {
  float z[N], d[N];
  widen<kExtras>(raw, column, p, z);
  cap<kExtras, T>(p, z);
#pragma unroll
  for (int i = 0; i < N; ++i) d[i] = g.probability * exp_from(z[i], g.reference);
  if constexpr (kExtras) {
    if (p.extras & kLogs) {
#pragma unroll
      for (int i = 0; i < N; ++i) {
        const float log = fmaxf(z[i] - g.reference, kLeastLog);
        d[i] = exp_from(z[i], g.reference) * fmaf(g.log, log, g.probability);
      }
    }
    if (p.extras & kSmoothing) {
      float w[N];
      if (p.class_weight != nullptr) load_anywhere<float, N>(p.class_weight + column, w);
#pragma unroll
      for (int i = 0; i < N; ++i) d[i] -= p.class_weight != nullptr ? g.smooth * w[i] : g.smooth;
    }
  }
  const unsigned at = static_cast<unsigned>(g.target - column);
  if (kTarget && at < N) {
#pragma unroll
    for (int i = 0; i < N; ++i) d[i] -= at == static_cast<unsigned>(i) ? g.hard : 0.0f;
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
  if (p.lse != nullptr) p.lse[row] = 0.0f;
  if (p.logprobs != nullptr) p.logprobs[row] = 0.0f;
  if (p.entropy != nullptr) p.entropy[row] = 0.0f;
  if (p.predicted != nullptr) p.predicted[row] = -1;
}

template <bool kExtras>
__device__ __forceinline__ void write_results(const Problem& p, const Row& row, const Stats<kExtras>& s) {
  const float log_of_sum = logf(s.sum);
  const float lse = s.max + log_of_sum;
  const float logprob = (row.z_target - s.max) - log_of_sum;

  float loss = row.target >= 0 ? 0.0f : NAN;
  if (p.label_smoothing != 1.0f) loss -= (1.0f - p.label_smoothing) * row.class_weight * logprob;
  if constexpr (kExtras) {
    if (p.extras & kSmoothing) {
      loss += p.label_smoothing / static_cast<float>(p.vocab) * (class_weight_sum(p) * lse - s.weighted);
    }
  }
  float z_loss = 0.0f;
  if (p.lse_square_scale != 0.0f) {
    z_loss = row.token_weight * p.lse_square_scale * row.class_weight * lse * lse;
  }
  const int64_t i = row.index;
  if (p.loss != nullptr) p.loss[i] = row.token_weight * loss + z_loss;
  if (p.z_loss != nullptr) p.z_loss[i] = z_loss;
  if (p.lse != nullptr) p.lse[i] = lse;
  if (p.logprobs != nullptr) p.logprobs[i] = logprob;
  if constexpr (kExtras) {
    if (p.entropy != nullptr) p.entropy[i] = log_of_sum - s.spread / s.sum;
    if (p.predicted != nullptr) p.predicted[i] = s.best_column == kNoColumn ? 0 : s.best_column;
  }
}

}  // namespace liger::ce
