// The row rule of cross entropy (docs/cross_entropy.md): running statistics of a row, what follows from them,
// and the gradient of a vector of logits. Shared by every kernel that looks at logits.
#pragma once

#include "common/reduce.cuh"
#include "common/vec.cuh"

namespace liger::ce {

inline constexpr float kLog2e = 1.4426950408889634f;

// What a row needs beyond maximum, sum and target. Kernels compiled without extras serve every call that has
// none.
enum Extra : unsigned { kSoftcap = 1, kBias = 2, kSmoothing = 4, kArgmax = 8, kEntropy = 16 };

struct Targets {
  const void* data;
  bool is_int32;
  int64_t ignore_index;

  __device__ __forceinline__ int64_t operator[](int64_t row) const {
    return is_int32 ? static_cast<const int32_t*>(data)[row] : static_cast<const int64_t*>(data)[row];
  }
};

// One call, or one chunk of it. Optional pointers are null; those of per-row results are null where not asked
// for.
struct Problem {
  const void* logits;  // rows x vocab
  int64_t row_stride;
  void* gradient;  // rows x vocab, perhaps the logits themselves
  int64_t gradient_stride;
  int64_t rows;
  int vocab;
  Targets targets;
  const void* bias;           // (vocab), the dtype of the logits
  const float* class_weight;  // (vocab)
  const float* token_weight;  // (rows)
  const float* denominator;   // divides the gradient
  const float* weight_sum;    // sum of class_weight, set with kSmoothing and class_weight
  float label_smoothing;
  float lse_square_scale;
  float softcap;
  unsigned extras;
  float* loss;
  float* z_loss;
  float* lse;
  float* logprobs;
  float* entropy;
  int64_t* predicted;
};

// --- numbers
// ------------------------------------------------------------------------------------------------------

__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Two-byte logits carry 3 digits: an absolute error of 1e-7 in tanh is far below their rounding.
template <typename T>
__device__ __forceinline__ float tanh_for(float x) {
  return 1.0f - __fdividef(2.0f, exp2_fast(2.0f * kLog2e * x) + 1.0f);
}
template <>
__device__ __forceinline__ float tanh_for<float>(float x) {
  return tanhf(x);
}

// exp(z - reference). The difference is taken first, so that it is exact where it matters: near the largest
// logit.
__device__ __forceinline__ float exp_from(float z, float reference) {
  return exp2_fast((z - reference) * kLog2e);
}

// What the sums refer to; 0 for a row without a finite logit, so that nothing is inf - inf.
__device__ __forceinline__ float reference_of(float max) {
  return max == -INFINITY ? 0.0f : max;
}

// --- the aligned middle of a row, and its edges
// -------------------------------------------------------------------

// A row is cut into `head` single elements up to the first 16-byte boundary, whole vectors, and `tail` single
// elements.
struct Span {
  int head, vectors, tail;

  __device__ __forceinline__ int edges() const { return head + tail; }
  __device__ __forceinline__ int edge_column(int edge, int vocab) const {
    return edge < head ? edge : vocab - tail + (edge - head);
  }
};

template <typename T>
__device__ __forceinline__ Span span_of(const T* row, int vocab) {
  const int misaligned =
      static_cast<int>(reinterpret_cast<uintptr_t>(row) % 16) / static_cast<int>(sizeof(T));
  Span span;
  span.head = min(vocab, misaligned == 0 ? 0 : kVec<T> - misaligned);
  span.vectors = (vocab - span.head) / kVec<T>;
  span.tail = vocab - span.head - span.vectors * kVec<T>;
  return span;
}

// N neighbours as floats, through 16-byte loads where the address allows.
template <typename T, int N>
__device__ __forceinline__ void load_anywhere(const T* p, float (&out)[N]) {
  constexpr int kBytes = N * sizeof(T);
  if constexpr (kBytes % 16 == 0) {
    if (reinterpret_cast<uintptr_t>(p) % 16 == 0) {
      load_floats<N>(p, out);
      return;
    }
  }
#pragma unroll
  for (int i = 0; i < N; ++i) out[i] = to_float(p[i]);
}

// Whether vectors of two rows start at 16-byte boundaries together.
__device__ __forceinline__ bool aligned_alike(const void* a, const void* b) {
  return (reinterpret_cast<uintptr_t>(a) - reinterpret_cast<uintptr_t>(b)) % 16 == 0;
}

template <typename T, int N>
__device__ __forceinline__ void store_elements(T* p, const Vec<T, N>& x) {
#pragma unroll
  for (int i = 0; i < N; ++i) p[i] = x.v[i];
}

// Logits as stored -> with their bias, before the softcap.
template <bool kExtras, typename T, int N>
__device__ __forceinline__ void widen(const Vec<T, N>& raw, int column, const Problem& p, float (&x)[N]) {
  unpack(raw, x);
  if constexpr (kExtras) {
    if (p.extras & kBias) {
      float bias[N];
      load_anywhere<T, N>(static_cast<const T*>(p.bias) + column, bias);
#pragma unroll
      for (int i = 0; i < N; ++i) x[i] += bias[i];
    }
  }
}

template <bool kExtras, typename T, int N>
__device__ __forceinline__ void cap(const Problem& p, float (&x)[N]) {
  if constexpr (kExtras) {
    if (p.extras & kSoftcap) {
      const float inverse = 1.0f / p.softcap;
#pragma unroll
      for (int i = 0; i < N; ++i) x[i] = p.softcap * tanh_for<T>(x[i] * inverse);
    }
  }
}

// Pairwise: shorter chains for the scheduler, and less rounding.
template <typename Op, int N>
__device__ __forceinline__ float reduce_pairwise(const float (&x)[N]) {
  float y[N];
#pragma unroll
  for (int i = 0; i < N; ++i) y[i] = x[i];
#pragma unroll
  for (int width = N / 2; width > 0; width /= 2) {
#pragma unroll
    for (int i = 0; i < width; ++i) y[i] = Op::apply(y[i], y[i + width]);
  }
  return y[0];
}

// --- statistics of a row
// ------------------------------------------------------------------------------------------

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

// --- what follows from the statistics
// -----------------------------------------------------------------------------

// What a row needs from memory beside its logits, read before anything waits.
struct Row {
  int64_t index;
  int target;          // -1 for one that is no class
  float class_weight;  // of the target; nan for one that is no class, and so is all that follows from it
  float token_weight;
  float z_target;
};

template <bool kExtras, typename T>
__device__ __forceinline__ Row read_row(const Problem& p, const T* logits, int64_t index, int64_t y) {
  Row row = {index, -1, NAN, p.token_weight != nullptr ? p.token_weight[index] : 1.0f, NAN};
  if (y >= 0 && y < p.vocab) {
    row.target = static_cast<int>(y);
    row.class_weight = p.class_weight != nullptr ? p.class_weight[y] : 1.0f;
    float z[1];
    widen<kExtras>(Vec<T, 1>{logits[y]}, row.target, p, z);
    cap<kExtras, T>(p, z);
    row.z_target = z[0];
  }
  return row;
}

__device__ __forceinline__ float class_weight_sum(const Problem& p) {
  return p.class_weight != nullptr ? *p.weight_sum : static_cast<float>(p.vocab);
}

// The gradient of one row: probability * exp(z[v] - reference) - smooth * w[v] - hard * [v == target]
struct Gradient {
  float reference, probability, hard, smooth;
  int target;
};

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

template <bool kExtras, typename T, int N>
__device__ __forceinline__ Vec<T, N> gradient(const Vec<T, N>& raw, int column, const Problem& p,
                                              const Gradient& g) {
  float z[N], d[N];
  widen<kExtras>(raw, column, p, z);
  cap<kExtras, T>(p, z);
#pragma unroll
  for (int i = 0; i < N; ++i) d[i] = g.probability * exp_from(z[i], g.reference);
  if constexpr (kExtras) {
    if (p.extras & kSmoothing) {
      float w[N];
      if (p.class_weight != nullptr) load_anywhere<float, N>(p.class_weight + column, w);
#pragma unroll
      for (int i = 0; i < N; ++i) d[i] -= p.class_weight != nullptr ? g.smooth * w[i] : g.smooth;
    }
  }
  const unsigned at = static_cast<unsigned>(g.target - column);
  if (at < N) {
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
