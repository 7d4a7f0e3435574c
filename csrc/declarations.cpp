// SPDX-License-Identifier: BSD-3-Clause
#include "declarations.h"

namespace liger {

// clang-format off: a schema is one line, whatever its length.
std::span<const Declaration> declarations() {
  static const std::vector<Declaration> all = {
    {{"rms_norm(Tensor x, Tensor? weight, float eps=1e-6, float offset=0.0, str casting_mode=\"llama\") -> (Tensor y, Tensor rstd)",
      "rms_norm_backward(Tensor grad_y, Tensor x, Tensor? weight, Tensor rstd, float offset, str casting_mode, bool need_grad_x, bool need_grad_weight) -> (Tensor grad_x, Tensor grad_weight)"},
     "x: ... H; weight: H or f32; y: like x; rstd: ... f32; eps >= 0; offset finite; casting_mode in llama gemma none"},

    // new_residual = x + residual; y = rms_norm(new_residual)
    {{"fused_add_rms_norm(Tensor x, Tensor residual, Tensor? weight, float eps=1e-6, float offset=0.0, str casting_mode=\"llama\") -> (Tensor y, Tensor new_residual, Tensor rstd)",
      "fused_add_rms_norm_backward(Tensor grad_y, Tensor? grad_new_residual, Tensor new_residual, Tensor? weight, Tensor rstd, float offset, str casting_mode, bool need_grad_x, bool need_grad_weight) -> (Tensor grad_x, Tensor grad_weight)"},
     "x: ... H; residual: like x; weight: H or f32; y, new_residual: like x; rstd: ... f32; eps >= 0; offset finite; casting_mode in llama gemma none"},

    // y = rms_norm(x) * activation(gate), or with norm_before_gate = False y = rms_norm(x *
    // activation(gate)). Each group_size elements of the last dimension are normalised alone
    {{"rms_norm_gated(Tensor x, Tensor gate, Tensor? weight, float eps=1e-6, float offset=0.0, str casting_mode=\"llama\", int? group_size=None, bool norm_before_gate=True, str activation=\"silu\") -> (Tensor y, Tensor rstd)",
      "rms_norm_gated_backward(Tensor grad_y, Tensor x, Tensor gate, Tensor? weight, Tensor rstd, float offset, str casting_mode, int? group_size, bool norm_before_gate, str activation, bool need_grad_x, bool need_grad_gate, bool need_grad_weight) -> (Tensor grad_x, Tensor grad_gate, Tensor grad_weight)"},
     "x: ... H; gate: like x; weight: H or f32; y: like x; rstd: ... H/group_size f32; eps >= 0; offset finite; casting_mode in llama gemma none; group_size divides H; activation in silu sigmoid"},

    {{"layer_norm(Tensor x, Tensor? weight=None, Tensor? bias=None, float eps=1e-5) -> (Tensor y, Tensor mean, Tensor rstd)",
      "layer_norm_backward(Tensor grad_y, Tensor x, Tensor? weight, Tensor? bias, Tensor mean, Tensor rstd, bool need_grad_x, bool need_grad_weight, bool need_grad_bias) -> (Tensor grad_x, Tensor grad_weight, Tensor grad_bias)"},
     "x: ... H; weight, bias: H or f32; y: like x; mean, rstd: ... f32; eps >= 0"},

    {{"group_norm(Tensor x, int num_groups, Tensor? weight=None, Tensor? bias=None, float eps=1e-5) -> (Tensor y, Tensor mean, Tensor rstd)",
      "group_norm_backward(Tensor grad_y, Tensor x, int num_groups, Tensor? weight, Tensor? bias, Tensor mean, Tensor rstd, bool need_grad_x, bool need_grad_weight, bool need_grad_bias) -> (Tensor grad_x, Tensor grad_weight, Tensor grad_bias)"},
     "x: batch channels ...; num_groups divides channels; weight, bias: channels or f32; y: like x; mean, rstd: batch num_groups f32; eps >= 0"},

    // silu(gate) * up. With backward_product_ the product overwrites grad_out
    {{"swiglu(Tensor gate, Tensor up) -> Tensor",
      "swiglu_backward(Tensor grad_out, Tensor gate, Tensor up, bool emit_product=False) -> (Tensor grad_gate, Tensor grad_up, Tensor product)",
      "swiglu_backward_(Tensor grad_out, Tensor(a!) gate, Tensor(b!) up) -> ()",
      "swiglu_backward_product_(Tensor(a!) grad_out, Tensor(b!) gate, Tensor(c!) up) -> ()"},
     "gate: ...; up, out, product: like gate"},

    // gate first
    {{"swiglu_packed(Tensor gate_up) -> Tensor",
      "swiglu_packed_backward(Tensor grad_out, Tensor gate_up, bool emit_product=False) -> (Tensor grad_gate_up, Tensor product)",
      "swiglu_packed_backward_(Tensor grad_out, Tensor(a!) gate_up) -> ()"},
     "gate_up: ... 2I; out, product: ... I"},

    // gelu(gate) * up; approximate is "none" (exact) or "tanh"
    {{"geglu(Tensor gate, Tensor up, str approximate=\"none\") -> Tensor",
      "geglu_backward(Tensor grad_out, Tensor gate, Tensor up, bool emit_product=False, str approximate=\"none\") -> (Tensor grad_gate, Tensor grad_up, Tensor product)",
      "geglu_backward_(Tensor grad_out, Tensor(a!) gate, Tensor(b!) up, str approximate=\"none\") -> ()",
      "geglu_backward_product_(Tensor(a!) grad_out, Tensor(b!) gate, Tensor(c!) up, str approximate=\"none\") -> ()"},
     "gate: ...; up, out, product: like gate; approximate in none tanh"},

    {{"geglu_packed(Tensor gate_up, str approximate=\"none\") -> Tensor",
      "geglu_packed_backward(Tensor grad_out, Tensor gate_up, bool emit_product=False, str approximate=\"none\") -> (Tensor grad_gate_up, Tensor product)",
      "geglu_packed_backward_(Tensor grad_out, Tensor(a!) gate_up, str approximate=\"none\") -> ()"},
     "gate_up: ... 2I; out, product: ... I; approximate in none tanh"},

    // relu(x)^2, elementwise
    {{"relu_squared(Tensor x) -> Tensor",
      "relu_squared_backward(Tensor grad_y, Tensor x) -> Tensor"},
     "x: ...; y: like x"},

    // Over the last dimension
    {{"softmax(Tensor x) -> Tensor",
      "softmax_backward(Tensor grad_y, Tensor y) -> Tensor"},
     "x: ... H; y: like x"},
  };
  return all;
}
// clang-format on

}  // namespace liger
