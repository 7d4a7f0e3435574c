// SPDX-License-Identifier: BSD-3-Clause

// Autograd nodes of torch.ops.liger in C++, derived from the schemas.
//
// torch's stable ABI has no autograd nodes, so this library uses the full C++ API. It is built per torch
// version; the file name carries the version and the loader checks it. Without the library the nodes are
// Python, with the same results: python/liger/_core/op/autograd.py.
//
// For each op of the namespace liger that has a backward with the arguments below, an op with its schema in
// the namespace liger_autograd calls liger::<op> below autograd and records a node. The backward of the node
// calls liger::<op>_backward. The arguments of the backward say by their names what the node saves:
//
//   grad_<output>       the gradient of an output; the other outputs are not differentiable
//   <input>, <output>   an argument or a result of liger::<op>
//   need_grad_<input>   whether this gradient is needed
//
// and its results are grad_<input>. Other arguments keep their defaults, other results are dropped. The
// formulas in Python follow from the same names: python/liger/_core/op/declared.py.
//
// Calls outside of this scheme (create_graph, transforms, missing gradients, constant inputs of ops that
// always compute all gradients) run the formula in Python, which handles every call.
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/library.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace {

using c10::IValue;
using torch::autograd::Node;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;
using torch::jit::Stack;
using NodePtr = decltype(torch::autograd::Edge::function);

c10::OperatorHandle op_handle(const std::string& name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), "");
}

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

struct Formula {
  std::string name, node_name;
  c10::OperatorHandle forward, backward;
  size_t arguments, outputs;
  std::vector<Input> inputs;
  std::vector<Source> sources;
  std::vector<bool> differentiable;  // outputs
  // Without need_grad_ arguments all gradients are computed, and with several differentiable outputs each
  // depends on some inputs only. Then the node is used if all required inputs with a gradient require grad.
  bool needs_all = false;
  bool fits = true;  // whether the names of all arguments of the backward are known

  explicit Formula(const std::string& op)
      : name(op),
        node_name(op + "Backward"),
        forward(op_handle("liger::" + op)),
        backward(op_handle("liger::" + op + "_backward")),
        arguments(forward.schema().arguments().size()),
        outputs(forward.schema().returns().size()),
        differentiable(outputs) {
    const auto& arguments_of_backward = backward.schema().arguments();
    const auto input_names = names_of(forward.schema().arguments());
    auto output_names = names_of(forward.schema().returns());
    auto result_names = names_of(backward.schema().returns());
    // A single output or gradient may have no name.
    if (outputs == 1 && arguments_of_backward[0].name().starts_with("grad_"))
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
    for (size_t i = 0; i < arguments; ++i) {
      const auto& argument = forward.schema().arguments()[i];
      if (!is_tensor(argument)) continue;
      // A residual has the gradient of the x that it is added to.
      const std::string source = input_names[i] == "residual" ? "x" : input_names[i];
      inputs.push_back({i, is_optional(argument), index_of(result_names, "grad_" + source)});
    }
    needs_all = !has_needs || std::count(differentiable.begin(), differentiable.end(), true) > 1;
  }

  // True if the node computes all gradients of a call.
  bool serves(const IValue* args) const {
    for (const Input& input : inputs) {
      const IValue& value = args[input.position];
      const bool requires_grad = value.isTensor() && value.toTensor().requires_grad();
      if (requires_grad ? !input.result : needs_all && input.result && !input.optional) return false;
    }
    return true;
  }
};

// Calls a function in Python directly: modes and transforms act on what it calls.
void call_python(const c10::OperatorHandle& op, Stack& stack) {
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack);
}

IValue tuple(std::vector<IValue> values) {
  return c10::ivalue::Tuple::create(std::move(values));
}

IValue tensor_or_none(const at::Tensor& tensor) {
  return tensor.defined() ? IValue(tensor) : IValue();
}

struct OpNode final : Node {
  explicit OpNode(const Formula& formula) : formula(formula) {}

  const Formula& formula;
  std::vector<SavedVariable> saved;  // in the order of formula.sources
  std::vector<IValue> constants;     // the same
  bool released = false;

  std::string name() const override { return formula.node_name; }

  void release_variables() override {
    std::lock_guard<std::mutex> lock(mutex_);
    saved.clear();
    released = true;
  }

  variable_list unpacked() {
    std::lock_guard<std::mutex> lock(mutex_);
    TORCH_CHECK(!released, torch::autograd::ERR_BACKWARD_TWICE);
    variable_list tensors;
    tensors.reserve(saved.size());
    for (const SavedVariable& variable : saved) tensors.push_back(variable.unpack(getptr()));
    return tensors;
  }

  // True if the backward op alone can compute the gradients, without the formula in Python.
  bool is_plain(const variable_list& grads) const {
    if (c10::GradMode::is_enabled()) return false;
    // Modes, transforms and batches of gradients include further keys.
    if (c10::impl::tls_local_dispatch_key_set().included_ != c10::default_included_set) return false;
    for (const Source& source : formula.sources)
      if (source.kind == Source::kGrad && !source.optional && !grads[source.index].defined()) return false;
    return true;
  }

  variable_list apply(variable_list&& grads) override {
    const variable_list tensors = unpacked();
    // With a single output, zeros stand for a missing gradient.
    if (formula.outputs == 1 && !grads[0].defined()) grads[0] = input_metadata(0).zeros_like();
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
    std::vector<IValue> inputs(formula.arguments), outputs(formula.outputs), upstream,
        needs(formula.arguments, false);
    auto tensor = tensors.begin();
    auto constant = constants.begin();
    for (const Source& source : formula.sources) {
      if (source.kind == Source::kSavedInput) inputs[source.index] = tensor_or_none(*tensor++);
      if (source.kind == Source::kSavedOutput) outputs[source.index] = tensor_or_none(*tensor++);
      if (source.kind == Source::kConstant) inputs[source.index] = *constant++;
    }
    for (const auto& grad : grads) upstream.push_back(tensor_or_none(grad));
    for (size_t i = 0; i < needed.size(); ++i) needs[formula.inputs[i].position] = bool(needed[i]);
    Stack stack{formula.name, tuple(std::move(inputs)), tuple(std::move(outputs)), tuple(std::move(upstream)),
                tuple(std::move(needs))};
    static const auto op = op_handle("liger_autograd::backward");
    call_python(op, stack);
    const auto given = stack.back().toListRef();
    variable_list results(needed.size());
    for (size_t i = 0; i < needed.size(); ++i) {
      const IValue& grad = given[formula.inputs[i].position];
      if (grad.isTensor()) results[i] = grad.toTensor();
    }
    return results;
  }
};

// Older versions of torch share nodes by shared_ptr, newer ones by intrusive_ptr.
template <typename Pointer = NodePtr>
auto make_node(const Formula& formula) {
  if constexpr (std::is_same_v<Pointer, std::shared_ptr<Node>>) {
    using Base = typename Pointer::element_type;
    return std::shared_ptr<OpNode>(new OpNode(formula), [](Base* node) { deleteNode(node); });
  } else {
    return c10::make_intrusive<OpNode>(formula);
  }
}

// The kernel of liger_autograd::<op>.
struct Record final : c10::OperatorKernel {
  explicit Record(Formula formula) : formula(std::move(formula)) {}

  const Formula formula;

  void operator()(const c10::OperatorHandle&, c10::DispatchKeySet, Stack* stack) {
    const size_t begin = stack->size() - formula.arguments;
    const IValue* args = stack->data() + begin;
    if (!formula.serves(args)) return record_in_python(*stack);

    const auto node = make_node(formula);
    const NodePtr grad_fn = node;
    torch::autograd::edge_list edges;
    edges.reserve(formula.inputs.size());
    for (const Input& input : formula.inputs) {
      const IValue& value = args[input.position];
      edges.push_back(value.isTensor() ? torch::autograd::impl::gradient_edge(value.toTensor())
                                       : torch::autograd::Edge());
    }
    node->set_next_edges(std::move(edges));
    std::vector<IValue> kept;
    kept.reserve(formula.sources.size());
    for (const Source& source : formula.sources) {
      if (source.kind == Source::kSavedInput) kept.push_back(args[source.index]);
      if (source.kind == Source::kConstant) node->constants.push_back(args[source.index]);
    }
    {
      torch::autograd::AutoGradMode no_grad(false);
      at::AutoDispatchBelowAutograd below;
      formula.forward.callBoxed(*stack);
    }
    const IValue* results = stack->data() + begin;
    for (size_t i = 0; i < formula.outputs; ++i) {
      if (formula.differentiable[i])
        torch::autograd::set_history(results[i].toTensor(), grad_fn);
      else
        node->add_input_metadata(Node::undefined_input());
    }
    node->saved.reserve(formula.sources.size());
    auto input = kept.begin();
    for (const Source& source : formula.sources) {
      if (source.kind == Source::kSavedInput) {
        const IValue& value = *input++;
        node->saved.emplace_back(value.isTensor() ? value.toTensor() : at::Tensor(), false);
      } else if (source.kind == Source::kSavedOutput) {
        node->saved.emplace_back(results[source.index].toTensor(), formula.differentiable[source.index]);
      }
    }
  }

  void record_in_python(Stack& stack) const {
    auto args = torch::jit::pop(stack, formula.arguments);
    Stack call{formula.name, tuple(std::move(args))};
    static const auto op = op_handle("liger_autograd::record");
    call_python(op, call);
    for (const IValue& output : call.back().toListRef()) stack.push_back(output);
  }
};

}  // namespace

// clang-format off: a schema is one line, whatever its length.
TORCH_LIBRARY(liger_autograd, m) {
  // The formula of a backward in Python, with None for what is not saved, and the node in Python.
  m.def("backward(str op, Any inputs, Any outputs, Any grads, Any needs_input_grad) -> Tensor?[]");
  m.def("record(str op, Any args) -> Tensor[]");
  // clang-format on
  for (const auto& name : c10::Dispatcher::singleton().getAllOpNames()) {
    if (!name.name.starts_with("liger::") || !name.overload_name.empty()) continue;
    if (!c10::Dispatcher::singleton().findSchema({name.name + "_backward", ""})) continue;
    const std::string op = name.name.substr(std::string("liger::").size());
    Formula formula(op);
    if (!formula.fits) continue;
    const auto& schema = formula.forward.schema();
    m.def(c10::FunctionSchema("liger_autograd::" + op, "", schema.arguments(), schema.returns()));
    m.impl(op.c_str(),
           torch::CppFunction::makeFromBoxedFunctor(std::make_unique<Record>(std::move(formula))));
  }
}
