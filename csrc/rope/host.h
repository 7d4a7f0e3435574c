// SPDX-License-Identifier: BSD-3-Clause

// Host code shared by rope and qk_norm_rope: operands, tables, alignment.
#pragma once

#include "host/torch.h"
#include "rope/rotation.cuh"

namespace liger {

inline RopeStrides rope_strides(const Tensor& x) {
  return {x.stride(0), x.stride(1), x.stride(2), x.stride(3)};
}

inline RopeTensor rope_operand(const Tensor& in, const Tensor& out) {
  return {in.const_data_ptr(), out.mutable_data_ptr(), rope_strides(in), rope_strides(out),
          static_cast<int>(in.size(1))};
}

inline RopeTable rope_table(const Tensor& x) {
  const int64_t last = x.dim() - 1;
  const bool batched = x.dim() == 3 && x.size(0) > 1;
  return {x.const_data_ptr(), batched ? x.stride(0) : 0, x.stride(last - 1), x.stride(last)};
}

// Elements of x per 16-byte access.
inline int vector_of(const Tensor& x) {
  return 16 / static_cast<int>(x.element_size());
}

// The stride of a dimension of size 1 is not used and may have any value.
inline bool is_aligned(const void* data, const RopeStrides& strides, const Tensor& x, int64_t n) {
  return is_aligned16(data) && (x.size(0) == 1 || strides.batch % n == 0) &&
         (x.size(1) == 1 || strides.head % n == 0) && (x.size(2) == 1 || strides.token % n == 0) &&
         (x.size(3) == 1 || strides.entry == 1);
}
inline bool is_aligned(const RopeTensor& x, const Tensor& like, int64_t n) {
  return x.heads == 0 ||
         (is_aligned(x.in, x.in_strides, like, n) && is_aligned(x.out, x.out_strides, like, n));
}

inline bool can_vectorise_heads(const Tensor& q, int rotary) {
  return rotary % (2 * vector_of(q)) == 0 && q.size(3) % vector_of(q) == 0;
}

// True if the kernels can read cos and sin in vectors. They read float32, or aligned vectors of the dtype of
// q: other tables are converted to float32.
inline bool prepare_tables(const Tensor& q, bool vectorised, Tensor& cos, Tensor& sin) {
  const auto aligned = [](const Tensor& like) {
    const RopeTable x = rope_table(like);
    const int64_t n = vector_of(like);
    return is_aligned16(x.data) && x.batch % n == 0 && x.token % n == 0 &&
           (like.size(-1) == 1 || x.entry == 1);
  };
  if (cos.scalar_type() != ScalarType::Float &&
      !(vectorised && cos.scalar_type() == q.scalar_type() && aligned(cos) && aligned(sin))) {
    cos = torch::stable::to(cos, ScalarType::Float);
    sin = torch::stable::to(sin, ScalarType::Float);
  }
  return vectorised && aligned(cos) && aligned(sin);
}

}  // namespace liger
