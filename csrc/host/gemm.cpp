// SPDX-License-Identifier: BSD-3-Clause
#include "host/gemm.h"

#include <dlfcn.h>
#include <torch/csrc/stable/c/shim.h>

#include <algorithm>
#include <climits>
#include <cstdint>

#include "host/launch/capture.h"

namespace liger {
namespace {

// The declarations of cublas_v2.h in use. The cuBLAS that PyTorch has loaded is resolved at run time, so the
// build needs no headers and no link dependency, and one binary works with every major version.
using Handle = void*;
constexpr int kSuccess = 0;
constexpr int kNormal = 0, kTranspose = 1;                 // cublasOperation_t
constexpr int kCompute32F = 68;                            // cublasComputeType_t
constexpr int kDefaultAlgorithm = -1;                      // cublasGemmAlgo_t
constexpr int kFloat32 = 0, kFloat16 = 2, kBFloat16 = 14;  // cudaDataType_t
constexpr int kDisallowReducedPrecisionReduction = 16;     // cublasMath_t

struct Cublas {
  int (*gemm_ex)(Handle, int, int, int, int, int, const void*, const void*, int, int, const void*, int, int,
                 const void*, void*, int, int, int, int);
  int (*get_math_mode)(Handle, int*);
  int (*set_math_mode)(Handle, int);
};

const Cublas& cublas() {
  static const Cublas functions = [] {
    void* library = RTLD_DEFAULT;
    if (dlsym(library, "cublasGemmEx") == nullptr) {
      // The library is loaded, but not in the global scope. RTLD_NOLOAD returns the copy that PyTorch uses
      // and never loads another one.
      for (const char* name : {"libcublas.so.13", "libcublas.so.12"}) {
        library = dlopen(name, RTLD_NOW | RTLD_NOLOAD);
        if (library != nullptr) break;
      }
      require(library != nullptr,
              "liger: cuBLAS was not found in this process; expected the libcublas.so.12 or .13 that",
              " PyTorch loads");
    }
    Cublas found{};
    const auto resolve = [&](auto& function, const char* name) {
      function = reinterpret_cast<std::decay_t<decltype(function)>>(dlsym(library, name));
      require(function != nullptr, "liger: cuBLAS has no symbol ", name);
    };
    resolve(found.gemm_ex, "cublasGemmEx");
    resolve(found.get_math_mode, "cublasGetMathMode");
    resolve(found.set_math_mode, "cublasSetMathMode");
    return found;
  }();
  return functions;
}

int data_type(const char* op, ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Float:
      return kFloat32;
    case ScalarType::Half:
      return kFloat16;
    case ScalarType::BFloat16:
      return kBFloat16;
    default:
      require(false, op, ": no matrix product for ", dtype_name(dtype));
      return -1;
  }
}

}  // namespace

Gemm::Gemm(const char* op, cudaStream_t stream) : op_(op), stream_(stream), handle_(nullptr), math_mode_(0) {
  {
    // The first call of a thread creates its handle, which allocates device memory.
    const RelaxedCapture relaxed;
    TORCH_ERROR_CODE_CHECK(torch_get_current_cuda_blas_handle(&handle_));
  }
  require(cublas().get_math_mode(handle_, &math_mode_) == kSuccess, op_, ": cublasGetMathMode failed");
}

Gemm::~Gemm() {
  cublas().set_math_mode(handle_, math_mode_);
}

void Gemm::operator()(int64_t m, int64_t n, int64_t k, const Matrix& a, const Matrix& b, float beta,
                      const Matrix& c) const {
  if (m == 0 || n == 0) return;
  const int64_t largest = std::max({m, n, k, a.stride, b.stride, c.stride});
  require(largest <= INT_MAX, op_, ": a matrix dimension of ", largest,
          " is too large, expected at most 2^31 - 1");
  if (k == 0) {
    if (beta == 0.0f) {
      const size_t element = c.dtype == ScalarType::Float ? 4 : 2;
      check_cuda(cudaMemset2DAsync(c.data, c.stride * element, 0, n * element, m, stream_), op_);
    }
    return;
  }
  // Without the restriction a split-K GEMM may reduce its partial sums in the 16 bits of c. If c is float32,
  // the restriction has no benefit and excludes faster algorithms.
  const int restriction = c.dtype == ScalarType::Float ? 0 : kDisallowReducedPrecisionReduction;
  require(cublas().set_math_mode(handle_, math_mode_ | restriction) == kSuccess, op_,
          ": cublasSetMathMode failed");
  const float alpha = 1.0f;
  // cuBLAS is column-major, which transposes every matrix: the call computes c^T = b^T a^T.
  const int status = cublas().gemm_ex(
      handle_, b.transposed ? kTranspose : kNormal, a.transposed ? kTranspose : kNormal, static_cast<int>(n),
      static_cast<int>(m), static_cast<int>(k), &alpha, b.data, data_type(op_, b.dtype),
      static_cast<int>(b.stride), a.data, data_type(op_, a.dtype), static_cast<int>(a.stride), &beta, c.data,
      data_type(op_, c.dtype), static_cast<int>(c.stride), kCompute32F, kDefaultAlgorithm);
  require(status == kSuccess, op_, ": cublasGemmEx failed with status ", status, " for m=", m, " n=", n,
          " k=", k);
}

Tensor as_matrix(const Tensor& tensor) {
  const bool dense = tensor.stride(1) == 1 && tensor.stride(0) >= std::max<int64_t>(tensor.size(1), 1);
  return dense ? tensor : torch::stable::contiguous(tensor);
}

Matrix matrix(const Tensor& tensor, bool transposed) {
  return {const_cast<void*>(tensor.const_data_ptr()), tensor.scalar_type(),
          std::max({tensor.stride(0), tensor.size(1), int64_t{1}}), transposed};
}

}  // namespace liger
