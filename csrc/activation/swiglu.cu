// SPDX-License-Identifier: BSD-3-Clause
#include <torch/csrc/stable/library.h>

#include "activation/gated.h"

namespace liger {
namespace {

GatedOp gated_op(const char* name) {
  return {name, &launch_gated<Silu>};
}

Tensor swiglu(const Tensor& gate, const Tensor& up) {
  return gated(gated_op("swiglu"), gate, up);
}

std::tuple<Tensor, Tensor, Tensor> swiglu_backward(const Tensor& grad_out, const Tensor& gate,
                                                   const Tensor& up, bool emit_product) {
  return gated_backward(gated_op("swiglu_backward"), grad_out, gate, up, emit_product);
}

void swiglu_backward_(const Tensor& grad_out, Tensor gate, Tensor up) {
  gated_backward_(gated_op("swiglu_backward_"), grad_out, gate, up);
}

void swiglu_backward_product_(Tensor grad_out, Tensor gate, Tensor up) {
  gated_backward_product_(gated_op("swiglu_backward_product_"), grad_out, gate, up);
}

Tensor swiglu_packed(const Tensor& gate_up) {
  return gated_packed(gated_op("swiglu_packed"), gate_up);
}

std::tuple<Tensor, Tensor> swiglu_packed_backward(const Tensor& grad_out, const Tensor& gate_up,
                                                  bool emit_product) {
  return gated_packed_backward(gated_op("swiglu_packed_backward"), grad_out, gate_up, emit_product);
}

void swiglu_packed_backward_(const Tensor& grad_out, Tensor gate_up) {
  gated_packed_backward_(gated_op("swiglu_packed_backward_"), grad_out, gate_up);
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
