// Cross entropy as its kernels see it: the problem of a call, the aligned parts of a row, and logits as
// numbers.
#pragma once

#include "device/aligned_row.cuh"
#include "device/exp2.cuh"
#include "device/reduce.cuh"
#include "device/vec.cuh"

namespace liger::ce {

// What a row needs beyond maximum, sum and target. Kernels compiled without extras serve every call that has
// none.
enum Extra : unsigned { kSoftcap = 1, kBias = 2, kSmoothing = 4, kArgmax = 8, kEntropy = 16, kLogs = 32 };

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

// --- numbers -----------------------------------------------------------------------------------------------

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

// --- the aligned middle of a row, and its edges ------------------------------------------------------------

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

// Pairwise: shorter chains for the scheduler, and less rounding. By recursion: a loop over widths would keep
// more than 8 values in local memory.
template <typename Op, int N>
__device__ __forceinline__ float reduce_pairwise(const float (&x)[N]) {
  if constexpr (N == 1) {
    return x[0];
  } else {
    float y[N / 2];
#pragma unroll
    for (int i = 0; i < N / 2; ++i) y[i] = Op::apply(x[i], x[i + N / 2]);
    return reduce_pairwise<Op>(y);
  }
}

}  // namespace liger::ce
