// SPDX-License-Identifier: BSD-3-Clause
#include <cmath>

#include "host/checks/parts.h"

namespace liger {
namespace {

// The rows are called `rows_name` in messages.
void check_ce_options(const std::string& op, const char* rows_name, const Tensor& like, int64_t rows,
                      int64_t vocab, const Tensor& target, const std::optional<Tensor>& ce_weight,
                      const std::optional<Tensor>& token_weight, const std::optional<Tensor>& denominator,
                      double label_smoothing, std::optional<double> softcap, const std::string& reduction) {
  require(target.scalar_type() == ScalarType::Long || target.scalar_type() == ScalarType::Int, op,
          ": target has dtype ", dtype_name(target.scalar_type()),
          ", expected int64 or int32 class indices (class probabilities are not supported)");
  check_vector(op, "target", target, rows, "one class index per row");
  check_same_device(op, "target", target, rows_name, like);
  if (ce_weight) {
    check_floating(op, "ce_weight", *ce_weight);
    check_vector(op, "ce_weight", *ce_weight, vocab, "one weight per class");
    check_same_device(op, "ce_weight", *ce_weight, rows_name, like);
  }
  if (token_weight) {
    check_floating(op, "token_weight", *token_weight);
    check_vector(op, "token_weight", *token_weight, rows, "one weight per row");
    check_same_device(op, "token_weight", *token_weight, rows_name, like);
  }
  if (denominator) {
    require(denominator->numel() == 1, op, ": denominator has shape ", shape_text(*denominator),
            ", expected one element");
    require(is_real_floating(denominator->scalar_type()) || denominator->scalar_type() == ScalarType::Long ||
                denominator->scalar_type() == ScalarType::Int,
            op, ": denominator has dtype ", dtype_name(denominator->scalar_type()),
            ", expected a floating dtype, int64 or int32");
    check_same_device(op, "denominator", *denominator, rows_name, like);
    require(reduction != "none", op,
            ": denominator was given with reduction 'none', expected 'mean' or 'sum'");
  }
  require(label_smoothing >= 0.0 && label_smoothing <= 1.0, op, ": label_smoothing is ", label_smoothing,
          ", expected a value between 0 and 1");
  require(!softcap || is_positive_float32(*softcap), op, ": softcap is ", softcap.value_or(0.0),
          ", expected a positive, finite value or None", float32_range(softcap.value_or(0.0)));
  require(reduction == "mean" || reduction == "sum" || reduction == "none", op, ": reduction is '", reduction,
          "', expected 'mean', 'sum' or 'none'");
}

bool is_divergence(const std::string& name) {
  return name == "forward_kl" || name == "reverse_kl" || name == "jsd" || name == "tvd";
}

bool is_topk(const std::string& name) {
  return name == "topk_tail" || name == "topk";
}

void check_divergence_options(const std::string& op, const char* rows_name, const Tensor& like,
                              const std::optional<Tensor>& target, double beta, double temperature) {
  require(beta >= 0.0 && beta <= 1.0, op, ": beta is ", beta, ", expected a value between 0 and 1");
  require(is_positive_float32(temperature), op, ": temperature is ", temperature,
          ", expected a positive, finite value", float32_range(temperature));
  if (target) {
    require(target->scalar_type() == ScalarType::Long || target->scalar_type() == ScalarType::Int, op,
            ": target has dtype ", dtype_name(target->scalar_type()), ", expected int64 or int32");
    check_vector(op, "target", *target, like.size(0), "one value per row");
    check_same_device(op, "target", *target, rows_name, like);
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

void check_cross_entropy(const std::string& op, const Tensor& logits, const Tensor& target,
                         const std::optional<Tensor>& ce_weight, const std::optional<Tensor>& token_weight,
                         const std::optional<Tensor>& denominator, double label_smoothing,
                         std::optional<double> softcap, const std::string& reduction) {
  require(logits.dim() == 2 && logits.size(1) > 0, op, ": logits has shape ", shape_text(logits),
          ", expected (rows, classes) with at least one class");
  check_floating(op, "logits", logits);
  check_ce_options(op, "logits", logits, logits.size(0), logits.size(1), target, ce_weight, token_weight,
                   denominator, label_smoothing, softcap, reduction);
}

void check_fused_linear_ce(const Tensor& input, const Tensor& weight, const Tensor& target,
                           const std::optional<Tensor>& bias, const std::optional<Tensor>& ce_weight,
                           const std::optional<Tensor>& token_weight,
                           const std::optional<Tensor>& denominator, double label_smoothing,
                           std::optional<double> softcap, const std::string& reduction,
                           std::optional<ScalarType> accum_dtype, std::optional<int64_t> memory_budget,
                           const std::string& op, std::optional<ScalarType> logits_dtype) {
  require(input.dim() == 2, op, ": input has shape ", shape_text(input), ", expected (rows, hidden)");
  require(weight.dim() == 2 && weight.size(1) == input.size(1), op, ": weight has shape ", shape_text(weight),
          ", expected (vocab, hidden) with the hidden size of input, ", input.size(1));
  require(weight.size(0) > 0, op, ": weight has shape ", shape_text(weight),
          ", expected at least one row; a sharded weight must be gathered first");
  check_floating(op, "input", input);
  if (logits_dtype) {
    require(*logits_dtype == ScalarType::Float, op, ": logits_dtype is ", dtype_name(*logits_dtype),
            ", expected float32 or None");
    require(input.scalar_type() != ScalarType::Double, op,
            ": input has dtype float64, expected float16, bfloat16 or float32 with logits_dtype float32");
  }
  const auto check_dtype = [&](const char* name, const Tensor& tensor) {
    if (!logits_dtype) return check_same_dtype(op, name, tensor, "input", input);
    require(tensor.scalar_type() == ScalarType::Float || tensor.scalar_type() == input.scalar_type(), op,
            ": ", name, " has dtype ", dtype_name(tensor.scalar_type()),
            ", expected float32 or the dtype of input, ", dtype_name(input.scalar_type()));
  };
  check_dtype("weight", weight);
  check_same_device(op, "weight", weight, "input", input);
  if (bias) {
    check_vector(op, "bias", *bias, weight.size(0), "one value per class");
    check_dtype("bias", *bias);
    check_same_device(op, "bias", *bias, "input", input);
  }
  check_ce_options(op, "input", input, input.size(0), weight.size(0), target, ce_weight, token_weight,
                   denominator, label_smoothing, softcap, reduction);
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
  check_divergence_options(op, "student", student, target, beta, temperature);
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

void check_divergence_gradient(const std::string& op, const Tensor& student,
                               const std::optional<Tensor>& target, double temperature, double cross_entropy,
                               const Tensor& gradient) {
  require(cross_entropy >= 0.0, op, ": cross_entropy is ", cross_entropy,
          ", expected a number that is not negative");
  require(cross_entropy == 0.0 || target.has_value(), op,
          ": no target, expected one for the cross entropy, as cross_entropy is ", cross_entropy);
  require(cross_entropy == 0.0 || temperature == 1.0, op, ": temperature is ", temperature,
          " with cross entropy, expected 1: at another the two have no softmax in common");
  check_same_shape(op, "gradient", gradient, "student", student);
  check_same_device(op, "gradient", gradient, "student", student);
  const ScalarType from = student.scalar_type(), to = gradient.scalar_type();
  const bool narrower = from == ScalarType::Float && (to == ScalarType::Half || to == ScalarType::BFloat16);
  require(to == from || narrower, op, ": gradient has dtype ", dtype_name(to),
          ", expected the dtype of student, ", dtype_name(from),
          ", or, where that is float32, float16 or bfloat16");
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
  // Teacher logits may have another dtype than input.
  if (teacher_weight) {
    check_like_input("teacher", teacher);
  } else if (!topk) {
    check_floating(op, "teacher", teacher);
    check_same_device(op, "teacher", teacher, "input", input);
  }
  check_like_input("teacher_weight", teacher_weight);
  check_like_input("bias", bias);
  check_like_input("teacher_bias", teacher_bias);
  check_divergence_options(op, "input", input, target, beta, temperature);
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
