// SPDX-License-Identifier: BSD-3-Clause
#include "norm/layer_norm.cuh"

#include <torch/csrc/stable/library.h>

#include <tuple>

#include "host/launch/dispatch.h"
#include "host/torch.h"
#include "norm/host.cuh"
#include "norm/layer_norm_backward.cuh"

namespace liger {
namespace {

std::tuple<Tensor, Tensor, Tensor> layer_norm(const Tensor& x, const std::optional<Tensor>& weight,
                                              const std::optional<Tensor>& bias, double eps) {
  constexpr const char* op = "layer_norm";
  check_arguments(op, {{"x", x}, {"weight", weight}, {"bias", bias}, {"eps", eps}});
  require_cuda_dtype(op, "x", x);
  const OpGuard guard(op, x.get_device_index());
  RowOutput y = row_output(new_like(x));
  Tensor mean = empty(leading_shape(x), ScalarType::Float, x);
  Tensor rstd = empty(leading_shape(x), ScalarType::Float, x);
  if (x.numel() == 0) {
    fill_empty_row_statistic(mean);
    fill_empty_row_statistic(rstd);
    return {y.result, mean, rstd};
  }

  const RowInput input = row_input(x);
  const std::optional<Tensor> scale = dense_parameter(weight), added = dense_parameter(bias);
  LayerNorm p{};
  p.x = input.data();
  p.y = y.data();
  p.mean = static_cast<float*>(mean.mutable_data_ptr());
  p.rstd = static_cast<float*>(rstd.mutable_data_ptr());
  p.x_rows = input.rows;
  p.y_rows = y.rows;
  p.rows = row_count(x);
  p.hidden = x.size(-1);
  p.eps = static_cast<float>(eps);
  p.inverse_hidden = 1.0f / static_cast<float>(p.hidden);
  p.affine = {data(scale), data(added), float_parameters(weight, bias)};
  Vectorised vectorised(p.hidden, x.element_size());
  vectorised.rows(p.x, p.x_rows).rows(p.y, p.y_rows).vector(p.affine.weight).vector(p.affine.bias);
  dispatch_dtype(x.scalar_type(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    const int chunks = moment_norm_chunks<T>(p.hidden, bool(vectorised));
    std::optional<Tensor> chunk_moments;
    if (chunks > 0) {
      chunk_moments = empty({p.rows * chunks, 2}, ScalarType::Float, x);
      p.chunk_moments = static_cast<Moments*>(chunk_moments->mutable_data_ptr());
    }
    launch_layer_norm<T>(p, bool(vectorised), chunks, current_stream(x));
  });
  check_launch(op);
  y.finish();
  return {y.result, mean, rstd};
}

std::tuple<Tensor, Tensor, Tensor> layer_norm_backward(const Tensor& grad_y, const Tensor& x,
                                                       const std::optional<Tensor>& weight,
                                                       const std::optional<Tensor>& bias, const Tensor& mean,
                                                       const Tensor& rstd, bool need_grad_x,
                                                       bool need_grad_weight, bool need_grad_bias) {
  constexpr const char* op = "layer_norm_backward";
  check_arguments(
      op, {{"x", x}, {"grad_y", grad_y}, {"weight", weight}, {"bias", bias}, {"mean", mean}, {"rstd", rstd}});
  require_cuda_dtype(op, "x", x);
  need_grad_weight = need_grad_weight && weight;
  need_grad_bias = need_grad_bias && bias;
  const OpGuard guard(op, x.get_device_index());
  RowOutput grad_x = row_output(need_grad_x ? new_like(x) : no_tensor(x.scalar_type(), x));
  Tensor grad_weight = parameter_grad(weight, need_grad_weight, x);
  Tensor grad_bias = parameter_grad(bias, need_grad_bias, x);
  const std::tuple<Tensor, Tensor, Tensor> grads{grad_x.result, grad_weight, grad_bias};
  if (x.numel() == 0 || !(need_grad_x || need_grad_weight || need_grad_bias)) return grads;

  const RowInput input = row_input(x), upstream = row_input(grad_y);
  const std::optional<Tensor> scale = dense_parameter(weight);
  const Tensor row_mean = as_contiguous(mean), row_scale = as_contiguous(rstd);
  LayerNormBackward p{};
  p.grad_y = upstream.data();
  p.x = input.data();
  p.weight = data(scale);
  p.mean = static_cast<const float*>(row_mean.const_data_ptr());
  p.rstd = static_cast<const float*>(row_scale.const_data_ptr());
  p.grad_y_rows = upstream.rows;
  p.x_rows = input.rows;
  p.rows = row_count(x);
  p.hidden = x.size(-1);
  p.float_weight = float_parameters(weight, std::nullopt);
  Vectorised vectorised(p.hidden, x.element_size());
  vectorised.rows(p.x, p.x_rows).rows(p.grad_y, p.grad_y_rows).vector(p.weight);
  if (need_grad_x) {
    p.grad_x = grad_x.data();
    p.grad_x_rows = grad_x.rows;
    vectorised.rows(p.grad_x, p.grad_x_rows);
  }
  p.grads = parameter_grads(grad_weight, grad_bias);
  const DeviceAttributes& device = device_attributes(x.get_device_index());
  dispatch_dtype(x.scalar_type(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    const BackwardPlan plan = plan_norm_backward<T>(
        p.rows, p.hidden, bool(vectorised), 2,
        has_fast_path(p) ? kLayerNormThreads<T, 4, true> : kLayerNormThreads<T, 4, false>, device.sm_count,
        device.shared_memory_per_block_optin);
    launch_norm_backward<T>(op, p, p.hidden, plan.partials, x, [&] {
      launch_layer_norm_backward<T>(p, plan, bool(vectorised), current_stream(x));
    });
  });
  grad_x.finish();
  return grads;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(liger, CUDA, m) {
  m.impl("layer_norm", TORCH_BOX(&layer_norm));
  m.impl("layer_norm_backward", TORCH_BOX(&layer_norm_backward));
}

}  // namespace liger
