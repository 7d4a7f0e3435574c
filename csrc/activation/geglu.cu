// SPDX-License-Identifier: BSD-3-Clause
#include <torch/csrc/stable/library.h>

#include "activation/gated.h"

namespace liger {
namespace {

GatedOp gated_op(const char* name, const std::string& approximate) {
  check_arguments(name, {{"approximate", approximate}});
  return {name, approximate == "tanh" ? &launch_gated<GeluTanh> : &launch_gated<Gelu>};
}

Tensor geglu(const Tensor& gate, const Tensor& up, std::string approximate) {
  return gated(gated_op("geglu", approximate), gate, up);
}

std::tuple<Tensor, Tensor, Tensor> geglu_backward(const Tensor& grad_out, const Tensor& gate,
                                                  const Tensor& up, bool emit_product,
                                                  std::string approximate) {
  return gated_backward(gated_op("geglu_backward", approximate), grad_out, gate, up, emit_product);
}

void geglu_backward_(const Tensor& grad_out, Tensor gate, Tensor up, std::string approximate) {
  gated_backward_(gated_op("geglu_backward_", approximate), grad_out, gate, up);
}

void geglu_backward_product_(Tensor grad_out, Tensor gate, Tensor up, std::string approximate) {
  gated_backward_product_(gated_op("geglu_backward_product_", approximate), grad_out, gate, up);
}

Tensor geglu_packed(const Tensor& gate_up, std::string approximate) {
  return gated_packed(gated_op("geglu_packed", approximate), gate_up);
}

std::tuple<Tensor, Tensor> geglu_packed_backward(const Tensor& grad_out, const Tensor& gate_up,
                                                 bool emit_product, std::string approximate) {
  return gated_packed_backward(gated_op("geglu_packed_backward", approximate), grad_out, gate_up,
                               emit_product);
}

void geglu_packed_backward_(const Tensor& grad_out, Tensor gate_up, std::string approximate) {
  gated_packed_backward_(gated_op("geglu_packed_backward_", approximate), grad_out, gate_up);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(liger, CUDA, m) {
  m.impl("geglu", TORCH_BOX(&geglu));
  m.impl("geglu_backward", TORCH_BOX(&geglu_backward));
  m.impl("geglu_backward_", TORCH_BOX(&geglu_backward_));
  m.impl("geglu_backward_product_", TORCH_BOX(&geglu_backward_product_));
  m.impl("geglu_packed", TORCH_BOX(&geglu_packed));
  m.impl("geglu_packed_backward", TORCH_BOX(&geglu_packed_backward));
  m.impl("geglu_packed_backward_", TORCH_BOX(&geglu_packed_backward_));
}

}  // namespace liger
