// SPDX-License-Identifier: BSD-3-Clause

// liger._C: public functions that enter C++ once.
//
// An entry is a callable for one op: it takes arguments in the way of a public function, and for a plain
// eager call runs the op, below autograd or with a node (nodes.h). All other calls (subclasses, modes,
// transforms, tracers, an argument of another type) return NotImplemented, and the caller runs its Python.
// Errors of the op are raised as torch.ops raises them.
//
// The library is built per version of Python and of torch; its file name has both
// (python/liger/_core/runtime/load.py).
#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <array>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "autograd/nodes.h"

namespace liger {
namespace {

namespace py = pybind11;

// Arguments of a public function.
constexpr size_t kMaxParameters = 24;

struct Parameter {
  py::str name;         // interned
  py::object default_;  // empty if there is none
  int position;         // among the arguments of the op; -1: the call must have the default
  c10::TypeKind kind;
  bool optional;
};

struct Entry {
  const Formula& formula;
  std::vector<Parameter> parameters;
  Stack defaults;
  size_t results;     // so many of the op are returned: a Tensor if it is one, else a tuple
  size_t positional;  // so many parameters may be given by position
  bool casts;         // under autocast on a GPU Python must see the call

  // The arguments of the op; false for a call that Python must see.
  bool parse(PyObject* const* args, size_t count, PyObject* keywords, Stack& stack, bool& records) const;
};

// False under modes, transforms and tracers, which include further keys, and inside of another op, where
// autograd is off.
bool is_plain(const Entry& entry) {
  const auto keys = c10::impl::tls_local_dispatch_key_set();
  return keys.included_ == c10::default_included_set &&
         !keys.excluded_.has(c10::DispatchKey::AutogradFunctionality) &&
         (!entry.casts || keys.excluded_.has(c10::DispatchKey::AutocastCUDA)) &&
         at::impl::PythonTorchFunctionTLS::stack_len() == 0;
}

// False if the value is not one of the kind, or one of a subclass.
bool convert(PyObject* value, c10::TypeKind kind, IValue& result, bool& requires_grad) {
  switch (kind) {
    case c10::TypeKind::TensorType: {
      if (!THPVariable_CheckExact(value)) return false;
      const at::Tensor& tensor = THPVariable_Unpack(value);
      if (tensor.layout() != c10::kStrided || tensor.is_nested() || tensor.is_quantized()) return false;
      if (tensor._fw_grad(/*level=*/0).defined()) return false;
      requires_grad |= tensor.requires_grad();
      result = tensor;
      return true;
    }
    case c10::TypeKind::FloatType:
      if (!PyFloat_CheckExact(value) && !PyLong_CheckExact(value)) return false;
      result = PyFloat_AsDouble(value);
      break;
    case c10::TypeKind::IntType:
      if (!PyLong_CheckExact(value)) return false;
      result = static_cast<int64_t>(PyLong_AsLongLong(value));
      break;
    case c10::TypeKind::BoolType:
      if (!PyBool_Check(value)) return false;
      result = value == Py_True;
      return true;
    case c10::TypeKind::StringType: {
      Py_ssize_t size = 0;
      const char* text = PyUnicode_CheckExact(value) ? PyUnicode_AsUTF8AndSize(value, &size) : nullptr;
      if (text != nullptr) result = std::string(text, size);
      if (text == nullptr) PyErr_Clear();
      return text != nullptr;
    }
    default:
      return false;
  }
  if (!PyErr_Occurred()) return true;
  PyErr_Clear();  // A number that does not fit.
  return false;
}

bool Entry::parse(PyObject* const* args, size_t count, PyObject* keywords, Stack& stack,
                  bool& records) const {
  if (count > positional) return false;
  std::array<PyObject*, kMaxParameters> given{};
  std::copy(args, args + count, given.begin());
  const size_t named = keywords == nullptr ? 0 : PyTuple_GET_SIZE(keywords);
  for (size_t k = 0; k < named; ++k) {
    PyObject* name = PyTuple_GET_ITEM(keywords, k);
    size_t i = count;
    // Names in code are interned.
    while (i < parameters.size() && parameters[i].name.ptr() != name) ++i;
    for (size_t j = count; i == parameters.size() && j < parameters.size(); ++j)
      if (PyUnicode_Compare(parameters[j].name.ptr(), name) == 0) i = j;
    if (i == parameters.size() || given[i] != nullptr) return false;
    given[i] = args[count + k];
  }
  for (size_t i = 0; i < parameters.size(); ++i) {
    const Parameter& parameter = parameters[i];
    PyObject* value = given[i] == nullptr ? parameter.default_.ptr() : given[i];
    if (value == parameter.default_.ptr()) {
      if (value == nullptr) return false;
      continue;
    }
    if (parameter.position < 0) return false;
    IValue& result = stack[parameter.position];
    if (value == Py_None && parameter.optional)
      result = IValue();
    else if (!convert(value, parameter.kind, result, records))
      return false;
  }
  return true;
}

PyObject* run(const Entry& entry, PyObject* const* args, Py_ssize_t count, PyObject* keywords) {
  if (!is_plain(entry)) Py_RETURN_NOTIMPLEMENTED;
  Stack stack = entry.defaults;
  bool records = false;
  if (!entry.parse(args, count, keywords, stack, records)) Py_RETURN_NOTIMPLEMENTED;
  records = records && c10::GradMode::is_enabled();
  if (!entry.formula.prepare(stack, records)) Py_RETURN_NOTIMPLEMENTED;
  {
    py::gil_scoped_release released;
    if (records) {
      entry.formula.record(stack);
    } else {
      at::AutoDispatchBelowAutograd below;
      entry.formula.forward.callBoxed(stack);
    }
  }
  if (entry.results == 1) return THPVariable_Wrap(stack[0].toTensor());
  auto results = py::reinterpret_steal<py::object>(PyTuple_New(entry.results));
  if (!results) throw python_error();
  for (size_t i = 0; i < entry.results; ++i)
    PyTuple_SET_ITEM(results.ptr(), i, THPVariable_Wrap(stack[i].toTensor()));
  return results.release().ptr();
}

PyObject* call(PyObject* self, PyObject* const* args, Py_ssize_t count, PyObject* keywords) {
  try {
    torch::PyWarningHandler warnings;
    try {
      return run(*static_cast<const Entry*>(PyCapsule_GetPointer(self, nullptr)), args, count, keywords);
    } catch (...) {
      // Its destructor must not throw a pending warning as a second exception.
      warnings.set_in_exception();
      throw;
    }
  } catch (...) {
    // Not HANDLE_TH_ERRORS, which would catch exceptions of torch's pybind11 as exceptions of this one.
    torch::translate_exception_to_python(std::current_exception());
    return nullptr;
  }
}

// --- the backward in Python -------------------------------------------------------------------------------

py::object to_python(const IValue& value) {
  if (value.isTensor()) return py::reinterpret_steal<py::object>(THPVariable_Wrap(value.toTensor()));
  if (value.isBool()) return py::bool_(value.toBool());
  if (value.isInt()) return py::int_(value.toInt());
  if (value.isDouble()) return py::float_(value.toDouble());
  if (value.isString()) return py::str(value.toStringRef());
  TORCH_INTERNAL_ASSERT(value.isNone());
  return py::none();
}

py::tuple to_python(const std::vector<IValue>& values) {
  py::tuple result(values.size());
  for (size_t i = 0; i < values.size(); ++i) result[i] = to_python(values[i]);
  return result;
}

// Calls function(inputs, outputs, grads, needs), four tuples, which returns a sequence of Tensors and None.
PythonBackward backward_of(py::object function) {
  // Formulas live as long as the process.
  PyObject* callable = function.release().ptr();
  return [callable](const auto& inputs, const auto& outputs, const auto& grads, const auto& needs) {
    py::gil_scoped_acquire acquired;
    // torch's exception crosses the autograd engine, pybind11's belongs to the pybind11 of this module.
    const auto raise = [] {
      python_error error;
      error.persist();
      throw error;
    };
    const auto found = py::reinterpret_steal<py::object>(
        PyObject_CallFunctionObjArgs(callable, to_python(inputs).ptr(), to_python(outputs).ptr(),
                                     to_python(grads).ptr(), to_python(needs).ptr(), nullptr));
    if (!found) raise();
    std::vector<IValue> results;
    for (const py::handle grad : py::reinterpret_borrow<py::sequence>(found))
      results.push_back(grad.is_none() ? IValue() : IValue(THPVariable_Unpack(grad.ptr())));
    return results;
  };
}

// --- the module -------------------------------------------------------------------------------------------

// An entry with these parameters: (name,), or (name, default).
py::object entry_of(const Formula& formula, const py::sequence& parameters, size_t results, size_t positional,
                    bool casts) {
  auto entry =
      std::make_unique<Entry>(Entry{formula, {}, Stack(formula.arguments()), results, positional, casts});
  const auto& schema = formula.forward.schema();
  for (size_t i = 0; i < formula.arguments(); ++i) {
    const auto& argument = schema.arguments()[i];
    if (argument.default_value()) entry->defaults[i] = *argument.default_value();
    // Flags of results that the public function does not have.
    if (argument.type()->kind() == c10::TypeKind::BoolType && !argument.default_value())
      entry->defaults[i] = false;
  }
  TORCH_CHECK(parameters.size() <= kMaxParameters);
  for (const py::handle item : parameters) {
    const auto given = py::reinterpret_borrow<py::tuple>(item);
    Parameter parameter{given[0], given.size() > 1 ? py::object(given[1]) : py::object(), -1, {}, false};
    if (const auto position = schema.argumentIndexWithName(given[0].cast<std::string>())) {
      c10::TypePtr type = schema.arguments()[*position].type();
      const auto optional = type->cast<c10::OptionalType>();
      parameter.position = *position;
      parameter.kind = optional ? optional->getElementType()->kind() : type->kind();
      parameter.optional = optional != nullptr;
      bool records = false;
      if (parameter.default_ && !parameter.default_.is_none())
        TORCH_CHECK(convert(parameter.default_.ptr(), parameter.kind, entry->defaults[*position], records));
    }
    entry->parameters.push_back(std::move(parameter));
  }
  static PyMethodDef method = {"entry", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(&call)),
                               METH_FASTCALL | METH_KEYWORDS, nullptr};
  const auto self = py::reinterpret_steal<py::object>(PyCapsule_New(entry.release(), nullptr, nullptr));
  return py::reinterpret_steal<py::object>(PyCFunction_New(&method, self.ptr()));
}

}  // namespace
}  // namespace liger

PYBIND11_MODULE(_C, m, pybind11::mod_gil_not_used()) {
  using liger::Formula;
  // Formulas and entries live as long as the process.
  pybind11::class_<Formula, std::unique_ptr<Formula, pybind11::nodelete>>(m, "Formula")
      .def_property_readonly("results", &Formula::outputs)
      .def_property_readonly("public_results", &Formula::public_results)
      .def("entry", &liger::entry_of);
  const auto kept = pybind11::return_value_policy::reference;
  m.def(
      "formula_of_schemas",
      [](const std::string& op, pybind11::object backward) {
        return liger::formula_of_schemas(op, liger::backward_of(std::move(backward))).release();
      },
      kept);
  m.def(
      "formula_of_cross_entropy",
      [](pybind11::object backward) {
        return liger::formula_of_cross_entropy(liger::backward_of(std::move(backward))).release();
      },
      kept);
}
