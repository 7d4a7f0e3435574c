#include "kernels/swiglu.cuh"

#include <torch/csrc/stable/library.h>

#include <tuple>

#include "common/dispatch.h"
#include "common/torch.h"

namespace liger {
namespace {

void check(const char* op, const Tensor& gate, const std::optional<Tensor>& up,
           const std::optional<Tensor>& grad_out) {
  check_swiglu(op, gate, up, grad_out);
  const int64_t columns = up ? gate.size(-1) : gate.size(-1) / 2;
  if (grad_out) {
    bool same = grad_out->dim() == gate.dim() && grad_out->size(-1) == columns;
    for (int64_t d = 0; same && d + 1 < gate.dim(); ++d) same = grad_out->size(d) == gate.size(d);
    require(same, op, ": grad_out has shape ", shape_text(*grad_out), ", expected that of the product for ",
            up ? "gate" : "gate_up", " of shape ", shape_text(gate));
  }
  require_cuda_dtype(op, up ? "gate" : "gate_up", gate);
}

Tensor product_like(const Tensor& gate_up) {
  std::vector<int64_t> shape(gate_up.sizes().begin(), gate_up.sizes().end());
  shape.back() /= 2;
  return empty(std::move(shape), gate_up.scalar_type(), gate_up);
}

SwigluInput part(const RowInput& rows, int64_t column = 0) {
  return {static_cast<const char*>(rows.data()) + column * rows.tensor.element_size(), rows.rows.stride};
}
SwigluOutput part(const RowOutput& rows, int64_t column = 0) {
  return {static_cast<char*>(rows.data()) + column * rows.written.element_size(), rows.rows.stride};
}

// p.columns in elements; absent operands have null data.
void launch(const char* op, Swiglu p, const Tensor& like) {
  const size_t bytes = like.element_size();
  const int64_t vector = 16 / bytes;
  bool one_row = true, vectorised = true;
  const auto look_at = [&](const void* data, int64_t stride) {
    if (data == nullptr) return;
    one_row = one_row && (p.rows == 1 || stride == p.columns);
    vectorised = vectorised && is_aligned16(data) && (p.rows == 1 || stride % vector == 0);
  };
  for (const SwigluInput& x : {p.gate, p.up, p.grad_out}) look_at(x.data, x.stride);
  for (const SwigluOutput& x : {p.product, p.grad_gate, p.grad_up}) look_at(x.data, x.stride);
  if (one_row) {
    p.columns *= p.rows;
    p.rows = 1;
  }
  vectorised = vectorised && p.columns % vector == 0;
  if (vectorised) p.columns /= vector;
  dispatch_dtype(like.scalar_type(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    vectorised ? launch_swiglu<T, kVec<T>>(p, current_stream(like))
               : launch_swiglu<T, 1>(p, current_stream(like));
  });
  check_launch(op);
}

// Rows and columns of a tensor (..., columns) with elements.
Swiglu shape_of(const Tensor& tensor, int64_t columns) {
  Swiglu p{};
  p.columns = columns;
  p.rows = tensor.numel() / tensor.size(-1);
  return p;
}

bool one_long_row(const Tensor& gate, const Tensor& other) {
  return is_dense(gate) && same_strides(gate, other);
}

Tensor swiglu(const Tensor& gate, const Tensor& up) {
  check("swiglu", gate, up, std::nullopt);
  const DeviceGuard guard(gate.get_device_index());
  Tensor product = torch::stable::empty_like(gate);
  if (gate.numel() == 0) return product;
  if (one_long_row(gate, up)) {
    Swiglu p{};
    p.rows = 1, p.columns = gate.numel();
    p.gate = {gate.const_data_ptr(), 0}, p.up = {up.const_data_ptr(), 0};
    p.product = {product.mutable_data_ptr(), 0};
    launch("swiglu", p, gate);
    return product;
  }
  const RowInput gate_rows = row_input(gate, true), up_rows = row_input(up, true);
  RowOutput out = row_output(product, true);
  Swiglu p = shape_of(gate, gate.size(-1));
  p.gate = part(gate_rows), p.up = part(up_rows);
  p.product = part(out);
  launch("swiglu", p, gate);
  out.finish();
  return product;
}

// Writes grad_gate, grad_up and, unless it is absent, product.
void backward(const char* op, const Tensor& grad_out, const Tensor& gate, const Tensor& up,
              const Tensor& grad_gate, const Tensor& grad_up, const std::optional<Tensor>& product) {
  if (gate.numel() == 0) return;
  if (one_long_row(gate, up) && same_strides(gate, grad_out)) {
    Swiglu p{};
    p.rows = 1, p.columns = gate.numel();
    p.gate = {gate.const_data_ptr(), 0}, p.up = {up.const_data_ptr(), 0};
    p.grad_out = {grad_out.const_data_ptr(), 0};
    p.grad_gate = {grad_gate.mutable_data_ptr(), 0}, p.grad_up = {grad_up.mutable_data_ptr(), 0};
    p.product = {product ? product->mutable_data_ptr() : nullptr, 0};
    launch(op, p, gate);
    return;
  }
  const RowInput grad_rows = row_input(grad_out, true), gate_rows = row_input(gate, true),
                 up_rows = row_input(up, true);
  RowOutput grad_gate_rows = row_output(grad_gate, true), grad_up_rows = row_output(grad_up, true);
  std::optional<RowOutput> product_rows;
  if (product) product_rows = row_output(*product, true);
  Swiglu p = shape_of(gate, gate.size(-1));
  p.grad_out = part(grad_rows), p.gate = part(gate_rows), p.up = part(up_rows);
  p.grad_gate = part(grad_gate_rows), p.grad_up = part(grad_up_rows);
  if (product_rows) p.product = part(*product_rows);
  launch(op, p, gate);
  grad_gate_rows.finish();
  grad_up_rows.finish();
  if (product_rows) product_rows->finish();
}

std::tuple<Tensor, Tensor, Tensor> swiglu_backward(const Tensor& grad_out, const Tensor& gate,
                                                   const Tensor& up, bool emit_product) {
  check("swiglu_backward", gate, up, grad_out);
  const DeviceGuard guard(gate.get_device_index());
  Tensor grad_gate = torch::stable::empty_like(gate), grad_up = torch::stable::empty_like(up);
  std::optional<Tensor> product;
  if (emit_product) product = torch::stable::empty_like(gate);
  backward("swiglu_backward", grad_out, gate, up, grad_gate, grad_up, product);
  return {grad_gate, grad_up, product ? *product : no_tensor(gate.scalar_type(), gate)};
}

void swiglu_backward_(const Tensor& grad_out, Tensor gate, Tensor up) {
  check("swiglu_backward_", gate, up, grad_out);
  const DeviceGuard guard(gate.get_device_index());
  backward("swiglu_backward_", grad_out, gate, up, gate, up, std::nullopt);
}

void swiglu_backward_product_(Tensor grad_out, Tensor gate, Tensor up) {
  check("swiglu_backward_product_", gate, up, grad_out);
  const DeviceGuard guard(gate.get_device_index());
  backward("swiglu_backward_product_", grad_out, gate, up, gate, up, grad_out);
}

Tensor swiglu_packed(const Tensor& gate_up) {
  check("swiglu_packed", gate_up, std::nullopt, std::nullopt);
  const DeviceGuard guard(gate_up.get_device_index());
  Tensor product = product_like(gate_up);
  if (product.numel() == 0) return product;
  const RowInput rows = row_input(gate_up, true);
  RowOutput out = row_output(product, true);
  Swiglu p = shape_of(gate_up, gate_up.size(-1) / 2);
  p.gate = part(rows), p.up = part(rows, p.columns);
  p.product = part(out);
  launch("swiglu_packed", p, gate_up);
  return product;
}

void packed_backward(const char* op, const Tensor& grad_out, const Tensor& gate_up,
                     const Tensor& grad_gate_up, const std::optional<Tensor>& product) {
  if (gate_up.numel() == 0) return;
  const RowInput grad_rows = row_input(grad_out, true), rows = row_input(gate_up, true);
  RowOutput out = row_output(grad_gate_up, true);
  Swiglu p = shape_of(gate_up, gate_up.size(-1) / 2);
  p.grad_out = part(grad_rows), p.gate = part(rows), p.up = part(rows, p.columns);
  p.grad_gate = part(out), p.grad_up = part(out, p.columns);
  if (product) p.product = part(row_output(*product, true));
  launch(op, p, gate_up);
  out.finish();
}

std::tuple<Tensor, Tensor> swiglu_packed_backward(const Tensor& grad_out, const Tensor& gate_up,
                                                  bool emit_product) {
  check("swiglu_packed_backward", gate_up, std::nullopt, grad_out);
  const DeviceGuard guard(gate_up.get_device_index());
  Tensor grad_gate_up = torch::stable::empty_like(gate_up);
  std::optional<Tensor> product;
  if (emit_product) product = product_like(gate_up);
  packed_backward("swiglu_packed_backward", grad_out, gate_up, grad_gate_up, product);
  return {grad_gate_up, product ? *product : no_tensor(gate_up.scalar_type(), gate_up)};
}

void swiglu_packed_backward_(const Tensor& grad_out, Tensor gate_up) {
  check("swiglu_packed_backward_", gate_up, std::nullopt, grad_out);
  const DeviceGuard guard(gate_up.get_device_index());
  packed_backward("swiglu_packed_backward_", grad_out, gate_up, gate_up, std::nullopt);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(liger, CUDA, m) {
  m.impl("swiglu", TORCH_BOX(&swiglu));
  m.impl("swiglu_backward", TORCH_BOX(&swiglu_backward));
  m.impl("swiglu_backward_", TORCH_BOX(&swiglu_backward_));
  m.impl("swiglu_backward_product_", TORCH_BOX(&swiglu_backward_product_));
  m.impl("swiglu_packed", TORCH_BOX(&swiglu_packed));
  m.impl("swiglu_packed_backward", TORCH_BOX(&swiglu_packed_backward));
  m.impl("swiglu_packed_backward_", TORCH_BOX(&swiglu_packed_backward_));
}

}  // namespace liger
