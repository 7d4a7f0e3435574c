// SPDX-License-Identifier: BSD-3-Clause

// GEMMs through PyTorch's own cuBLAS handle: its stream, its workspace, its TF32 setting.
#pragma once

#include "host/torch.h"

namespace liger {

// A row-major matrix in memory, or the transpose of one.
struct Matrix {
  void* data;
  ScalarType dtype;
  int64_t stride;  // elements from one row in memory to the next
  bool transposed = false;
};

// For one op on the current device and stream. cuBLAS must not reduce partial sums in 16 bits.
class Gemm {
 public:
  Gemm(const char* op, cudaStream_t stream);
  ~Gemm();
  Gemm(const Gemm&) = delete;
  Gemm& operator=(const Gemm&) = delete;

  // c (m, n) = a (m, k) @ b (k, n) + beta * c, summed in float32. a and b have one dtype, c has it too or
  // float32. c is not transposed. With beta = 0 the old content of c is not read.
  void operator()(int64_t m, int64_t n, int64_t k, const Matrix& a, const Matrix& b, float beta,
                  const Matrix& c) const;

 private:
  const char* op_;
  cudaStream_t stream_;
  void* handle_;
  int math_mode_;
};

// The tensor itself if its last dimension is dense, else a contiguous copy.
Tensor as_matrix(const Tensor& tensor);
// A view of a tensor that as_matrix() returned, or of a contiguous one.
Matrix matrix(const Tensor& tensor, bool transposed = false);

}  // namespace liger
