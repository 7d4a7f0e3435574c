// SPDX-License-Identifier: BSD-3-Clause

// Host code shared by the norms.
#pragma once

#include <limits>
#include <optional>
#include <vector>

#include "device/vec.cuh"
#include "host/checks/parts.h"
#include "host/torch.h"
#include "norm/parameter_grads.cuh"

namespace liger {

inline int64_t row_count(const Tensor& x) {
  return x.size(-1) == 0 ? 0 : x.numel() / x.size(-1);
}

// The shape of rstd. Rows of an empty last dimension have an rstd as well.
inline std::vector<int64_t> leading_shape(const Tensor& x) {
  std::vector<int64_t> shape;
  for (int64_t d = 0; d + 1 < x.dim(); ++d) shape.push_back(x.size(d));
  return shape;
}

// True if 16-byte accesses are possible: a row is a multiple of a vector, and every row and parameter is
// aligned.
class Vectorised {
 public:
  Vectorised(int64_t hidden, size_t element_size)
      : elements_(16 / element_size), possible_(hidden % elements_ == 0) {}
  Vectorised& rows(const void* data, const Rows& rows) {
    possible_ = possible_ && is_aligned16(data) && rows.multiple_of(elements_);
    return *this;
  }
  Vectorised& vector(const void* data) {
    possible_ = possible_ && is_aligned16(data);
    return *this;
  }
  explicit operator bool() const { return possible_; }

 private:
  int64_t elements_;
  bool possible_;
};

// A weight or bias, or a contiguous copy if its stride is not 1.
inline std::optional<Tensor> dense_parameter(const std::optional<Tensor>& parameter) {
  if (!parameter || parameter->size(0) <= 1 || parameter->stride(0) == 1) return parameter;
  return as_contiguous(*parameter);
}

// True for float32 parameters. The checks require one dtype for both.
inline bool float_parameters(const std::optional<Tensor>& weight, const std::optional<Tensor>& bias) {
  const std::optional<Tensor>& either = weight ? weight : bias;
  return either && either->scalar_type() == ScalarType::Float;
}

// A gradient of a parameter: zero if x is empty, else uninitialised; the placeholder if it is not needed.
inline Tensor parameter_grad(const std::optional<Tensor>& parameter, bool needed, const Tensor& x) {
  const ScalarType dtype = parameter ? parameter->scalar_type() : x.scalar_type();
  if (!needed) return no_tensor(dtype, x);
  Tensor grad = empty({parameter->size(0)}, dtype, x);
  if (x.numel() == 0) torch::stable::zero_(grad);
  return grad;
}

// Used for an empty x: the mean and the rstd of an empty row are NaN.
inline void fill_empty_row_statistic(const Tensor& statistic) {
  if (statistic.numel() > 0) torch::stable::fill_(statistic, std::numeric_limits<double>::quiet_NaN());
}

// The gradients that are needed: those that have elements.
template <typename... Grads>
ParameterGrads<sizeof...(Grads)> parameter_grads(const Grads&... grads) {
  return {{(grads.numel() > 0 ? grads.mutable_data_ptr() : nullptr)...},
          0,
          ((grads.scalar_type() == ScalarType::Float) || ...)};
}

// Runs launch(), a norm's backward of x with the parameters p, and adds the partial sums of p.grads, the
// gradients of parameters of `length` elements.
template <typename T, typename Params, typename Launch>
void launch_norm_backward(const char* op, Params& p, int64_t length, int partials, const Tensor& x,
                          const Launch& launch) {
  std::optional<Tensor> partial;
  launch_with_sums<T>(
      p.grads, length, partials, device_attributes(x.get_device_index()).code.architecture >= 90,
      current_stream(x),
      [&](const auto& sums) {
        p.grads = sums;
        launch();
        check_launch(op);
      },
      [&](int64_t floats) {
        partial = empty({floats}, ScalarType::Float, x);
        return static_cast<float*>(partial->mutable_data_ptr());
      });
  check_launch(op);
}

}  // namespace liger
