#include "kernels/softmax.cuh"

#include <torch/csrc/stable/library.h>

#include "common/dispatch.h"
#include "elementwise.h"

namespace liger {
namespace {

// x is y in the backward.
Tensor run(const char* op, const char* name, const Tensor& x, const std::optional<Tensor>& grad_y) {
  check_rowwise(op, name, x, grad_y);
  require_cuda_dtype(op, name, x);
  const DeviceGuard guard(x.get_device_index());
  Tensor out = torch::stable::empty_like(x);
  if (x.numel() == 0) return out;
  const RowInput x_rows = row_input(x, true);
  std::optional<RowInput> grad_rows;
  if (grad_y) grad_rows = row_input(*grad_y, true);
  RowOutput out_rows = row_output(out, true);
  Softmax p{};
  p.x = part(x_rows), p.out = part(out_rows);
  if (grad_rows) p.grad_y = part(*grad_rows);
  p.extent = rows_and_columns(x, x.size(-1));
  const bool vectorised = use_vectors(p.extent, x.element_size(), {p.x, p.grad_y, as_input(p.out)});
  dispatch_dtype(x.scalar_type(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    vectorised ? launch_softmax<T, kVec<T>>(p, current_stream(x))
               : launch_softmax<T, 1>(p, current_stream(x));
  });
  check_launch(op);
  out_rows.finish();
  return out;
}

Tensor softmax(const Tensor& x) {
  return run("softmax", "x", x, std::nullopt);
}

Tensor softmax_backward(const Tensor& grad_y, const Tensor& y) {
  return run("softmax_backward", "y", y, grad_y);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(liger, CUDA, m) {
  m.impl("softmax", TORCH_BOX(&softmax));
  m.impl("softmax_backward", TORCH_BOX(&softmax_backward));
}

}  // namespace liger
