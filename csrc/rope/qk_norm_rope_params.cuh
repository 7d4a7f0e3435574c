// Parameters of qk_norm_rope, and the arithmetic of its norm.
#pragma once

#include "rope/rotation.cuh"

namespace liger {

// The weight of a norm: (head_dim,) in the dtype of the heads or float32, or null for 1.
struct HeadWeight {
  const void* data;
  bool is_float;
};

struct QkNormRope : Rope {
  HeadWeight q_weight, k_weight;
  float eps, offset;
  bool round_rstd;    // casting mode "none": rstd is rounded to the dtype of the heads
  bool round_scaled;  // "none", "llama": so is x * rstd, before the multiplication by the weight
};

// One of q and k. out: the result of the forward, or the gradient of x. In the backward out and partial may be
// null: not needed.
struct NormedHeads {
  const void *x, *grad_out;
  void* out;
  float* partial;  // of the gradient of the weight, (partials, head_dim)
  RopeStrides x_strides, grad_out_strides, out_strides;
  int heads;
};

// Of Rope, the tables and sizes are used.
struct QkNormRopeBackward : QkNormRope {
  NormedHeads tensors[2];
};

// Items of 2n entries of a head: first those that are rotated, then those that are copied.
inline int items_per_head(const Rope& p, int n) {
  return p.rotary / (2 * n) + (p.head_dim - p.rotary + 2 * n - 1) / (2 * n);
}
// The logarithm of the smallest power of two that is at least `items`.
inline int lanes_of(int items) {
  int log2 = 0;
  while ((1 << log2) < items) ++log2;
  return log2;
}

// Sums each of K values over `lanes` consecutive threads, a power of two up to 32. All threads of the warp must
// call it.
template <int K>
__device__ __forceinline__ void sum_over_lanes(float (&x)[K], int lanes) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    if (2 * offset <= lanes) {
#pragma unroll
      for (int k = 0; k < K; ++k) x[k] += __shfl_xor_sync(0xffffffffu, x[k], offset);
    }
  }
}

template <typename T>
__device__ __forceinline__ float reciprocal_rms(const QkNormRope& p, float squares) {
  const float rstd = rsqrtf(squares / static_cast<float>(p.head_dim) + p.eps);
  return p.round_rstd ? round_to<T>(rstd) : rstd;
}

// What the norm rounds to T before the rotation.
enum class Rounding {
  kOutput,      // x * rstd * weight, as if it were stored
  kScaled,      // x * rstd as well
  kScaledHalf,  // the same for a half type T with weights of dtype T and no offset: they are multiplied in T
};

// The output of the norm, rounded to T as if it were stored before the rotation.
template <typename T, bool kRoundScaled>
__device__ __forceinline__ float normalised(float x, float rstd, float w) {
  const float scaled = x * rstd;
  return round_to<T>((kRoundScaled ? round_to<T>(scaled) : scaled) * w);
}

}  // namespace liger
