// Matrix products through PyTorch's own cuBLAS handle: its stream, its workspace, its TF32 setting.
#pragma once

#include "host/torch.h"

namespace liger {

// A row-major matrix in memory, or with transposed the transpose of one.
struct Matrix {
  void* data;
  ScalarType dtype;
  int64_t stride;  // elements from one row in memory to the next
  bool transposed = false;
};

// Valid for the current device and stream, for the time of one op. No sum inside a product is kept in 16
// bits.
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

// The tensor as the rows of a matrix: itself where its last dimension is dense, else a contiguous copy.
Tensor as_matrix(const Tensor& tensor);
// View of what as_matrix() returned, or of a contiguous result.
Matrix matrix(const Tensor& tensor, bool transposed = false);

}  // namespace liger
