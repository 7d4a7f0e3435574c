// SPDX-License-Identifier: BSD-3-Clause

// Host code of rms_norm_gated. It launches the kernels of rms_norm with a gate (norm/gate.cuh).
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <tuple>

#include "host/launch/dispatch.h"
#include "host/torch.h"
#include "norm/host.cuh"
#include "norm/rms_norm_backward.cuh"

namespace liger {
namespace {

// x has at least one element. group_size divides its last dimension.
Gate gate_options(const Tensor& x, const std::optional<Tensor>& weight, const std::string& casting_mode,
                  std::optional<int64_t> group_size, const std::string& activation) {
  Gate gate{};
  gate.groups = FastDivide(static_cast<uint32_t>(x.size(-1) / group_size.value_or(x.size(-1))));
  gate.sigmoid = activation == "sigmoid";
  gate.round_activation = casting_mode == "none";
  gate.round_product = casting_mode != "gemma" && weight && weight->scalar_type() == x.scalar_type();
  return gate;
}

std::tuple<Tensor, Tensor> rms_norm_gated(const Tensor& x, const Tensor& gate,
                                          const std::optional<Tensor>& weight, double eps, double offset,
                                          const std::string& casting_mode, std::optional<int64_t> group_size,
                                          bool norm_before_gate, const std::string& activation) {
  constexpr const char* op = "rms_norm_gated";
  check_arguments(op, {{"x", x},
                       {"gate", gate},
                       {"weight", weight},
                       {"eps", eps},
                       {"offset", offset},
                       {"casting_mode", casting_mode},
                       {"group_size", group_size},
                       {"activation", activation}});
  require_cuda_dtype(op, "x", x);
  const OpGuard guard(op, x.get_device_index());
  RowOutput y = row_output(new_like(x));
  std::vector<int64_t> shape = leading_shape(x);
  if (group_size) shape.push_back(x.size(-1) / *group_size);
  const Tensor rstd = empty(shape, ScalarType::Float, x);
  if (x.numel() == 0) {
    fill_empty_row_statistic(rstd);
    return {y.result, rstd};
  }

  const RowInput input = row_input(x), gate_input = row_input(gate);
  const std::optional<Tensor> factor = dense_parameter(weight);
  GatedRmsNorm p{};
  p.x = input.data();
  p.extra = gate_input.data();
  p.weight = data(factor);
  p.y = y.data();
  p.rstd = static_cast<float*>(rstd.mutable_data_ptr());
  p.x_rows = input.rows;
  p.extra_rows = gate_input.rows;
  p.y_rows = y.rows;
  p.rows = row_count(x);
  p.hidden = group_size.value_or(x.size(-1));
  p.eps = static_cast<float>(eps);
  p.offset = static_cast<float>(offset);
  p.float_weight = factor && factor->scalar_type() == ScalarType::Float;
  p.casting = casting_of(casting_mode);
  p.gate = gate_options(x, weight, casting_mode, group_size, activation);
  Vectorised vectorised(p.hidden, x.element_size());
  vectorised.rows(p.x, p.x_rows).rows(p.extra, p.extra_rows).rows(p.y, p.y_rows).vector(p.weight);
  dispatch_dtype(x.scalar_type(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    const auto launch =
        norm_before_gate ? launch_rms_norm<T, Extra::kGateLast> : launch_rms_norm<T, Extra::kGateFirst>;
    launch(p, bool(vectorised), current_stream(x));
  });
  check_launch(op);
  y.finish();
  return {y.result, rstd};
}

std::tuple<Tensor, Tensor, Tensor> rms_norm_gated_backward(
    const Tensor& grad_y, const Tensor& x, const Tensor& gate, const std::optional<Tensor>& weight,
    const Tensor& rstd, double offset, const std::string& casting_mode, std::optional<int64_t> group_size,
    bool norm_before_gate, const std::string& activation, bool need_grad_x, bool need_grad_gate,
    bool need_grad_weight) {
  constexpr const char* op = "rms_norm_gated_backward";
  check_arguments(op, {{"x", x},
                       {"grad_y", grad_y},
                       {"gate", gate},
                       {"weight", weight},
                       {"rstd", rstd},
                       {"offset", offset},
                       {"casting_mode", casting_mode},
                       {"group_size", group_size},
                       {"activation", activation}});
  require_cuda_dtype(op, "x", x);
  const int64_t groups = group_size ? x.size(-1) / *group_size : 1;
  need_grad_weight = need_grad_weight && weight;
  const OpGuard guard(op, x.get_device_index());
  RowOutput grad_x = row_output(need_grad_x ? new_like(x) : no_tensor(x.scalar_type(), x));
  RowOutput grad_gate = row_output(need_grad_gate ? new_like(gate) : no_tensor(x.scalar_type(), x));
  Tensor grad_weight = parameter_grad(weight, need_grad_weight, x);
  if (x.numel() == 0 || !(need_grad_x || need_grad_gate || need_grad_weight))
    return {grad_x.result, grad_gate.result, grad_weight};

  const RowInput input = row_input(x), upstream = row_input(grad_y), gate_input = row_input(gate);
  const std::optional<Tensor> factor = dense_parameter(weight);
  const Tensor row_scale = as_contiguous(rstd);
  GatedRmsNormBackward p{};
  p.grad_y = upstream.data();
  p.x = input.data();
  p.extra = gate_input.data();
  p.weight = data(factor);
  p.rstd = static_cast<const float*>(row_scale.const_data_ptr());
  p.grad_y_rows = upstream.rows;
  p.x_rows = input.rows;
  p.extra_rows = gate_input.rows;
  p.rows = row_count(x);
  p.hidden = group_size.value_or(x.size(-1));
  p.offset = static_cast<float>(offset);
  p.float_weight = factor && factor->scalar_type() == ScalarType::Float;
  p.round_scaled = casting_of(casting_mode).round_scaled;
  p.gate = gate_options(x, weight, casting_mode, group_size, activation);
  Vectorised vectorised(p.hidden, x.element_size());
  vectorised.rows(p.x, p.x_rows).rows(p.grad_y, p.grad_y_rows).rows(p.extra, p.extra_rows).vector(p.weight);
  if (need_grad_x) {
    p.grad_x = grad_x.data();
    p.grad_x_rows = grad_x.rows;
    vectorised.rows(p.grad_x, p.grad_x_rows);
  }
  if (need_grad_gate) {
    p.grad_gate = grad_gate.data();
    p.grad_gate_rows = grad_gate.rows;
    vectorised.rows(p.grad_gate, p.grad_gate_rows);
  }
  p.grads = parameter_grads(grad_weight);
  const DeviceAttributes& device = device_attributes(x.get_device_index());
  // All groups together have about one block per SM.
  const int blocks_per_group = std::max<int>(1, static_cast<int>(device.sm_count / groups));
  dispatch_dtype(x.scalar_type(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    const auto launch = norm_before_gate ? launch_rms_norm_backward<T, Extra::kGateLast>
                                         : launch_rms_norm_backward<T, Extra::kGateFirst>;
    const BackwardPlan plan = plan_norm_backward<T>(p.rows, p.hidden, bool(vectorised), 3, kMaxRowThreads,
                                                    blocks_per_group, device.shared_memory_per_block_optin);
    launch_norm_backward<T>(op, p, x.size(-1), plan.partials, x,
                            [&] { launch(p, plan, bool(vectorised), current_stream(x)); });
  });
  grad_x.finish();
  grad_gate.finish();
  return {grad_x.result, grad_gate.result, grad_weight};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(liger, CUDA, m) {
  m.impl("rms_norm_gated", TORCH_BOX(&rms_norm_gated));
  m.impl("rms_norm_gated_backward", TORCH_BOX(&rms_norm_gated_backward));
}

}  // namespace liger
