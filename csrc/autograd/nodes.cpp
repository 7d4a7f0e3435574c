// SPDX-License-Identifier: BSD-3-Clause
#include "autograd/nodes.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/csrc/autograd/functions/utils.h>

#include <algorithm>
#include <optional>
#include <utility>

namespace liger {
namespace {

std::optional<size_t> index_of(const std::vector<std::string>& names, const std::string& name) {
  for (size_t i = 0; i < names.size(); ++i)
    if (names[i] == name) return i;
  return std::nullopt;
}

std::vector<std::string> names_of(const std::vector<c10::Argument>& arguments) {
  std::vector<std::string> names;
  for (const auto& argument : arguments) names.push_back(argument.name());
  return names;
}

bool is_tensor(const c10::Argument& argument) {
  return argument.type()->isSubtypeOf(*c10::OptionalType::ofTensor());
}

bool is_optional(const c10::Argument& argument) {
  return argument.type()->kind() == c10::TypeKind::OptionalType;
}

// The source of an argument of the backward op.
struct Source {
  enum Kind { kGrad, kSavedInput, kSavedOutput, kConstant, kNeed, kDefault };
  Kind kind;
  size_t index = 0;  // of the output, the input, or for kNeed of the result
  bool optional = false;
  IValue value = {};  // of kDefault
};

// A Tensor among the arguments of the forward op, and so an edge of the node.
struct Input {
  size_t position;
  bool optional;
  std::optional<size_t> result;  // of the backward op: its gradient
};

struct SchemaFormula final : Formula {
  c10::OperatorHandle backward;
  std::vector<Input> inputs;
  std::vector<Source> sources;
  std::vector<bool> differentiable;  // outputs
  // Without need_grad_ arguments all gradients are computed, and with several differentiable outputs each
  // depends on some inputs only. Then the node is used if all required inputs with a gradient require grad.
  bool needs_all = false;
  bool fits = true;  // whether the names of all arguments of the backward are known

  SchemaFormula(const std::string& op, PythonBackward python_backward)
      : Formula(op, std::move(python_backward)),
        backward(op_handle("liger::" + op + "_backward")),
        differentiable(outputs()) {
    const auto& arguments_of_backward = backward.schema().arguments();
    const auto input_names = names_of(forward.schema().arguments());
    auto output_names = names_of(forward.schema().returns());
    auto result_names = names_of(backward.schema().returns());
    // A single output or gradient may have no name.
    if (outputs() == 1 && arguments_of_backward[0].name().starts_with("grad_"))
      output_names[0] = arguments_of_backward[0].name().substr(5);
    if (result_names.size() == 1) result_names[0] = "grad_" + input_names[0];

    bool has_needs = false;
    for (const auto& argument : arguments_of_backward) {
      const std::string& name = argument.name();
      Source source{Source::kDefault};
      if (auto output = name.starts_with("grad_") ? index_of(output_names, name.substr(5)) : std::nullopt) {
        source = {Source::kGrad, *output};
        differentiable[*output] = true;
      } else if (auto input = index_of(input_names, name)) {
        source = {is_tensor(argument) ? Source::kSavedInput : Source::kConstant, *input};
      } else if (auto output = index_of(output_names, name)) {
        source = {Source::kSavedOutput, *output};
      } else if (auto result =
                     name.starts_with("need_") ? index_of(result_names, name.substr(5)) : std::nullopt) {
        source = {Source::kNeed, *result};
        has_needs = true;
      } else if (argument.default_value()) {
        source.value = *argument.default_value();
      } else {
        fits = false;
      }
      source.optional = is_optional(argument);
      sources.push_back(std::move(source));
    }
    for (size_t i = 0; i < arguments(); ++i) {
      const auto& argument = forward.schema().arguments()[i];
      if (!is_tensor(argument)) continue;
      // A residual has the gradient of the x that it is added to.
      const std::string source = input_names[i] == "residual" ? "x" : input_names[i];
      inputs.push_back({i, is_optional(argument), index_of(result_names, "grad_" + source)});
    }
    needs_all = !has_needs || std::count(differentiable.begin(), differentiable.end(), true) > 1;
  }

  bool prepare(Stack& stack, bool records) const override {
    if (!records) return true;
    for (const Input& input : inputs) {
      const IValue& value = stack[input.position];
      const bool requires_grad = value.isTensor() && value.toTensor().requires_grad();
      if (requires_grad ? !input.result : needs_all && input.result && !input.optional) return false;
    }
    return true;
  }

  size_t public_results() const override {
    return std::count(differentiable.begin(), differentiable.end(), true);
  }

  void record(Stack& stack) const override;
};

struct OpNode final : SavingNode {
  explicit OpNode(const SchemaFormula& formula) : SavingNode(formula), formula(formula) {}

  const SchemaFormula& formula;
  std::vector<IValue> constants;  // in the order of formula.sources

  // True if the backward op alone can compute the gradients, without the formula in Python.
  bool is_plain(const variable_list& grads) const {
    if (!is_plain_backward(grads)) return false;
    for (const Source& source : formula.sources)
      if (source.kind == Source::kGrad && !source.optional && !grads[source.index].defined()) return false;
    return true;
  }

  variable_list apply(variable_list&& grads) override {
    const variable_list tensors = unpacked();
    // With a single output, zeros stand for a missing gradient.
    if (formula.outputs() == 1 && !grads[0].defined()) grads[0] = input_metadata(0).zeros_like();
    std::vector<bool> needed(formula.inputs.size());
    for (size_t i = 0; i < needed.size(); ++i) needed[i] = task_should_compute_output(i);
    return is_plain(grads) ? call_backward(grads, tensors, needed) : call_formula(grads, tensors, needed);
  }

  variable_list call_backward(variable_list& grads, const variable_list& tensors,
                              const std::vector<bool>& needed) const {
    Stack stack;
    stack.reserve(formula.sources.size());
    auto tensor = tensors.begin();
    auto constant = constants.begin();
    for (const Source& source : formula.sources) {
      switch (source.kind) {
        case Source::kGrad:
          stack.push_back(tensor_or_none(grads[source.index]));
          break;
        case Source::kSavedInput:
        case Source::kSavedOutput:
          stack.push_back(tensor_or_none(*tensor++));
          break;
        case Source::kConstant:
          stack.push_back(*constant++);
          break;
        case Source::kNeed:
          stack.emplace_back(needs_result(source.index, needed));
          break;
        case Source::kDefault:
          stack.push_back(source.value);
          break;
      }
    }
    {
      at::AutoDispatchBelowAutograd below;
      formula.backward.callBoxed(stack);
    }
    variable_list results(needed.size());
    for (size_t i = 0; i < needed.size(); ++i)
      if (needed[i] && formula.inputs[i].result) results[i] = stack[*formula.inputs[i].result].toTensor();
    return results;
  }

  bool needs_result(size_t result, const std::vector<bool>& needed) const {
    for (size_t i = 0; i < needed.size(); ++i)
      if (needed[i] && formula.inputs[i].result == result) return true;
    return false;
  }

  variable_list call_formula(const variable_list& grads, const variable_list& tensors,
                             const std::vector<bool>& needed) const {
    std::vector<IValue> inputs(formula.arguments()), outputs(formula.outputs()), upstream,
        needs(formula.arguments(), false);
    auto tensor = tensors.begin();
    auto constant = constants.begin();
    for (const Source& source : formula.sources) {
      if (source.kind == Source::kSavedInput) inputs[source.index] = tensor_or_none(*tensor++);
      if (source.kind == Source::kSavedOutput) outputs[source.index] = tensor_or_none(*tensor++);
      if (source.kind == Source::kConstant) inputs[source.index] = *constant++;
    }
    for (const auto& grad : grads) upstream.push_back(tensor_or_none(grad));
    for (size_t i = 0; i < needed.size(); ++i) needs[formula.inputs[i].position] = bool(needed[i]);
    const auto given =
        formula.python(std::move(inputs), std::move(outputs), std::move(upstream), std::move(needs));
    variable_list results(needed.size());
    for (size_t i = 0; i < needed.size(); ++i) {
      const IValue& grad = given[formula.inputs[i].position];
      if (grad.isTensor()) results[i] = grad.toTensor();
    }
    return results;
  }
};

void SchemaFormula::record(Stack& stack) const {
  const auto node = make_node<OpNode>(*this);
  const NodePtr grad_fn = node;
  torch::autograd::edge_list edges;
  edges.reserve(inputs.size());
  for (const Input& input : inputs) {
    const IValue& value = stack[input.position];
    edges.push_back(value.isTensor() ? torch::autograd::impl::gradient_edge(value.toTensor())
                                     : torch::autograd::Edge());
  }
  node->set_next_edges(std::move(edges));
  std::vector<IValue> kept;
  kept.reserve(sources.size());
  for (const Source& source : sources) {
    if (source.kind == Source::kSavedInput) kept.push_back(stack[source.index]);
    if (source.kind == Source::kConstant) node->constants.push_back(stack[source.index]);
  }
  {
    torch::autograd::AutoGradMode no_grad(false);
    at::AutoDispatchBelowAutograd below;
    forward.callBoxed(stack);
  }
  for (size_t i = 0; i < outputs(); ++i) {
    if (differentiable[i])
      torch::autograd::set_history(stack[i].toTensor(), grad_fn);
    else
      node->add_input_metadata(Node::undefined_input());
  }
  node->saved.reserve(sources.size());
  auto input = kept.begin();
  for (const Source& source : sources) {
    if (source.kind == Source::kSavedInput) {
      const IValue& value = *input++;
      node->saved.emplace_back(value.isTensor() ? value.toTensor() : at::Tensor(), false);
    } else if (source.kind == Source::kSavedOutput) {
      node->saved.emplace_back(stack[source.index].toTensor(), differentiable[source.index]);
    }
  }
}

}  // namespace

std::unique_ptr<Formula> formula_of_schemas(const std::string& op, PythonBackward python) {
  if (!c10::Dispatcher::singleton().findSchema({"liger::" + op + "_backward", ""})) return nullptr;
  auto formula = std::make_unique<SchemaFormula>(op, std::move(python));
  return formula->fits ? std::move(formula) : nullptr;
}

void SavingNode::release_variables() {
  std::lock_guard<std::mutex> lock(mutex_);
  saved.clear();
  released = true;
}

variable_list SavingNode::unpacked() {
  std::lock_guard<std::mutex> lock(mutex_);
  TORCH_CHECK(!released, torch::autograd::ERR_BACKWARD_TWICE);
  variable_list tensors;
  tensors.reserve(saved.size());
  for (const auto& variable : saved) tensors.push_back(variable.unpack(getptr()));
  return tensors;
}

bool is_plain_backward(const variable_list& grads) {
  for (const at::Tensor& grad : grads)
    if (grad.defined() && grad._fw_grad(/*level=*/0).defined()) return false;
  // Modes, transforms and batches of gradients include further keys.
  return !c10::GradMode::is_enabled() &&
         c10::impl::tls_local_dispatch_key_set().included_ == c10::default_included_set;
}

}  // namespace liger
