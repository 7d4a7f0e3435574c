// SPDX-License-Identifier: BSD-3-Clause

// Terms of fused_linear_ce in addition to the product of hidden states and weight: bias and softcap in the
// epilogue of the logits GEMM, and the rank-one terms of label smoothing in the epilogues of both gradients.
//
// Label smoothing subtracts coefficient[row] * class_weight[class] from each element of dlogits. The
// gradients therefore subtract coefficient[row] * (class_weight @ weight) from dX and class_weight[class] *
// (coefficient @ input) from dW. The loss needs the sum of a row's weighted logits, which is input[row] @
// (class_weight @ weight).
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "lm_head/sm90/element.cuh"

namespace liger::lm_head {

// bias: float32, padded with zeros to a multiple of kTileN; without a softcap its maximum is subtracted; null
// without a bias. softcap: 0 without a softcap.
struct LogitTransform {
  const float* bias = nullptr;
  float softcap = 0.0f;

  __host__ __device__ bool any() const { return bias != nullptr || softcap != 0.0f; }
  // Applies the softcap to a logit. The epilogue has its own faster form.
  __device__ __forceinline__ float cap(float z) const {
    return softcap == 0.0f ? z : softcap * tanhf(z / softcap);
  }
  // The derivative of the softcap, given the logit after the softcap.
  __device__ __forceinline__ float derivative(float capped) const {
    const float t = softcap == 0.0f ? 0.0f : capped / softcap;
    return fmaf(-t, t, 1.0f);
  }
};

// result[i] -= amount[i] * vector for the rows i of a gradient. vector: float32, padded with zeros to a
// multiple of kTileN; null without label smoothing. amount: null for 1.
struct RankOneTerm {
  const float* vector = nullptr;
  const float* amount = nullptr;

  __device__ __forceinline__ float amount_of(int64_t row) const {
    return amount != nullptr ? amount[row] : 1.0f;
  }
};

// sum[i] += amount * element i of eight elements.
template <typename T>
__device__ __forceinline__ void add_scaled(float (&sum)[8], float amount, uint4 elements) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t word = (&elements.x)[i];
    sum[2 * i] = fmaf(amount, low_of<T>(word), sum[2 * i]);
    sum[2 * i + 1] = fmaf(amount, high_of<T>(word), sum[2 * i + 1]);
  }
}

// vector[column] = sum of amount[i] * matrix[index[i]][column] for i < rows, in a fixed order; padded with
// zeros to a multiple of kTileN.
template <typename T>
struct RowSums {
  const T* matrix;
  int64_t stride;
  int64_t rows;      // an upper bound if `count` is given
  const int* count;  // null, or the number of rows + first, on the device
  int64_t first;
  const int* index;     // null: i itself
  const float* amount;  // null for 1
  int64_t columns;
  float* partial;  // row_sum_elements(columns)
  float* vector;
};
int64_t row_sum_elements(int64_t columns);
template <typename T>
void launch_row_sums(const RowSums<T>& sums, cudaStream_t stream);

// padded[i] = bias[i] - *offset, and zeros from vocab on; *weighted_sum = class_weight @ padded, if it is not
// null.
//
// *offset is the maximum of the bias. No probability depends on an offset that all classes share, but the
// epilogue's exponents would lose bits to it. With a softcap the logits depend on the offset, so `offset` is
// null and nothing is subtracted.
template <typename T>
struct BiasTerms {
  const T* bias;
  const float* class_weight;  // null: ones
  int64_t vocab, padded_size;
  float *padded, *weighted_sum, *offset;
};
template <typename T>
void launch_bias_terms(const BiasTerms<T>& terms, cudaStream_t stream);

}  // namespace liger::lm_head
