// SPDX-License-Identifier: BSD-3-Clause

// liger.cross_entropy with the gradient of the logits in the forward. The node saves this gradient, and its
// backward multiplies it by the gradient of the loss, in place unless the graph is kept. As in Python:
// python/liger/_core/op/forward_gradients.py.
#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/graph_task.h>

#include <limits>
#include <utility>

#include "autograd/nodes.h"

namespace liger {
namespace {

// Of cross_entropy_forward.
enum Argument {
  kLogits,
  kTarget,
  kClassWeight,
  kTokenWeight,
  kDenominator,
  kIgnoreIndex,
  kLabelSmoothing,
  kLseSquareScale,
  kSoftcap,
  kReduction,
  kNeedGrad = 15,
  kArguments
};
constexpr size_t kLoss = 0, kGradient = 8;  // results

struct LossNode final : SavingNode {
  explicit LossNode(const Formula& formula) : SavingNode(formula), formula(formula) {}

  const Formula& formula;

  variable_list apply(variable_list&& grads) override {
    const at::Tensor gradient = unpacked()[0];
    const at::Tensor &factor = grads[0], &of_gradient = grads[1];
    const bool is_plain = is_plain_backward(grads) && factor.defined() && !of_gradient.defined() &&
                          !gradient.key_set().has(c10::DispatchKey::Python) &&
                          !factor.key_set().has(c10::DispatchKey::Python);
    if (!is_plain) {
      const auto given =
          formula.python({}, {gradient}, {tensor_or_none(factor), tensor_or_none(of_gradient)}, {true});
      return {given[kLogits].isTensor() ? given[kLogits].toTensor() : at::Tensor()};
    }
    static const auto rescale = Formula::op_handle("liger::rescale");
    static const auto rescale_ = Formula::op_handle("liger::rescale_");
    at::AutoDispatchBelowADInplaceOrView below;
    Stack stack{gradient.detach(), factor};
    if (torch::autograd::get_current_graph_task_keep_graph()) {
      rescale.callBoxed(stack);
      return {stack[0].toTensor()};
    }
    at::Tensor result = stack[0].toTensor();
    rescale_.callBoxed(stack);
    torch::autograd::impl::bump_version(result);
    return {std::move(result)};
  }
};

struct CrossEntropyFormula final : Formula {
  explicit CrossEntropyFormula(PythonBackward python) : Formula("cross_entropy_forward", std::move(python)) {
    TORCH_CHECK(arguments() == kArguments && forward.schema().arguments()[kNeedGrad].name() == "need_grad" &&
                forward.schema().returns()[kGradient].name() == "grad_logits");
  }

  size_t public_results() const override { return 1; }

  bool prepare(Stack& stack, bool records) const override {
    const at::Tensor logits = stack[kLogits].toTensor(), target = stack[kTarget].toTensor();
    for (size_t i = kTarget; i <= kDenominator; ++i)
      if (stack[i].isTensor() && stack[i].toTensor().requires_grad()) return false;
    // For float16 logits the backward computes the gradient, for a loss per row it reads the logits again.
    const auto& reduction = stack[kReduction].toStringRef();
    if ((reduction != "mean" && reduction != "sum") || (records && logits.scalar_type() == at::kHalf))
      return false;
    if (!in_range(stack)) return false;
    if (logits.dim() != 2 || target.dim() != 1) {
      // Rows of other logits may have another order in memory.
      if (logits.dim() < 2 || !logits.is_contiguous() || logits.numel() == 0) return false;
      const auto tokens = logits.sizes().slice(0, logits.dim() - 1);
      for (const size_t i : {kTarget, kTokenWeight})
        if (stack[i].isTensor() && stack[i].toTensor().sizes() != tokens) return false;
      const int64_t last = logits.dim() - 2;
      for (const size_t i : {kLogits, kTarget, kTokenWeight})
        if (stack[i].isTensor()) stack[i] = stack[i].toTensor().flatten(0, last);
    }
    stack[kNeedGrad] = records;
    return true;
  }

  // The ranges of the arguments of the public function that the op does not check.
  static bool in_range(const Stack& stack) {
    using Float = std::numeric_limits<float>;
    const int64_t ignored = stack[kIgnoreIndex].toInt();
    const double smoothing = stack[kLabelSmoothing].toDouble(), scale = stack[kLseSquareScale].toDouble();
    const double softcap = stack[kSoftcap].isNone() ? 1.0 : stack[kSoftcap].toDouble();
    return ignored == static_cast<int32_t>(ignored) && smoothing >= 0.0 && smoothing <= 1.0 && scale >= 0.0 &&
           scale <= Float::max() && softcap >= Float::min() && softcap <= Float::max();
  }

  void record(Stack& stack) const override {
    const auto node = make_node<LossNode>(*this);
    const NodePtr grad_fn = node;
    node->set_next_edges({torch::autograd::impl::gradient_edge(stack[kLogits].toTensor())});
    {
      torch::autograd::AutoGradMode no_grad(false);
      at::AutoDispatchBelowAutograd below;
      forward.callBoxed(stack);
    }
    // The saved gradient has a history as well, which a second derivative reaches.
    for (const size_t result : {kLoss, kGradient})
      torch::autograd::set_history(stack[result].toTensor(), grad_fn);
    node->saved.emplace_back(stack[kGradient].toTensor(), /*is_output=*/true);
  }
};

}  // namespace

std::unique_ptr<Formula> formula_of_cross_entropy(PythonBackward python) {
  return std::make_unique<CrossEntropyFormula>(std::move(python));
}

}  // namespace liger
