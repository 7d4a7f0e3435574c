// SPDX-License-Identifier: BSD-3-Clause
#include "host/checks/declared.h"

#include <algorithm>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "declarations.h"
#include "host/checks/parts.h"

namespace liger {
namespace {

// --- the line of shapes ------------------------------------------------------------------------------------

struct Shape {
  std::string like;               // the tensor that it has the shape and dtype of, or empty
  std::vector<std::string> dims;  // as in declarations.h
  bool is_statistic = false, is_parameter = false;
};

struct Option {
  enum Kind { kNotNegative, kFinite, kDivides, kIn };
  Kind kind;
  std::vector<std::string> words;  // of kDivides the dimension, of kIn the texts
};

struct Rules {
  std::string main;  // the tensor that names the dimensions
  // Few entries: a search by comparison is faster than a hash.
  std::vector<std::pair<std::string, Shape>> shapes;
  std::vector<std::pair<std::string, Option>> options;
  std::vector<std::string> tensors, numbers, texts;  // names of the arguments, in the order of the schema
  std::vector<bool> is_integer;                      // of the numbers

  // The entry of this name, or null.
  template <typename Value>
  static const Value* find(const std::vector<std::pair<std::string, Value>>& entries, std::string_view name) {
    for (const auto& [key, value] : entries)
      if (key == name) return &value;
    return nullptr;
  }

  const Shape* shape(std::string_view name) const {
    const Shape* found = find(shapes, name);
    return found || !name.starts_with("grad_") ? found : find(shapes, name.substr(5));
  }

  bool is_like_main(const Shape& shape) const { return &shape == &shapes[0].second || shape.like == main; }
};

std::vector<std::string> split(const std::string& text, const std::string& separators) {
  std::vector<std::string> parts;
  size_t begin = 0;
  while ((begin = text.find_first_not_of(separators, begin)) != std::string::npos) {
    const size_t end = std::min(text.find_first_of(separators, begin), text.size());
    parts.push_back(text.substr(begin, end - begin));
    begin = end;
  }
  return parts;
}

void read_tensors(Rules& rules, const std::string& names, const std::string& text) {
  Shape shape;
  shape.dims = split(text, " ");
  if (shape.dims[0] == "like") {
    shape.like = shape.dims[1];
    shape.dims.clear();
  } else if (shape.dims.back() == "f32") {
    shape.dims.pop_back();
    shape.is_statistic = shape.dims.back() != "or";
    if (!shape.is_statistic) shape.dims.pop_back();
  }
  shape.is_parameter = shape.like.empty() && shape.dims[0] != "..." && shape.dims[0] != "batch";
  for (const std::string& name : split(names, ", ")) {
    if (rules.main.empty()) rules.main = name;
    rules.shapes.emplace_back(name, shape);
  }
}

void read_option(Rules& rules, const std::string& text) {
  std::vector<std::string> words = split(text, " ");
  const std::string name = words[0], kind = words[1];
  words.erase(words.begin(), words.begin() + 2);
  const Option::Kind condition = kind == ">="        ? Option::kNotNegative
                                 : kind == "finite"  ? Option::kFinite
                                 : kind == "divides" ? Option::kDivides
                                                     : Option::kIn;
  rules.options.emplace_back(name, Option{condition, std::move(words)});
}

void read_arguments(Rules& rules, const std::string& schema) {
  const size_t begin = schema.find('(') + 1, end = schema.find(") -> ");
  for (const std::string& argument : split(schema.substr(begin, end - begin), ",")) {
    const std::vector<std::string> words = split(argument, " ");
    const std::string name = words[1].substr(0, words[1].find('='));
    if (words[0].starts_with("Tensor")) {
      rules.tensors.push_back(name);
    } else if (words[0].starts_with("float") || words[0].starts_with("int")) {
      rules.numbers.push_back(name);
      rules.is_integer.push_back(words[0].starts_with("int"));
    } else if (words[0] == "str") {
      rules.texts.push_back(name);
    }
  }
}

std::unordered_map<std::string, Rules> read_declarations() {
  std::unordered_map<std::string, Rules> all;
  for (const Declaration& declaration : declarations()) {
    Rules rules;
    for (const std::string& entry : split(declaration.shapes, ";")) {
      const size_t colon = entry.find(':');
      if (colon == std::string::npos)
        read_option(rules, entry);
      else
        read_tensors(rules, entry.substr(0, colon), entry.substr(colon + 1));
    }
    for (const std::string schema : declaration.schemas) {
      Rules& of_op = all[schema.substr(0, schema.find('('))] = rules;
      read_arguments(of_op, schema);
    }
  }
  return all;
}

const Rules& rules_of(const std::string& op) {
  static const std::unordered_map<std::string, Rules> all = read_declarations();
  return all.at(op);
}

// --- one call ----------------------------------------------------------------------------------------------

class Check {
 public:
  Check(const std::string& op, const Rules& rules, std::span<const NamedArgument> arguments)
      : op_(op), rules_(rules), arguments_(arguments) {}

  void run() {
    bool has_tensors = false;
    for (const NamedArgument& argument : arguments_) {
      const Shape* shape = Rules::find(rules_.shapes, argument.name);
      has_tensors |= shape != nullptr;
      if (!shape || !argument.tensor() || !rules_.is_like_main(*shape)) continue;
      name_ = argument.name;
      main_ = argument.tensor();
      break;
    }
    if (has_tensors) {
      // torch passes None for a required tensor as an undefined one.
      require(main_ != nullptr && main_->defined(), op_, ": ", rules_.main, " is None, expected a tensor");
      check_main();
    }
    // First the options: they are dimensions of tensors.
    for (const NamedArgument& argument : arguments_) check_option(argument);
    for (const NamedArgument& argument : arguments_)
      if (argument.tensor() && argument.tensor() != main_) check_tensor(argument.name, *argument.tensor());
  }

 private:
  const std::vector<std::string>& dims() const { return rules_.shapes[0].second.dims; }

  void check_main() {
    check_floating(op_, name_, *main_);
    const bool of_rows = dims()[0] == "...";
    const int64_t named =
        std::count_if(dims().begin(), dims().end(), [](const auto& d) { return d != "..."; });
    if (main_->dim() < std::max<int64_t>(named, 1)) {
      std::string expected = "at least one dimension";
      if (!of_rows) {
        expected = "(";
        for (const std::string& dim : dims()) expected += (expected.size() > 1 ? ", " : "") + dim;
        expected += ")";
      }
      require(false, op_, ": ", name_, " has shape ", shape_text(*main_), ", expected ", expected);
    }
    lead_ = of_rows ? main_->dim() - (static_cast<int64_t>(dims().size()) - 1) : 1;
    if (dims().back()[0] == '2')
      require(main_->size(-1) % 2 == 0, op_, ": ", name_, " has a last dimension of ", main_->size(-1),
              ", expected an even number");
  }

  // The size of a dimension; nothing if it is missing in this call.
  std::optional<int64_t> size(const std::string& dim) const {
    const size_t slash = dim.find('/');
    if (slash != std::string::npos) {
      const std::optional<int64_t> divisor = size(dim.substr(slash + 1));
      return divisor ? std::optional(*size(dim.substr(0, slash)) / *divisor) : std::nullopt;
    }
    if (std::isdigit(dim[0])) return std::stoll(dim);
    for (size_t i = 1; i < dims().size(); ++i) {
      if (dims()[i] == dim) return main_->size(lead_ + static_cast<int64_t>(i) - 1);
      if (dims()[i] == "2" + dim) return main_->size(-1) / 2;
    }
    for (const NamedArgument& argument : arguments_)
      if (argument.name == dim)
        if (const auto* number = std::get_if<int64_t>(&argument.value)) return *number;
    return std::nullopt;
  }

  // The text for a dimension of the main tensor in messages.
  std::string described(const std::string& dim) const {
    return "the " + (dim == dims().back() ? "last dimension" : dim) + " of " + name_;
  }

  void check_tensor(const char* name, const Tensor& tensor) {
    const Shape* shape = rules_.shape(name);
    if (!shape) return;
    if (rules_.is_like_main(*shape)) {
      check_same_shape(op_, name, tensor, name_, *main_);
      check_same_dtype(op_, name, tensor, name_, *main_);
    } else if (shape->is_parameter) {
      check_parameter(name, tensor, *shape);
    } else {
      std::vector<int64_t> expected;
      for (int64_t d = 0; d < lead_; ++d) expected.push_back(main_->size(d));
      for (size_t i = 1; i < shape->dims.size(); ++i)
        if (const auto found = size(shape->dims[i])) expected.push_back(*found);
      shape->is_statistic ? check_statistic(name, tensor, expected) : check_rows(name, tensor, expected);
    }
    check_same_device(op_, name, tensor, name_, *main_);
  }

  void check_rows(const char* name, const Tensor& tensor, const std::vector<int64_t>& expected) {
    const auto sizes = tensor.sizes();
    if (!std::equal(sizes.begin(), sizes.end(), expected.begin(), expected.end())) {
      std::string text = "(";
      for (const int64_t n : expected) text += (text.size() > 1 ? ", " : "") + std::to_string(n);
      text += expected.size() == 1 ? ",)" : ")";
      require(false, op_, ": ", name, " has shape ", shape_text(tensor), ", expected ", text);
    }
    check_same_dtype(op_, name, tensor, name_, *main_);
  }

  void check_statistic(const char* name, const Tensor& tensor, const std::vector<int64_t>& expected) {
    int64_t elements = 1;
    for (const int64_t n : expected) elements *= n;
    const ScalarType dtype =
        main_->scalar_type() == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
    if (tensor.scalar_type() == dtype && tensor.numel() == elements) return;
    require(false, op_, ": ", name, " has shape ", shape_text(tensor), " and dtype ",
            dtype_name(tensor.scalar_type()), ", expected the ", dtype_name(dtype), " result of the forward");
  }

  void check_parameter(const char* name, const Tensor& tensor, const Shape& shape) {
    const std::string& dim = shape.dims[0];
    const int64_t length = *size(dim);
    if (tensor.dim() != 1 || tensor.size(0) != length)
      require(false, op_, ": ", name, " has shape ", shape_text(tensor), ", expected (", length, ",)",
              std::isdigit(dim[0]) ? "" : ", " + described(dim));
    if (parameter_) return check_same_dtype(op_, name, tensor, parameter_name_, *parameter_);
    const ScalarType dtype = tensor.scalar_type();
    if (dtype != main_->scalar_type() && dtype != ScalarType::Float)
      require(false, op_, ": ", name, " has dtype ", dtype_name(dtype), ", expected the dtype of ", name_,
              ", ", dtype_name(main_->scalar_type()), ", or float32");
    parameter_ = &tensor;
    parameter_name_ = name;
  }

  void check_option(const NamedArgument& argument) const {
    const Option* option = Rules::find(rules_.options, argument.name);
    if (!option || std::holds_alternative<std::monostate>(argument.value)) return;
    const auto& [kind, words] = *option;
    const char* name = argument.name;
    if (kind == Option::kIn) {
      const std::string& text = *std::get<const std::string*>(argument.value);
      if (std::find(words.begin(), words.end(), text) != words.end()) return;
      std::string expected;
      for (size_t i = 0; i < words.size(); ++i)
        expected += (i == 0 ? "'" : i + 1 < words.size() ? ", '" : " or '") + words[i] + "'";
      require(false, op_, ": ", name, " is '", text, "', expected ", expected);
    } else if (kind == Option::kDivides) {
      if (!main_) return;
      const int64_t number = std::get<int64_t>(argument.value), whole = *size(words[0]);
      if (number <= 0 || whole % number != 0)
        require(false, op_, ": ", name, " is ", number, ", expected a divisor of ", described(words[0]), ", ",
                whole);
    } else {
      const double number = std::get<double>(argument.value);
      if (!in_float32(number) || (kind == Option::kNotNegative && number < 0.0))
        require(false, op_, ": ", name, " is ", number, ", expected a finite value",
                kind == Option::kFinite ? "" : " of at least 0", float32_range(number));
    }
  }

  const std::string& op_;
  const Rules& rules_;
  std::span<const NamedArgument> arguments_;
  const char* name_ = nullptr;    // of the main tensor
  const Tensor* main_ = nullptr;  // the first argument with the shape of the tensor that names the dimensions
  int64_t lead_ = 0;              // its independent dimensions
  const char* parameter_name_ = nullptr;
  const Tensor* parameter_ = nullptr;  // the first one
};

}  // namespace

void check_arguments(const std::string& op, std::span<const NamedArgument> arguments) {
  Check(op, rules_of(op), arguments).run();
}

void check_arguments_by_type(const std::string& op, const std::vector<std::optional<Tensor>>& tensors,
                             const std::vector<std::optional<double>>& numbers,
                             const std::vector<std::string>& texts) {
  const Rules& rules = rules_of(op);
  std::vector<NamedArgument> arguments;
  for (size_t i = 0; i < tensors.size(); ++i) arguments.emplace_back(rules.tensors[i].c_str(), tensors[i]);
  for (size_t i = 0; i < numbers.size(); ++i) {
    const char* name = rules.numbers[i].c_str();
    if (rules.is_integer[i])
      arguments.emplace_back(name,
                             numbers[i] ? std::optional(static_cast<int64_t>(*numbers[i])) : std::nullopt);
    else if (numbers[i])
      arguments.emplace_back(name, *numbers[i]);
  }
  for (size_t i = 0; i < texts.size(); ++i) arguments.emplace_back(rules.texts[i].c_str(), texts[i]);
  check_arguments(op, arguments);
}

}  // namespace liger
