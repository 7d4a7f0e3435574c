// SPDX-License-Identifier: BSD-3-Clause

// Argument checks of declared ops, from the line of shapes of their declaration (declarations.h). The CUDA
// ops call check_arguments directly; the Triton and torch backends through liger::check_arguments, with the
// same messages.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <variant>
#include <vector>

#include "host/checks/checks.h"

namespace liger {

// An argument by its name in the schema; None has no value.
struct NamedArgument {
  const char* name;
  std::variant<std::monostate, const Tensor*, double, int64_t, const std::string*> value;

  NamedArgument(const char* name, const Tensor& tensor) : name(name), value(&tensor) {}
  NamedArgument(const char* name, const std::optional<Tensor>& tensor) : name(name) {
    if (tensor) value = &*tensor;
  }
  NamedArgument(const char* name, double number) : name(name), value(number) {}
  NamedArgument(const char* name, int64_t number) : name(name), value(number) {}
  NamedArgument(const char* name, std::optional<int64_t> number) : name(name) {
    if (number) value = *number;
  }
  NamedArgument(const char* name, const std::string& text) : name(name), value(&text) {}

  const Tensor* tensor() const {
    const auto* found = std::get_if<const Tensor*>(&value);
    return found ? *found : nullptr;
  }
};

// Throws for the first of these arguments that the declaration of `op` does not allow.
void check_arguments(const std::string& op, std::span<const NamedArgument> arguments);
inline void check_arguments(const std::string& op, std::initializer_list<NamedArgument> arguments) {
  check_arguments(op, std::span(arguments.begin(), arguments.size()));
}

// The same for arguments in the order of the schema, by type: its tensors, its numbers, its texts.
void check_arguments_by_type(const std::string& op, const std::vector<std::optional<Tensor>>& tensors,
                             const std::vector<std::optional<double>>& numbers,
                             const std::vector<std::string>& texts);

}  // namespace liger
