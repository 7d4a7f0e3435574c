// SPDX-License-Identifier: BSD-3-Clause
#include "norm/rms_norm.cuh"

#include <torch/csrc/stable/library.h>

#include <tuple>

#include "host/launch/dispatch.h"
#include "host/torch.h"
#include "norm/host.cuh"
#include "norm/rms_norm_backward.cuh"

namespace liger {
namespace {

struct Forward {
  Tensor y, new_residual, rstd;
};

Forward forward(const char* op, const Tensor& x, const std::optional<Tensor>& residual,
                const std::optional<Tensor>& weight, double eps, double offset,
                const std::string& casting_mode) {
  check_arguments(op, {{"x", x},
                       {"residual", residual},
                       {"weight", weight},
                       {"eps", eps},
                       {"offset", offset},
                       {"casting_mode", casting_mode}});
  require_cuda_dtype(op, "x", x);
  const OpGuard guard(op, x.get_device_index());
  RowOutput y = row_output(new_like(x));
  RowOutput sum = residual ? row_output(new_like(x)) : y;
  Forward out{y.result, sum.result, empty(leading_shape(x), ScalarType::Float, x)};
  if (x.numel() == 0) {
    fill_empty_row_statistic(out.rstd);
    return out;
  }

  const RowInput input = row_input(x);
  const std::optional<RowInput> added = residual ? std::optional(row_input(*residual)) : std::nullopt;
  const std::optional<Tensor> scale = dense_parameter(weight);
  RmsNorm p{};
  p.x = input.data();
  p.weight = data(scale);
  p.y = y.data();
  p.rstd = static_cast<float*>(out.rstd.mutable_data_ptr());
  p.x_rows = input.rows;
  p.y_rows = y.rows;
  p.rows = row_count(x);
  p.hidden = x.size(-1);
  p.eps = static_cast<float>(eps);
  p.offset = static_cast<float>(offset);
  p.float_weight = scale && scale->scalar_type() == ScalarType::Float;
  p.casting = casting_of(casting_mode);
  Vectorised vectorised(p.hidden, x.element_size());
  vectorised.rows(p.x, p.x_rows).rows(p.y, p.y_rows).vector(p.weight);
  if (added) {
    p.extra = added->data();
    p.new_residual = sum.data();
    p.extra_rows = added->rows;
    p.new_residual_rows = sum.rows;
    vectorised.rows(p.extra, p.extra_rows).rows(p.new_residual, p.new_residual_rows);
  }
  dispatch_dtype(x.scalar_type(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    const auto launch = added ? launch_rms_norm<T, Extra::kResidual> : launch_rms_norm<T, Extra::kNone>;
    launch(p, bool(vectorised), current_stream(x));
  });
  check_launch(op);
  y.finish();
  if (residual) sum.finish();
  return out;
}

std::tuple<Tensor, Tensor> backward(const char* op, const char* x_name, const Tensor& grad_y,
                                    const std::optional<Tensor>& grad_residual, const Tensor& x,
                                    const std::optional<Tensor>& weight, const Tensor& rstd, double offset,
                                    const std::string& casting_mode, bool need_grad_x,
                                    bool need_grad_weight) {
  check_arguments(op, {{x_name, x},
                       {"grad_y", grad_y},
                       {"grad_new_residual", grad_residual},
                       {"weight", weight},
                       {"rstd", rstd},
                       {"offset", offset},
                       {"casting_mode", casting_mode}});
  require_cuda_dtype(op, x_name, x);
  need_grad_weight = need_grad_weight && weight;
  const OpGuard guard(op, x.get_device_index());
  RowOutput grad_x = row_output(need_grad_x ? new_like(x) : no_tensor(x.scalar_type(), x));
  Tensor grad_weight = parameter_grad(weight, need_grad_weight, x);
  if (x.numel() == 0 || !(need_grad_x || need_grad_weight)) return {grad_x.result, grad_weight};

  const RowInput input = row_input(x), upstream = row_input(grad_y);
  const std::optional<RowInput> added =
      grad_residual && need_grad_x ? std::optional(row_input(*grad_residual)) : std::nullopt;
  const std::optional<Tensor> scale = dense_parameter(weight);
  const Tensor row_scale = as_contiguous(rstd);
  RmsNormBackward p{};
  p.grad_y = upstream.data();
  p.x = input.data();
  p.weight = data(scale);
  p.rstd = static_cast<const float*>(row_scale.const_data_ptr());
  p.grad_y_rows = upstream.rows;
  p.x_rows = input.rows;
  p.rows = row_count(x);
  p.hidden = x.size(-1);
  p.offset = static_cast<float>(offset);
  p.float_weight = scale && scale->scalar_type() == ScalarType::Float;
  p.round_scaled = casting_of(casting_mode).round_scaled;
  Vectorised vectorised(p.hidden, x.element_size());
  vectorised.rows(p.x, p.x_rows).rows(p.grad_y, p.grad_y_rows).vector(p.weight);
  if (need_grad_x) {
    p.grad_x = grad_x.data();
    p.grad_x_rows = grad_x.rows;
    vectorised.rows(p.grad_x, p.grad_x_rows);
  }
  if (added) {
    p.extra = added->data();
    p.extra_rows = added->rows;
    vectorised.rows(p.extra, p.extra_rows);
  }
  p.grads = parameter_grads(grad_weight);
  const DeviceAttributes& device = device_attributes(x.get_device_index());
  dispatch_dtype(x.scalar_type(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    const auto launch =
        added ? launch_rms_norm_backward<T, Extra::kResidual> : launch_rms_norm_backward<T, Extra::kNone>;
    const BackwardPlan plan =
        plan_norm_backward<T>(p.rows, p.hidden, bool(vectorised), added ? 3 : 2, kMaxRowThreads,
                              device.sm_count, device.shared_memory_per_block_optin);
    launch_norm_backward<T>(op, p, p.hidden, plan.partials, x,
                            [&] { launch(p, plan, bool(vectorised), current_stream(x)); });
  });
  grad_x.finish();
  return {grad_x.result, grad_weight};
}

std::tuple<Tensor, Tensor> rms_norm(const Tensor& x, const std::optional<Tensor>& weight, double eps,
                                    double offset, const std::string& casting_mode) {
  Forward out = forward("rms_norm", x, std::nullopt, weight, eps, offset, casting_mode);
  return {out.y, out.rstd};
}

std::tuple<Tensor, Tensor, Tensor> fused_add_rms_norm(const Tensor& x, const Tensor& residual,
                                                      const std::optional<Tensor>& weight, double eps,
                                                      double offset, const std::string& casting_mode) {
  Forward out = forward("fused_add_rms_norm", x, residual, weight, eps, offset, casting_mode);
  return {out.y, out.new_residual, out.rstd};
}

std::tuple<Tensor, Tensor> rms_norm_backward(const Tensor& grad_y, const Tensor& x,
                                             const std::optional<Tensor>& weight, const Tensor& rstd,
                                             double offset, const std::string& casting_mode, bool need_grad_x,
                                             bool need_grad_weight) {
  return backward("rms_norm_backward", "x", grad_y, std::nullopt, x, weight, rstd, offset, casting_mode,
                  need_grad_x, need_grad_weight);
}

std::tuple<Tensor, Tensor> fused_add_rms_norm_backward(
    const Tensor& grad_y, const std::optional<Tensor>& grad_new_residual, const Tensor& new_residual,
    const std::optional<Tensor>& weight, const Tensor& rstd, double offset, const std::string& casting_mode,
    bool need_grad_x, bool need_grad_weight) {
  return backward("fused_add_rms_norm_backward", "new_residual", grad_y, grad_new_residual, new_residual,
                  weight, rstd, offset, casting_mode, need_grad_x, need_grad_weight);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(liger, CUDA, m) {
  m.impl("rms_norm", TORCH_BOX(&rms_norm));
  m.impl("rms_norm_backward", TORCH_BOX(&rms_norm_backward));
  m.impl("fused_add_rms_norm", TORCH_BOX(&fused_add_rms_norm));
  m.impl("fused_add_rms_norm_backward", TORCH_BOX(&fused_add_rms_norm_backward));
}

}  // namespace liger
