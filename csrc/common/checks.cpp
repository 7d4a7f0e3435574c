#include "common/checks.h"

#include <algorithm>

namespace liger {

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

std::string shape_text(const Tensor& tensor) {
  std::ostringstream text;
  text << '(';
  const auto sizes = tensor.sizes();
  for (size_t i = 0; i < sizes.size(); ++i) text << (i ? ", " : "") << sizes[i];
  text << (sizes.size() == 1 ? ",)" : ")");
  return text.str();
}

bool is_real_floating(ScalarType dtype) {
  return dtype == ScalarType::Half || dtype == ScalarType::BFloat16 || dtype == ScalarType::Float ||
         dtype == ScalarType::Double;
}

bool same_device(const Tensor& a, const Tensor& b) {
  return a.device() == b.device();
}

std::string device_text(const Tensor& tensor) {
  const char* kind = tensor.is_cuda() ? "cuda" : tensor.is_cpu() ? "cpu" : "another device type";
  return tensor.is_cuda() ? std::string(kind) + ":" + std::to_string(tensor.get_device_index()) : kind;
}

namespace {

void check_floating(const std::string& op, const char* name, const Tensor& tensor) {
  require(is_real_floating(tensor.scalar_type()), op, ": ", name, " has dtype ",
          dtype_name(tensor.scalar_type()), ", expected float16, bfloat16, float32 or float64");
}

void check_same_device(const std::string& op, const char* name, const Tensor& tensor, const char* other_name,
                       const Tensor& other) {
  require(same_device(tensor, other), op, ": ", name, " is on ", device_text(tensor),
          ", expected the device of ", other_name, ", ", device_text(other));
}

void check_same_dtype(const std::string& op, const char* name, const Tensor& tensor, const char* other_name,
                      const Tensor& other) {
  require(tensor.scalar_type() == other.scalar_type(), op, ": ", name, " has dtype ",
          dtype_name(tensor.scalar_type()), ", expected that of ", other_name, ", ",
          dtype_name(other.scalar_type()));
}

void check_same_shape(const std::string& op, const char* name, const Tensor& tensor, const char* other_name,
                      const Tensor& other) {
  bool same = tensor.dim() == other.dim();
  for (int64_t d = 0; same && d < tensor.dim(); ++d) same = tensor.size(d) == other.size(d);
  require(same, op, ": ", name, " has shape ", shape_text(tensor), ", expected that of ", other_name, ", ",
          shape_text(other));
}

void check_vector(const std::string& op, const char* name, const Tensor& tensor, int64_t length,
                  const char* of) {
  require(tensor.dim() == 1 && tensor.size(0) == length, op, ": ", name, " has shape ", shape_text(tensor),
          ", expected (", length, ",), ", of);
}

void check_norm_parameter(const std::string& op, const char* name, const Tensor& parameter, const Tensor& x,
                          int64_t length, const char* of) {
  check_vector(op, name, parameter, length, of);
  require(parameter.scalar_type() == x.scalar_type() || parameter.scalar_type() == ScalarType::Float, op,
          ": ", name, " has dtype ", dtype_name(parameter.scalar_type()), ", expected that of x, ",
          dtype_name(x.scalar_type()), ", or float32");
  check_same_device(op, name, parameter, "x", x);
}

void check_affine(const std::string& op, const Tensor& x, const std::optional<Tensor>& weight,
                  const std::optional<Tensor>& bias, int64_t length, const char* of) {
  if (weight) check_norm_parameter(op, "weight", *weight, x, length, of);
  if (bias) check_norm_parameter(op, "bias", *bias, x, length, of);
  if (weight && bias) check_same_dtype(op, "bias", *bias, "weight", *weight);
}

void check_ce_options(const std::string& op, const Tensor& like, int64_t rows, int64_t vocab,
                      const Tensor& target, const std::optional<Tensor>& ce_weight,
                      const std::optional<Tensor>& token_weight, const std::optional<Tensor>& denominator,
                      double label_smoothing, std::optional<double> softcap, const std::string& reduction) {
  require(target.scalar_type() == ScalarType::Long || target.scalar_type() == ScalarType::Int, op,
          ": target has dtype ", dtype_name(target.scalar_type()),
          ", expected int64 or int32 class indices (class probabilities are not supported)");
  check_vector(op, "target", target, rows, "one class index per row");
  check_same_device(op, "target", target, "the rows", like);
  if (ce_weight) {
    check_floating(op, "ce_weight", *ce_weight);
    check_vector(op, "ce_weight", *ce_weight, vocab, "one weight per class");
    check_same_device(op, "ce_weight", *ce_weight, "the rows", like);
  }
  if (token_weight) {
    check_floating(op, "token_weight", *token_weight);
    check_vector(op, "token_weight", *token_weight, rows, "one weight per row");
    check_same_device(op, "token_weight", *token_weight, "the rows", like);
  }
  if (denominator) {
    require(denominator->numel() == 1, op, ": denominator has shape ", shape_text(*denominator),
            ", expected one element");
    require(is_real_floating(denominator->scalar_type()) || denominator->scalar_type() == ScalarType::Long ||
                denominator->scalar_type() == ScalarType::Int,
            op, ": denominator has dtype ", dtype_name(denominator->scalar_type()),
            ", expected a floating dtype, int64 or int32");
    check_same_device(op, "denominator", *denominator, "the rows", like);
    require(reduction != "none", op,
            ": denominator was given with reduction 'none', expected 'mean' or 'sum'");
  }
  require(label_smoothing >= 0.0 && label_smoothing <= 1.0, op, ": label_smoothing is ", label_smoothing,
          ", expected a value between 0 and 1");
  require(!softcap || *softcap > 0.0, op, ": softcap is ", softcap.value_or(0.0),
          ", expected a positive value or None");
  require(reduction == "mean" || reduction == "sum" || reduction == "none", op, ": reduction is '", reduction,
          "', expected 'mean', 'sum' or 'none'");
}

bool is_divergence(const std::string& name) {
  return name == "forward_kl" || name == "reverse_kl" || name == "jsd" || name == "tvd";
}

bool is_topk(const std::string& name) {
  return name == "topk_tail" || name == "topk";
}

void check_divergence_options(const std::string& op, const Tensor& like, const std::optional<Tensor>& target,
                              double beta, double temperature) {
  require(beta >= 0.0 && beta <= 1.0, op, ": beta is ", beta, ", expected a value between 0 and 1");
  require(temperature > 0.0, op, ": temperature is ", temperature, ", expected a positive value");
  if (target) {
    require(target->scalar_type() == ScalarType::Long || target->scalar_type() == ScalarType::Int, op,
            ": target has dtype ", dtype_name(target->scalar_type()), ", expected int64 or int32");
    check_vector(op, "target", *target, like.size(0), "one value per row");
    check_same_device(op, "target", *target, "the rows", like);
  }
}

void check_topk_teacher(const std::string& op, const Tensor& input, const Tensor& teacher,
                        const std::optional<Tensor>& indices) {
  check_floating(op, "teacher", teacher);
  require(teacher.size(1) > 0, op, ": teacher has shape ", shape_text(teacher),
          ", expected (rows, k) log-probabilities of at least one class");
  require(indices.has_value(), op, ": no teacher_indices, expected the classes of the log-probabilities");
  check_same_device(op, "teacher", teacher, "input", input);
  check_same_shape(op, "teacher_indices", *indices, "teacher", teacher);
  check_same_device(op, "teacher_indices", *indices, "input", input);
  require(indices->scalar_type() == ScalarType::Long || indices->scalar_type() == ScalarType::Int, op,
          ": teacher_indices has dtype ", dtype_name(indices->scalar_type()), ", expected int64 or int32");
}

}  // namespace

void check_rms_norm(const std::string& op, const Tensor& x, const std::optional<Tensor>& residual,
                    const std::optional<Tensor>& weight, const std::string& casting_mode) {
  require(x.dim() >= 1, op, ": x has shape (), expected at least one dimension");
  check_floating(op, "x", x);
  if (residual) {
    check_same_shape(op, "residual", *residual, "x", x);
    check_same_dtype(op, "residual", *residual, "x", x);
    check_same_device(op, "residual", *residual, "x", x);
  }
  if (weight) check_norm_parameter(op, "weight", *weight, x, x.size(-1), "the last dimension of x");
  require(casting_mode == "llama" || casting_mode == "gemma" || casting_mode == "none", op,
          ": casting_mode is '", casting_mode, "', expected 'llama', 'gemma' or 'none'");
}

void check_layer_norm(const std::string& op, const Tensor& x, const std::optional<Tensor>& weight,
                      const std::optional<Tensor>& bias) {
  require(x.dim() >= 1, op, ": x has shape (), expected at least one dimension");
  check_floating(op, "x", x);
  check_affine(op, x, weight, bias, x.size(-1), "the last dimension of x");
}

void check_group_norm(const std::string& op, const Tensor& x, int64_t num_groups,
                      const std::optional<Tensor>& weight, const std::optional<Tensor>& bias) {
  require(x.dim() >= 2, op, ": x has shape ", shape_text(x), ", expected (batch, channels, ...)");
  check_floating(op, "x", x);
  require(num_groups > 0 && x.size(1) % num_groups == 0, op, ": num_groups is ", num_groups,
          ", expected a divisor of the ", x.size(1), " channels of x");
  check_affine(op, x, weight, bias, x.size(1), "the channels of x");
}

void check_rope(const Tensor& q, const Tensor& k, const Tensor& cos, const Tensor& sin,
                bool /*interleaved*/) {
  const std::string op = "rope";
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

void check_rowwise(const std::string& op, const std::string& name, const Tensor& x,
                   const std::optional<Tensor>& grad_y) {
  check_floating(op, name.c_str(), x);
  require(x.dim() >= 1, op, ": ", name, " has shape (), expected at least one dimension");
  if (!grad_y) return;
  check_same_shape(op, "grad_y", *grad_y, name.c_str(), x);
  check_same_dtype(op, "grad_y", *grad_y, name.c_str(), x);
  check_same_device(op, "grad_y", *grad_y, name.c_str(), x);
}

void check_approximate(const std::string& op, const std::string& approximate) {
  require(approximate == "none" || approximate == "tanh", op, ": approximate is '", approximate,
          "', expected 'none' or 'tanh'");
}

void check_gated(const std::string& op, const Tensor& gate, const std::optional<Tensor>& up,
                 const std::optional<Tensor>& grad_out) {
  const char* first = up ? "gate" : "gate_up";
  check_floating(op, first, gate);
  require(gate.dim() >= 1, op, ": ", first, " has shape (), expected at least one dimension");
  if (up) {
    check_same_shape(op, "up", *up, "gate", gate);
    check_same_dtype(op, "up", *up, "gate", gate);
    check_same_device(op, "up", *up, "gate", gate);
  } else {
    require(gate.size(-1) % 2 == 0, op, ": gate_up has a last dimension of ", gate.size(-1),
            ", expected an even number (gate and up side by side)");
  }
  if (grad_out) {
    check_same_dtype(op, "grad_out", *grad_out, first, gate);
    check_same_device(op, "grad_out", *grad_out, first, gate);
    require(grad_out->numel() * (up ? 1 : 2) == gate.numel(), op, ": grad_out has shape ",
            shape_text(*grad_out), ", expected that of the product for ", first, " of shape ",
            shape_text(gate));
  }
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

void check_cross_entropy(const std::string& op, const Tensor& logits, const Tensor& target,
                         const std::optional<Tensor>& ce_weight, const std::optional<Tensor>& token_weight,
                         const std::optional<Tensor>& denominator, double label_smoothing,
                         std::optional<double> softcap, const std::string& reduction) {
  require(logits.dim() == 2 && logits.size(1) > 0, op, ": logits has shape ", shape_text(logits),
          ", expected (rows, classes) with at least one class");
  check_floating(op, "logits", logits);
  check_ce_options(op, logits, logits.size(0), logits.size(1), target, ce_weight, token_weight, denominator,
                   label_smoothing, softcap, reduction);
}

void check_fused_linear_ce(const Tensor& input, const Tensor& weight, const Tensor& target,
                           const std::optional<Tensor>& bias, const std::optional<Tensor>& ce_weight,
                           const std::optional<Tensor>& token_weight,
                           const std::optional<Tensor>& denominator, double label_smoothing,
                           std::optional<double> softcap, const std::string& reduction,
                           std::optional<ScalarType> accum_dtype, std::optional<int64_t> memory_budget) {
  const std::string op = "fused_linear_ce";
  require(input.dim() == 2, op, ": input has shape ", shape_text(input), ", expected (rows, hidden)");
  require(weight.dim() == 2 && weight.size(1) == input.size(1), op, ": weight has shape ", shape_text(weight),
          ", expected (vocab, hidden) with the hidden size of input, ", input.size(1));
  require(weight.size(0) > 0, op, ": weight has shape ", shape_text(weight),
          ", expected at least one row; a sharded weight must be gathered first");
  check_floating(op, "input", input);
  check_same_dtype(op, "weight", weight, "input", input);
  check_same_device(op, "weight", weight, "input", input);
  if (bias) {
    check_vector(op, "bias", *bias, weight.size(0), "one value per class");
    check_same_dtype(op, "bias", *bias, "input", input);
    check_same_device(op, "bias", *bias, "input", input);
  }
  check_ce_options(op, input, input.size(0), weight.size(0), target, ce_weight, token_weight, denominator,
                   label_smoothing, softcap, reduction);
  require(!accum_dtype || *accum_dtype == ScalarType::Float || *accum_dtype == input.scalar_type(), op,
          ": accum_dtype is ", dtype_name(accum_dtype.value_or(ScalarType::Float)),
          ", expected float32, the dtype of", " input, ", dtype_name(input.scalar_type()), ", or None");
  require(!memory_budget || *memory_budget > 0, op, ": memory_budget is ", memory_budget.value_or(0),
          ", expected a positive number of bytes or None");
}

void check_divergence(const std::string& op, const Tensor& student, const Tensor& teacher,
                      const std::optional<Tensor>& target, const std::optional<Tensor>& row_weight,
                      const std::string& divergence, double beta, double temperature, bool log_probs) {
  require(student.dim() == 2 && student.size(1) > 0, op, ": student has shape ", shape_text(student),
          ", expected (rows, classes) with at least one class");
  check_floating(op, "student", student);
  check_same_shape(op, "teacher", teacher, "student", student);
  check_same_dtype(op, "teacher", teacher, "student", student);
  check_same_device(op, "teacher", teacher, "student", student);
  require(is_divergence(divergence), op, ": divergence is '", divergence,
          "', expected 'forward_kl', 'reverse_kl', 'jsd' or 'tvd'");
  check_divergence_options(op, student, target, beta, temperature);
  if (row_weight) {
    if (row_weight->dim() > 0) {
      check_vector(op, "row_weight", *row_weight, student.size(0), "one value per row");
    }
    const ScalarType wide =
        student.scalar_type() == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
    require(row_weight->scalar_type() == wide, op, ": row_weight has dtype ",
            dtype_name(row_weight->scalar_type()), ", expected ", dtype_name(wide));
    check_same_device(op, "row_weight", *row_weight, "student", student);
  }
  require(!log_probs || temperature == 1.0, op, ": temperature is ", temperature,
          " with log_probs, expected 1: log-probabilities are logits too, so pass them without log_probs");
}

void check_fused_linear_divergence(const Tensor& input, const Tensor& weight, const Tensor& teacher,
                                   const std::optional<Tensor>& teacher_weight,
                                   const std::optional<Tensor>& teacher_indices,
                                   const std::optional<Tensor>& target, const std::optional<Tensor>& bias,
                                   const std::optional<Tensor>& teacher_bias,
                                   const std::optional<Tensor>& row_weight, const std::string& divergence,
                                   double beta, double temperature, double soft, double hard,
                                   std::optional<ScalarType> accum_dtype,
                                   std::optional<int64_t> memory_budget) {
  const bool kl = divergence == "forward_kl" || divergence == "reverse_kl", topk = is_topk(divergence);
  const std::string op = "fused_linear_" + (kl ? std::string("kl_div") : topk ? "topk" : divergence);
  require(is_divergence(divergence) || topk || divergence == "cosine", op, ": divergence is '", divergence,
          "', expected 'forward_kl', 'reverse_kl', 'jsd', 'tvd', 'cosine', 'topk_tail' or 'topk'");
  require(soft >= 0.0 && hard >= 0.0 && soft + hard > 0.0, op, ": soft is ", soft, " and hard is ", hard,
          ", expected factors that are not negative, and not both 0");
  require(hard == 0.0 || target.has_value(), op,
          ": no target, expected one for the cross entropy, as hard is ", hard);
  require(input.dim() == 2, op, ": input has shape ", shape_text(input), ", expected (rows, hidden)");
  require(weight.dim() == 2 && weight.size(1) == input.size(1), op, ": weight has shape ", shape_text(weight),
          ", expected (vocab, hidden) with the hidden size of input, ", input.size(1));
  const int64_t vocab = weight.size(0);
  require(vocab > 0, op, ": weight has shape ", shape_text(weight), ", expected at least one row");
  check_floating(op, "input", input);
  require(teacher.dim() == 2 && teacher.size(0) == input.size(0), op, ": teacher has shape ",
          shape_text(teacher), ", expected as many rows as input, ", input.size(0));
  require(topk || !teacher_indices, op, ": teacher_indices was given with divergence '", divergence, "'");
  if (topk) {
    check_topk_teacher(op, input, teacher, teacher_indices);
    require(!teacher_weight && !teacher_bias, op,
            ": teacher_weight or teacher_bias was given with log-probabilities");
  } else if (teacher_weight) {
    require(teacher_weight->dim() == 2 && teacher_weight->size(0) == vocab &&
                teacher_weight->size(1) == teacher.size(1),
            op, ": teacher_weight has shape ", shape_text(*teacher_weight), ", expected (", vocab, ", ",
            teacher.size(1), "), the vocabulary of weight and the hidden size of teacher");
  } else {
    require(teacher.size(1) == vocab, op, ": teacher has shape ", shape_text(teacher),
            ", expected logits of the vocabulary of weight, ", vocab,
            ", or hidden states with teacher_weight");
    require(!teacher_bias, op, ": teacher_bias was given without teacher_weight");
  }
  if (bias) check_vector(op, "bias", *bias, vocab, "one value per class");
  if (teacher_bias) check_vector(op, "teacher_bias", *teacher_bias, vocab, "one value per class");
  const auto check_like_input = [&](const char* name, const std::optional<Tensor>& tensor) {
    if (!tensor) return;
    check_same_dtype(op, name, *tensor, "input", input);
    check_same_device(op, name, *tensor, "input", input);
  };
  check_like_input("weight", weight);
  if (!topk) check_like_input("teacher", teacher);
  check_like_input("teacher_weight", teacher_weight);
  check_like_input("bias", bias);
  check_like_input("teacher_bias", teacher_bias);
  check_divergence_options(op, input, target, beta, temperature);
  if (row_weight) {
    if (row_weight->dim() > 0) {
      check_vector(op, "row_weight", *row_weight, input.size(0), "one value per row");
    }
    check_same_device(op, "row_weight", *row_weight, "input", input);
  }
  require(!accum_dtype || *accum_dtype == ScalarType::Float || *accum_dtype == input.scalar_type(), op,
          ": accum_dtype is ", dtype_name(accum_dtype.value_or(ScalarType::Float)),
          ", expected float32, the dtype of input, ", dtype_name(input.scalar_type()), ", or None");
  require(!memory_budget || *memory_budget > 0, op, ": memory_budget is ", memory_budget.value_or(0),
          ", expected a positive number of bytes or None");
}

}  // namespace liger
