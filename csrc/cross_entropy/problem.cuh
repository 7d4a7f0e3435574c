// SPDX-License-Identifier: BSD-3-Clause

// The kernel parameters of cross entropy, loads and stores at any alignment, and the conversion of stored
// logits to floats with bias and softcap.
#pragma once

#include "device/aligned_row.cuh"
#include "device/exp2.cuh"
#include "device/reduce.cuh"
#include "device/vec.cuh"

namespace liger::ce {

// Features of a call beyond maximum, sum and target. Kernels with kExtras == false serve the calls without
// any of them; kernels with kExtras == true test the bits at run time.
enum Extra : unsigned { kSoftcap = 1, kBias = 2, kSmoothing = 4, kArgmax = 8, kEntropy = 16, kCoefLog = 32 };

struct Targets {
  const void* data;
  bool is_int32;
  int64_t ignore_index;

  __device__ __forceinline__ int64_t operator[](int64_t row) const {
    return is_int32 ? static_cast<const int32_t*>(data)[row] : static_cast<const int64_t*>(data)[row];
  }
};

// One call, or one chunk of its rows. Optional inputs that are absent and results that are not requested are
// null.
struct Problem {
  const void* logits;  // rows x vocab
  int64_t row_stride;
  void* gradient;  // rows x vocab, may be the logits themselves
  int64_t gradient_stride;
  int64_t rows;
  int vocab;
  Targets targets;
  const void* bias;           // (vocab), the dtype of the logits
  const float* class_weight;  // (vocab)
  const float* token_weight;  // (rows)
  const float* denominator;   // divides the gradient
  float* new_denominator;     // written and used instead by the row kernels if it is not null
  const float* weight_sum;    // sum of class_weight, set with kSmoothing and class_weight
  const float* offset;  // one number that was subtracted from all logits; only the z-loss needs it; null: 0
  float label_smoothing;
  float lse_square_scale;
  float softcap;
  unsigned extras;
  bool mean;  // new_denominator is the number of valid rows, else 1
  float* loss;
  float* z_loss;
  float *row_max, *row_sum;  // of the logits, and of exp(z - row_max); 0 and 1 in ignored rows
  float* logprobs;
  float* entropy;
  int64_t* predicted;
};

// --- numerics ----------------------------------------------------------------------------------------------

// tanh with a relative error of about 1e-6 for half types, which is far below their rounding; tanhf for
// float32. Near zero the exponential form cancels: there a large softcap would multiply its error.
template <typename T>
__device__ __forceinline__ float softcap_tanh(float x) {
  const float near = fmaf(x * x, -0.333333333f * x, x);
  const float far = 1.0f - __fdividef(2.0f, exp2_fast(2.0f * kLog2e * x) + 1.0f);
  return fabsf(x) < 0.05f ? near : far;
}
template <>
__device__ __forceinline__ float softcap_tanh<float>(float x) {
  return tanhf(x);
}

// exp(z - reference). Subtracting before scaling keeps the difference exact for the logits that matter, those
// near the maximum.
__device__ __forceinline__ float exp_from(float z, float reference) {
  return exp2_fast((z - reference) * kLog2e);
}

// The value that is subtracted from the logits before exp: the maximum, or 0 while that is -inf, because
// -inf - -inf would be nan.
__device__ __forceinline__ float reference_of(float max) {
  return max == -INFINITY ? 0.0f : max;
}

// --- alignment, bias and softcap ---------------------------------------------------------------------------

// Loads N consecutive elements as floats, with 16-byte loads if the address is aligned.
template <typename T, int N>
__device__ __forceinline__ void load_unaligned(const T* p, float (&out)[N]) {
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

// True if two rows are equally far from a 16-byte boundary.
__device__ __forceinline__ bool same_alignment(const void* a, const void* b) {
  return (reinterpret_cast<uintptr_t>(a) - reinterpret_cast<uintptr_t>(b)) % 16 == 0;
}

template <typename T, int N>
__device__ __forceinline__ void store_elements(T* p, const Vec<T, N>& x) {
#pragma unroll
  for (int i = 0; i < N; ++i) p[i] = x.v[i];
}

// Converts stored logits to floats and adds their bias; the softcap comes after it.
template <bool kExtras, typename T, int N>
__device__ __forceinline__ void unpack_logits(const Vec<T, N>& raw, int column, const Problem& p,
                                              float (&x)[N]) {
  unpack(raw, x);
  if constexpr (kExtras) {
    if (p.extras & kBias) {
      float bias[N];
      load_unaligned<T, N>(static_cast<const T*>(p.bias) + column, bias);
#pragma unroll
      for (int i = 0; i < N; ++i) x[i] += bias[i];
    }
  }
}

template <bool kExtras, typename T, int N>
__device__ __forceinline__ void apply_softcap(const Problem& p, float (&x)[N]) {
  if constexpr (kExtras) {
    if (p.extras & kSoftcap) {
      const float inverse = 1.0f / p.softcap;
#pragma unroll
      for (int i = 0; i < N; ++i) x[i] = p.softcap * softcap_tanh<T>(x[i] * inverse);
    }
  }
}

// A pairwise tree has shorter dependency chains and rounds less than a serial sum. It is recursive because
// the compiler puts more than 8 values into local memory if a loop halves the width.
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
