// SPDX-License-Identifier: BSD-3-Clause

// The op fused_linear_ce_forward: checks, options, and the choice of the engine.
#include <torch/csrc/stable/library.h>

#include <tuple>

#include "lm_head/generic_engine.h"
#include "lm_head/planner.h"
#include "lm_head/sm90/fused_linear_ce.h"

namespace liger {
namespace {

constexpr const char* kOp = FusedLinearCe::kOp;

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> fused_linear_ce_forward(
    const Tensor& input, const Tensor& weight, const Tensor& target, const std::optional<Tensor>& bias,
    const std::optional<Tensor>& ce_weight, const std::optional<Tensor>& token_weight,
    const std::optional<Tensor>& denominator, int64_t ignore_index, double label_smoothing,
    double lse_square_scale, std::optional<double> softcap, const std::string& reduction,
    std::optional<ScalarType> accum_dtype, std::optional<int64_t> memory_budget, bool return_z_loss,
    bool return_token_accuracy, bool return_argmax, bool return_logprobs, bool return_entropy,
    bool need_grad_input, bool need_grad_weight, bool need_grad_bias) {
  check_fused_linear_ce(input, weight, target, bias, ce_weight, token_weight, denominator, label_smoothing,
                        softcap, reduction, accum_dtype, memory_budget);
  require_cuda_dtype(kOp, "input", input);
  const int device = input.get_device_index();
  const OpGuard guard("fused_linear_ce_forward", device);

  const CrossEntropyArguments arguments{.target = target,
                                        .ce_weight = ce_weight,
                                        .token_weight = token_weight,
                                        .denominator = denominator,
                                        .ignore_index = ignore_index,
                                        .label_smoothing = label_smoothing,
                                        .lse_square_scale = lse_square_scale,
                                        .softcap = softcap,
                                        .reduction = reduction};
  CrossEntropyOptions options(arguments, weight.size(0));
  const Tensor used_denominator = empty({}, ScalarType::Float, input);
  prepare_cross_entropy(kOp, options, denominator, reduction == "mean", used_denominator);
  const CrossEntropyResults results(
      input, input.size(0), reduction == "none",
      {return_z_loss, return_token_accuracy, return_argmax, return_logprobs, return_entropy});
  const FusedLinearCe call{.input = input,
                           .weight = weight,
                           .bias = bias,
                           .options = options,
                           .results = results,
                           .used_denominator = used_denominator,
                           .need_grad_input = need_grad_input,
                           .need_grad_weight = need_grad_weight,
                           .need_grad_bias = need_grad_bias && bias.has_value(),
                           .exact_accumulation = !accum_dtype || *accum_dtype == ScalarType::Float,
                           .memory_budget = memory_budget ? *memory_budget : default_memory_budget(),
                           .device = device,
                           .stream = current_stream(input)};
  const std::optional<LinearCePlan> plan = plan_fused_linear_ce_sm90(call);
  const FusedLinearCeGradients gradients =
      plan ? fused_linear_ce_sm90(call, *plan) : fused_linear_ce_generic(call);
  results.reduce(kOp, options, used_denominator);
  return {results.loss,    results.z_loss,  results.token_accuracy, results.argmax, results.logprobs,
          results.entropy, gradients.input, gradients.weight,       gradients.bias};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(liger, CUDA, m) {
  m.impl("fused_linear_ce_forward", TORCH_BOX(&fused_linear_ce_forward));
}

}  // namespace liger
