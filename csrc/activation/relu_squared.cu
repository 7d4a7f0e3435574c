// SPDX-License-Identifier: BSD-3-Clause
#include "activation/relu_squared.cuh"

#include <torch/csrc/stable/library.h>

#include "host/launch/dispatch.h"
#include "host/launch/elementwise.h"

namespace liger {
namespace {

void launch(const char* op, ReluSquared p, const Tensor& x) {
  const bool vectorised = lay_out(p.extent, x.element_size(), {p.x, p.grad_y, as_input(p.out)});
  dispatch_dtype(x.scalar_type(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    vectorised ? launch_relu_squared<T, kVec<T>>(p, current_stream(x))
               : launch_relu_squared<T, 1>(p, current_stream(x));
  });
  check_launch(op);
}

// Runs the forward without grad_y, the backward with it.
Tensor run(const char* op, const Tensor& x, const std::optional<Tensor>& grad_y) {
  check_arguments(op, {{"x", x}, {"grad_y", grad_y}});
  require_cuda_dtype(op, "x", x);
  const OpGuard guard(op, x.get_device_index());
  Tensor out = new_like(x);
  if (x.numel() == 0) return out;
  ReluSquared p{};
  if (one_long_row(x, grad_y ? *grad_y : x)) {
    p.x = {x.const_data_ptr(), 0}, p.grad_y = {data(grad_y), 0}, p.out = {out.mutable_data_ptr(), 0};
    p.extent = {1, x.numel()};
    launch(op, p, x);
    return out;
  }
  const RowInput x_rows = row_input(x, true);
  std::optional<RowInput> grad_rows;
  if (grad_y) grad_rows = row_input(*grad_y, true);
  RowOutput out_rows = row_output(out, true);
  p.x = part(x_rows), p.out = part(out_rows);
  if (grad_rows) p.grad_y = part(*grad_rows);
  p.extent = rows_and_columns(x, x.size(-1));
  launch(op, p, x);
  out_rows.finish();
  return out;
}

Tensor relu_squared(const Tensor& x) {
  return run("relu_squared", x, std::nullopt);
}

Tensor relu_squared_backward(const Tensor& grad_y, const Tensor& x) {
  return run("relu_squared_backward", x, grad_y);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(liger, CUDA, m) {
  m.impl("relu_squared", TORCH_BOX(&relu_squared));
  m.impl("relu_squared_backward", TORCH_BOX(&relu_squared_backward));
}

}  // namespace liger
