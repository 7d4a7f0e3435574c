// SPDX-License-Identifier: BSD-3-Clause
#include <algorithm>
#include <cfloat>
#include <cmath>

#include "host/checks/parts.h"

namespace liger {

bool in_float32(double value) {
  return std::abs(value) <= FLT_MAX;
}

bool is_positive_float32(double value) {
  return FLT_MIN <= value && value <= FLT_MAX;
}

std::string float32_range(double value) {
  if (std::abs(value) > FLT_MAX && std::isfinite(value)) return ", in the range of float32";
  return value > 0.0 && value < FLT_MIN ? ", in the range of normal float32 numbers" : "";
}

std::string dtype_name(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Half:
      return "float16";
    case ScalarType::BFloat16:
      return "bfloat16";
    case ScalarType::Float:
      return "float32";
    case ScalarType::Double:
      return "float64";
    case ScalarType::Byte:
      return "uint8";
    case ScalarType::Char:
      return "int8";
    case ScalarType::Short:
      return "int16";
    case ScalarType::Int:
      return "int32";
    case ScalarType::Long:
      return "int64";
    case ScalarType::Bool:
      return "bool";
    case ScalarType::ComplexFloat:
      return "complex64";
    case ScalarType::ComplexDouble:
      return "complex128";
    default:
      return "dtype #" + std::to_string(static_cast<int>(dtype));
  }
}

std::ostream& operator<<(std::ostream& out, const ShapeText& shape) {
  out << '(';
  const auto sizes = shape.tensor.sizes();
  for (size_t i = 0; i < sizes.size(); ++i) out << (i ? ", " : "") << sizes[i];
  return out << (sizes.size() == 1 ? ",)" : ")");
}

bool is_real_floating(ScalarType dtype) {
  return dtype == ScalarType::Half || dtype == ScalarType::BFloat16 || dtype == ScalarType::Float ||
         dtype == ScalarType::Double;
}

bool same_device(const Tensor& a, const Tensor& b) {
  return a.device() == b.device();
}

std::string device_text(const Tensor& tensor) {
  if (tensor.is_cuda()) return "cuda:" + std::to_string(tensor.get_device_index());
  if (tensor.is_cpu()) return "cpu";
  const auto type = tensor.device().type();
  if (type == torch::headeronly::DeviceType::Meta) return "meta";
  return "device type #" + std::to_string(static_cast<int>(type));
}

// The texts of these messages are made only if they are needed: most calls have no error.
void check_floating(const std::string& op, const char* name, const Tensor& tensor) {
  if (is_real_floating(tensor.scalar_type())) return;
  require(false, op, ": ", name, " has dtype ", dtype_name(tensor.scalar_type()),
          ", expected float16, bfloat16, float32 or float64");
}

void check_same_device(const std::string& op, const char* name, const Tensor& tensor, const char* other_name,
                       const Tensor& other) {
  if (same_device(tensor, other)) return;
  require(false, op, ": ", name, " is on ", device_text(tensor), ", expected the device of ", other_name,
          ", ", device_text(other));
}

void check_same_dtype(const std::string& op, const char* name, const Tensor& tensor, const char* other_name,
                      const Tensor& other) {
  if (tensor.scalar_type() == other.scalar_type()) return;
  require(false, op, ": ", name, " has dtype ", dtype_name(tensor.scalar_type()), ", expected the dtype of ",
          other_name, ", ", dtype_name(other.scalar_type()));
}

void check_same_shape(const std::string& op, const char* name, const Tensor& tensor, const char* other_name,
                      const Tensor& other) {
  const auto sizes = tensor.sizes(), other_sizes = other.sizes();
  if (std::equal(sizes.begin(), sizes.end(), other_sizes.begin(), other_sizes.end())) return;
  require(false, op, ": ", name, " has shape ", shape_text(tensor), ", expected the shape of ", other_name,
          ", ", shape_text(other));
}

void check_vector(const std::string& op, const char* name, const Tensor& tensor, int64_t length,
                  const char* of) {
  if (tensor.dim() == 1 && tensor.size(0) == length) return;
  require(false, op, ": ", name, " has shape ", shape_text(tensor), ", expected (", length, ",), ", of);
}

namespace {

// x is called `x_name` in messages.
void check_norm_parameter(const std::string& op, const char* name, const Tensor& parameter, const Tensor& x,
                          int64_t length, const char* of, const char* x_name = "x") {
  check_vector(op, name, parameter, length, of);
  require(parameter.scalar_type() == x.scalar_type() || parameter.scalar_type() == ScalarType::Float, op,
          ": ", name, " has dtype ", dtype_name(parameter.scalar_type()), ", expected the dtype of ", x_name,
          ", ", dtype_name(x.scalar_type()), ", or float32");
  check_same_device(op, name, parameter, x_name, x);
}

void check_eps(const std::string& op, double eps) {
  require(in_float32(eps) && eps >= 0.0, op, ": eps is ", eps, ", expected a finite value of at least 0",
          float32_range(eps));
}

void check_rms_options(const std::string& op, const std::string& casting_mode, double eps, double offset) {
  require(casting_mode == "llama" || casting_mode == "gemma" || casting_mode == "none", op,
          ": casting_mode is '", casting_mode, "', expected 'llama', 'gemma' or 'none'");
  check_eps(op, eps);
  require(in_float32(offset), op, ": offset is ", offset, ", expected a finite value", float32_range(offset));
}

void check_heads(const std::string& op, const Tensor& q, const Tensor& k, const Tensor& cos,
                 const Tensor& sin) {
  require(q.dim() == 4, op, ": q has shape ", shape_text(q), ", expected (batch, heads, tokens, head_dim)");
  require(k.dim() == 4, op, ": k has shape ", shape_text(k), ", expected (batch, heads, tokens, head_dim)");
  check_floating(op, "q", q);
  check_same_dtype(op, "k", k, "q", q);
  check_same_device(op, "k", k, "q", q);
  require(k.size(0) == q.size(0) && k.size(2) == q.size(2) && k.size(3) == q.size(3), op, ": k has shape ",
          shape_text(k), ", expected the batch, tokens and head_dim of q, ", shape_text(q));
  check_floating(op, "cos", cos);
  check_same_shape(op, "sin", sin, "cos", cos);
  check_same_dtype(op, "sin", sin, "cos", cos);
  check_same_device(op, "cos", cos, "q", q);
  check_same_device(op, "sin", sin, "q", q);
  const bool shaped =
      (cos.dim() == 2 && cos.size(0) == q.size(2)) ||
      (cos.dim() == 3 && (cos.size(0) == 1 || cos.size(0) == q.size(0)) && cos.size(1) == q.size(2));
  require(shaped, op, ": cos has shape ", shape_text(cos),
          ", expected (tokens, rotary_dim), (1, tokens, rotary_dim)",
          " or (batch, tokens, rotary_dim) for q of shape ", shape_text(q));
  const int64_t rotary = cos.size(-1);
  require(rotary <= q.size(3) && rotary % 2 == 0, op, ": cos has a rotary_dim of ", rotary,
          ", expected an even number of at most head_dim, ", q.size(3));
}

}  // namespace

void check_rope(const Tensor& q, const Tensor& k, const Tensor& cos, const Tensor& sin,
                bool /*interleaved*/) {
  check_heads("rope", q, k, cos, sin);
}

void check_qk_norm_rope(const std::string& op, const Tensor& q, const Tensor& k,
                        const std::optional<Tensor>& q_weight, const std::optional<Tensor>& k_weight,
                        const Tensor& cos, const Tensor& sin, const std::string& casting_mode, double eps,
                        double offset) {
  check_heads(op, q, k, cos, sin);
  const int64_t head_dim = q.size(3);
  if (q_weight) check_norm_parameter(op, "q_weight", *q_weight, q, head_dim, "the head_dim of q", "q");
  if (k_weight) {
    check_same_device(op, "k_weight", *k_weight, "q", q);
    check_norm_parameter(op, "k_weight", *k_weight, k, head_dim, "the head_dim of k", "k");
  }
  check_rms_options(op, casting_mode, eps, offset);
}

void check_tiled_mlp(const Tensor& x, const Tensor& gate_weight, const std::optional<Tensor>& up_weight,
                     const Tensor& down_weight, const std::optional<Tensor>& gate_bias,
                     const std::optional<Tensor>& up_bias, const std::optional<Tensor>& down_bias,
                     const std::string& activation, std::optional<int64_t> num_shards,
                     std::optional<int64_t> memory_budget) {
  const std::string op = "tiled_mlp";
  require(x.dim() >= 1, op, ": x has shape (), expected at least one dimension");
  check_floating(op, "x", x);
  const int64_t hidden = x.size(-1);
  require(gate_weight.dim() == 2 && gate_weight.size(1) == hidden, op, ": gate_weight has shape ",
          shape_text(gate_weight), ", expected (", up_weight ? "intermediate" : "2 * intermediate",
          ", hidden) with the last dimension of x, ", hidden, "; a sharded weight must be gathered first");
  require(up_weight || gate_weight.size(0) % 2 == 0, op, ": gate_weight has ", gate_weight.size(0),
          " rows, expected an even number: without up_weight it holds gate and up, one above the other");
  if (up_weight) check_same_shape(op, "up_weight", *up_weight, "gate_weight", gate_weight);
  const int64_t intermediate = up_weight ? gate_weight.size(0) : gate_weight.size(0) / 2;
  require(down_weight.dim() == 2 && down_weight.size(0) == hidden && down_weight.size(1) == intermediate, op,
          ": down_weight has shape ", shape_text(down_weight), ", expected (", hidden, ", ", intermediate,
          "), (hidden, intermediate)");
  require(up_weight || !up_bias, op,
          ": up_bias was given without up_weight, expected gate_bias to hold both biases");
  if (gate_bias) check_vector(op, "gate_bias", *gate_bias, gate_weight.size(0), "the rows of gate_weight");
  if (up_bias) check_vector(op, "up_bias", *up_bias, intermediate, "the rows of up_weight");
  if (down_bias) check_vector(op, "down_bias", *down_bias, hidden, "the rows of down_weight");
  const auto check_like_x = [&](const char* name, const std::optional<Tensor>& tensor) {
    if (!tensor) return;
    check_same_dtype(op, name, *tensor, "x", x);
    check_same_device(op, name, *tensor, "x", x);
  };
  check_like_x("gate_weight", gate_weight);
  check_like_x("up_weight", up_weight);
  check_like_x("down_weight", down_weight);
  check_like_x("gate_bias", gate_bias);
  check_like_x("up_bias", up_bias);
  check_like_x("down_bias", down_bias);
  require(activation == "silu" || activation == "gelu_tanh" || activation == "gelu", op, ": activation is '",
          activation, "', expected 'silu', 'gelu_tanh' or 'gelu'");
  if (num_shards) {
    const int64_t tokens = hidden > 0 ? x.numel() / hidden : 0;
    require(*num_shards >= 1, op, ": num_shards is ", *num_shards, ", expected at least 1");
    require(*num_shards <= std::max<int64_t>(tokens, 1), op, ": num_shards is ", *num_shards,
            ", expected at most the number of tokens, ", tokens);
  }
  require(!memory_budget || *memory_budget > 0, op, ": memory_budget is ", memory_budget.value_or(0),
          ", expected a positive number of bytes or None");
}

}  // namespace liger
