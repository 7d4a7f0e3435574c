// SPDX-License-Identifier: BSD-3-Clause

// Autograd nodes of torch.ops.liger in C++, derived from the schemas.
//
// torch's stable ABI has no autograd nodes, so they use the full C++ API, in liger._C (module.cpp). Without
// it the nodes are Python, with the same results: python/liger/_core/op/autograd.py.
//
// A node is recorded for a call of liger::<op> below autograd, and its backward calls liger::<op>_backward.
// The arguments of the backward say by their names what the node saves:
//
//   grad_<output>       the gradient of an output; the other outputs are not differentiable
//   <input>, <output>   an argument or a result of liger::<op>
//   need_grad_<input>   whether this gradient is needed
//
// and its results are grad_<input>. Other arguments keep their defaults, other results are dropped. The
// formulas in Python follow from the same names: python/liger/_core/op/declared.py.
//
// Backwards outside of this scheme (create_graph, transforms, missing gradients) run the formula in Python,
// which handles every call.
// Losses save gradients of their forward instead, and their backward multiplies them (losses.cpp).
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <type_traits>
#include <vector>

namespace liger {

using c10::IValue;
using torch::autograd::Node;
using torch::autograd::variable_list;
using torch::jit::Stack;
using NodePtr = decltype(torch::autograd::Edge::function);

// A backward in Python: one gradient per argument of the op from its arguments, its results, their gradients
// and which arguments need one. IValue() stands for what is not saved, missing or not computed.
using PythonBackward =
    std::function<std::vector<IValue>(std::vector<IValue> inputs, std::vector<IValue> outputs,
                                      std::vector<IValue> grads, std::vector<IValue> needs)>;

// How C++ runs an op and records its node.
struct Formula {
  Formula(const std::string& op, PythonBackward python)
      : name(op), forward(op_handle("liger::" + op)), python(std::move(python)) {}
  virtual ~Formula() = default;

  // Completes the arguments of the op; false for a call that Python must serve. `records`: grad mode is on,
  // and an argument requires grad.
  virtual bool prepare(Stack& stack, bool records) const = 0;
  // Replaces the arguments by the results, and records a node.
  virtual void record(Stack& stack) const = 0;
  // The public function returns so many of the results.
  virtual size_t public_results() const = 0;

  size_t arguments() const { return forward.schema().arguments().size(); }
  size_t outputs() const { return forward.schema().returns().size(); }

  static c10::OperatorHandle op_handle(const std::string& name) {
    return c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), "");
  }

  std::string name;
  c10::OperatorHandle forward;
  PythonBackward python;
};

// The formula of an op whose backward follows the scheme above, or nullptr.
std::unique_ptr<Formula> formula_of_schemas(const std::string& op, PythonBackward python);
// Of liger::cross_entropy_forward, for the arguments of liger.cross_entropy. The backward in Python gets the
// gradient of the forward as its only output.
std::unique_ptr<Formula> formula_of_cross_entropy(PythonBackward python);

// A node with saved tensors.
struct SavingNode : Node {
  explicit SavingNode(const Formula& formula) : node_name(formula.name + "Backward") {}

  std::string node_name;
  std::vector<torch::autograd::SavedVariable> saved;
  bool released = false;

  std::string name() const override { return node_name; }
  void release_variables() override;
  variable_list unpacked();
};

// False in a backward that only Python handles: under create_graph, modes, transforms, batches of gradients,
// and for gradients with tangents.
bool is_plain_backward(const variable_list& grads);

inline IValue tensor_or_none(const at::Tensor& tensor) {
  return tensor.defined() ? IValue(tensor) : IValue();
}

// Older versions of torch share nodes by shared_ptr, newer ones by intrusive_ptr.
template <typename Class, typename Of, typename Pointer = NodePtr>
auto make_node(const Of& formula) {
  if constexpr (std::is_same_v<Pointer, std::shared_ptr<Node>>) {
    using Base = typename Pointer::element_type;
    return std::shared_ptr<Class>(new Class(formula), [](Base* node) { deleteNode(node); });
  } else {
    return c10::make_intrusive<Class>(formula);
  }
}

}  // namespace liger
