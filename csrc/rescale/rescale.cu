// SPDX-License-Identifier: BSD-3-Clause
#include "rescale/rescale.cuh"

#include <torch/csrc/stable/library.h>

#include "host/launch/dispatch.h"
#include "host/torch.h"

namespace liger {
namespace {

FactorType factor_type(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Half:
      return FactorType::kHalf;
    case ScalarType::BFloat16:
      return FactorType::kBFloat16;
    case ScalarType::Float:
      return FactorType::kFloat;
    default:
      return FactorType::kDouble;
  }
}

void check(const char* op, const Tensor& x, const Tensor& factor) {
  require_cuda_dtype(op, "x", x);
  require(factor.numel() == 1, op, ": factor has shape ", shape_text(factor), ", expected one element");
  require(is_real_floating(factor.scalar_type()), op, ": factor has dtype ", dtype_name(factor.scalar_type()),
          ", expected float16, bfloat16, float32 or float64");
  require(same_device(factor, x), op, ": factor is on ", device_text(factor), ", expected the device of x, ",
          device_text(x));
}

// in and out are dense and have the same strides.
void scale(const char* op, const Tensor& in, const Tensor& out, const Tensor& factor) {
  const int64_t elements = in.numel();
  Rescale p{in.const_data_ptr(), out.mutable_data_ptr(), factor.const_data_ptr(),
            factor_type(factor.scalar_type()), 0};
  dispatch_dtype(in.scalar_type(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    const int sm_count = device_attributes(in.get_device_index()).sm_count;
    if (elements % kVec<T> == 0 && is_aligned16(p.in) && is_aligned16(p.out)) {
      p.count = elements / kVec<T>;
      launch_rescale<T, kVec<T>>(p, sm_count, current_stream(in));
    } else {
      p.count = elements;
      launch_rescale<T, 1>(p, sm_count, current_stream(in));
    }
  });
  check_launch(op);
}

Tensor rescale(const Tensor& x, const Tensor& factor) {
  check("rescale", x, factor);
  const OpGuard guard("rescale", x.get_device_index());
  Tensor out = new_like(x);
  if (x.numel() == 0) return out;
  if (is_dense(x)) {
    scale("rescale", x, out, factor);
  } else {
    const Tensor source = as_contiguous(x);
    scale("rescale", source, source, factor);
    torch::stable::copy_(out, source);
  }
  return out;
}

void rescale_(Tensor x, const Tensor& factor) {
  check("rescale_", x, factor);
  check_written("rescale_", {{"x", x}}, {{"factor", factor}});
  if (x.numel() == 0) return;
  const OpGuard guard("rescale_", x.get_device_index());
  if (is_dense(x)) {
    scale("rescale_", x, x, factor);
  } else {
    const Tensor source = as_contiguous(x);
    scale("rescale_", source, source, factor);
    torch::stable::copy_(x, source);
  }
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(liger, CUDA, m) {
  m.impl("rescale", TORCH_BOX(&rescale));
  m.impl("rescale_", TORCH_BOX(&rescale_));
}

}  // namespace liger
