// SPDX-License-Identifier: BSD-3-Clause
#include "activation/gated.h"

namespace liger {
namespace {

void check(const char* op, const Tensor& gate, const std::optional<Tensor>& up,
           const std::optional<Tensor>& grad_out) {
  const char* first = up ? "gate" : "gate_up";
  check_arguments(op, {{first, gate}, {"up", up}, {"grad_out", grad_out}});
  require_cuda_dtype(op, first, gate);
}

Tensor product_like(const Tensor& gate_up) {
  std::vector<int64_t> shape(gate_up.sizes().begin(), gate_up.sizes().end());
  shape.back() /= 2;
  return empty(std::move(shape), gate_up.scalar_type(), gate_up);
}

// The columns of p.extent are elements.
void launch(const GatedOp& op, Gated p, const Tensor& like) {
  const bool vectorised =
      lay_out(p.extent, like.element_size(),
              {p.gate, p.up, p.grad_out, as_input(p.product), as_input(p.grad_gate), as_input(p.grad_up)});
  op.launch(p, like.scalar_type(), vectorised, current_stream(like));
  check_launch(op.name);
}

// Parameters with the extent of a non-empty tensor with `columns` elements per row.
Gated gated_rows(const Tensor& tensor, int64_t columns) {
  Gated p{};
  p.extent = rows_and_columns(tensor, columns);
  return p;
}

}  // namespace

Tensor gated(GatedOp op, const Tensor& gate, const Tensor& up) {
  check(op.name, gate, up, std::nullopt);
  const OpGuard guard(op.name, gate.get_device_index());
  Tensor product = new_like(gate);
  if (gate.numel() == 0) return product;
  if (one_long_row(gate, up)) {
    Gated p{};
    p.extent = {1, gate.numel()};
    p.gate = {gate.const_data_ptr(), 0}, p.up = {up.const_data_ptr(), 0};
    p.product = {product.mutable_data_ptr(), 0};
    launch(op, p, gate);
    return product;
  }
  const RowInput gate_rows = row_input(gate, true), up_rows = row_input(up, true);
  RowOutput out = row_output(product, true);
  Gated p = gated_rows(gate, gate.size(-1));
  p.gate = part(gate_rows), p.up = part(up_rows);
  p.product = part(out);
  launch(op, p, gate);
  out.finish();
  return product;
}

namespace {

// Writes grad_gate, grad_up and, if present, product.
void backward(const GatedOp& op, const Tensor& grad_out, const Tensor& gate, const Tensor& up,
              const Tensor& grad_gate, const Tensor& grad_up, const std::optional<Tensor>& product) {
  if (gate.numel() == 0) return;
  if (one_long_row(gate, up) && same_strides(gate, grad_out)) {
    Gated p{};
    p.extent = {1, gate.numel()};
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
  Gated p = gated_rows(gate, gate.size(-1));
  p.grad_out = part(grad_rows), p.gate = part(gate_rows), p.up = part(up_rows);
  p.grad_gate = part(grad_gate_rows), p.grad_up = part(grad_up_rows);
  if (product_rows) p.product = part(*product_rows);
  launch(op, p, gate);
  grad_gate_rows.finish();
  grad_up_rows.finish();
  if (product_rows) product_rows->finish();
}

}  // namespace

std::tuple<Tensor, Tensor, Tensor> gated_backward(GatedOp op, const Tensor& grad_out, const Tensor& gate,
                                                  const Tensor& up, bool emit_product) {
  check(op.name, gate, up, grad_out);
  const OpGuard guard(op.name, gate.get_device_index());
  Tensor grad_gate = new_like(gate), grad_up = new_like(up);
  std::optional<Tensor> product;
  if (emit_product) product = new_like(gate);
  backward(op, grad_out, gate, up, grad_gate, grad_up, product);
  return {grad_gate, grad_up, product ? *product : no_tensor(gate.scalar_type(), gate)};
}

void gated_backward_(GatedOp op, const Tensor& grad_out, const Tensor& gate, const Tensor& up) {
  check(op.name, gate, up, grad_out);
  check_written(op.name, {{"gate", gate}, {"up", up}}, {{"grad_out", grad_out}});
  const OpGuard guard(op.name, gate.get_device_index());
  backward(op, grad_out, gate, up, gate, up, std::nullopt);
}

void gated_backward_product_(GatedOp op, const Tensor& grad_out, const Tensor& gate, const Tensor& up) {
  check(op.name, gate, up, grad_out);
  check_written(op.name, {{"grad_out", grad_out}, {"gate", gate}, {"up", up}}, {});
  const OpGuard guard(op.name, gate.get_device_index());
  backward(op, grad_out, gate, up, gate, up, grad_out);
}

Tensor gated_packed(GatedOp op, const Tensor& gate_up) {
  check(op.name, gate_up, std::nullopt, std::nullopt);
  const OpGuard guard(op.name, gate_up.get_device_index());
  Tensor product = product_like(gate_up);
  if (product.numel() == 0) return product;
  const RowInput rows = row_input(gate_up, true);
  RowOutput out = row_output(product, true);
  Gated p = gated_rows(gate_up, gate_up.size(-1) / 2);
  p.gate = part(rows), p.up = part(rows, p.extent.columns);
  p.product = part(out);
  launch(op, p, gate_up);
  return product;
}

namespace {

void packed_backward(const GatedOp& op, const Tensor& grad_out, const Tensor& gate_up,
                     const Tensor& grad_gate_up, const std::optional<Tensor>& product) {
  if (gate_up.numel() == 0) return;
  const RowInput grad_rows = row_input(grad_out, true), rows = row_input(gate_up, true);
  RowOutput out = row_output(grad_gate_up, true);
  Gated p = gated_rows(gate_up, gate_up.size(-1) / 2);
  p.grad_out = part(grad_rows), p.gate = part(rows), p.up = part(rows, p.extent.columns);
  p.grad_gate = part(out), p.grad_up = part(out, p.extent.columns);
  if (product) p.product = part(row_output(*product, true));
  launch(op, p, gate_up);
  out.finish();
}

}  // namespace

std::tuple<Tensor, Tensor> gated_packed_backward(GatedOp op, const Tensor& grad_out, const Tensor& gate_up,
                                                 bool emit_product) {
  check(op.name, gate_up, std::nullopt, grad_out);
  const OpGuard guard(op.name, gate_up.get_device_index());
  Tensor grad_gate_up = new_like(gate_up);
  std::optional<Tensor> product;
  if (emit_product) product = product_like(gate_up);
  packed_backward(op, grad_out, gate_up, grad_gate_up, product);
  return {grad_gate_up, product ? *product : no_tensor(gate_up.scalar_type(), gate_up)};
}

void gated_packed_backward_(GatedOp op, const Tensor& grad_out, const Tensor& gate_up) {
  check(op.name, gate_up, std::nullopt, grad_out);
  check_written(op.name, {{"gate_up", gate_up}}, {{"grad_out", grad_out}});
  const OpGuard guard(op.name, gate_up.get_device_index());
  packed_backward(op, grad_out, gate_up, gate_up, std::nullopt);
}

}  // namespace liger
