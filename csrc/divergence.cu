#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <climits>
#include <tuple>

#include "common/dispatch.h"
#include "common/integers.h"
#include "cross_entropy.h"
#include "kernels/divergence.cuh"

namespace liger {
namespace {

// The arguments of a call as the kernels read them; it owns what had to be copied.
struct Call {
  RowInput student, teacher;
  std::optional<Tensor> target;
  divergence::Problem problem{};

  Call(RowInput student_rows, const Tensor& teacher_logits, const std::optional<Tensor>& target_, double beta,
       double temperature, bool log_probs, int64_t ignore_index)
      : student(std::move(student_rows)), teacher(row_input(teacher_logits)) {
    if (target_) target = torch::stable::contiguous(*target_);
    problem.student = student.data();
    problem.teacher = teacher.data();
    problem.student_stride = student.rows.stride;
    problem.teacher_stride = teacher.rows.stride;
    problem.rows = student.tensor.size(0);
    problem.vocab = static_cast<int>(student.tensor.size(1));
    problem.targets = {data(target), target && target->scalar_type() == ScalarType::Int, ignore_index};
    problem.beta = static_cast<float>(beta);
    problem.inverse_temperature = static_cast<float>(1.0 / temperature);
    problem.log_probs = log_probs;
  }
};

void check(const char* op, const Tensor& student, const Tensor& teacher, const std::optional<Tensor>& target,
           const std::string& divergence, double beta, double temperature, bool log_probs) {
  check_divergence(op, student, teacher, target, divergence, beta, temperature, log_probs);
  require_cuda_dtype(op, "student", student);
  require(student.size(0) <= INT_MAX && student.size(1) <= INT_MAX, op, ": student has shape ",
          shape_text(student), ", which is more than one launch can take");
}

template <typename Body>
void dispatch_rule(const std::string& divergence, Body&& body) {
  if (divergence == "forward_kl") {
    body(divergence::ForwardKl{});
  } else if (divergence == "reverse_kl") {
    body(divergence::ReverseKl{});
  } else if (divergence == "jsd") {
    body(divergence::Jsd{});
  } else {
    body(divergence::Tvd{});
  }
}

// Whether rows at these strides are all as far from a 16-byte boundary as those of the student.
template <typename T>
bool aligned_with_student(const divergence::Problem& p, const void* other, int64_t stride) {
  const auto position = [](const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16; };
  return position(p.student) == position(other) &&
         (p.student_stride - stride) % static_cast<int64_t>(kVec<T>) == 0;
}

// Two vectors of each row in flight per thread.
template <typename T>
unsigned threads_for(int vocab) {
  const int64_t vectors = ceil_div(int64_t{vocab}, int64_t{kVec<T>});
  return static_cast<unsigned>(
      std::clamp<int64_t>(ceil_div(vectors, 2 * 32) * 32, 32, divergence::kMaxThreads));
}

std::tuple<Tensor, Tensor> divergence_forward(const Tensor& student, const Tensor& teacher,
                                              const std::optional<Tensor>& target,
                                              const std::string& divergence, double beta, double temperature,
                                              bool log_probs, int64_t ignore_index) {
  constexpr const char* op = "divergence_forward";
  check(op, student, teacher, target, divergence, beta, temperature, log_probs);
  const DeviceGuard guard(student.get_device_index());
  const int64_t rows = student.size(0);
  const Tensor loss = empty({rows}, ScalarType::Float, student);
  const Tensor stats = empty({5, rows}, ScalarType::Float, student);
  if (rows == 0) return {loss, stats};
  const Call call(row_input(student), teacher, target, beta, temperature, log_probs, ignore_index);
  const divergence::Problem& p = call.problem;
  dispatch_dtype(student.scalar_type(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    dispatch_rule(divergence, [&](auto rule) {
      using Rule = decltype(rule);
      const auto kernel = aligned_with_student<T>(p, p.teacher, p.teacher_stride)
                              ? divergence::forward<T, Rule, true>
                              : divergence::forward<T, Rule, false>;
      kernel<<<static_cast<unsigned>(rows), threads_for<T>(p.vocab), 0, current_stream(student)>>>(
          p, static_cast<float*>(loss.mutable_data_ptr()), static_cast<float*>(stats.mutable_data_ptr()));
      check_launch(op);
    });
  });
  return {loss, stats};
}

Tensor float_values(const char* op, const char* name, const Tensor& values, std::vector<int64_t> shape) {
  bool same = values.dim() == static_cast<int64_t>(shape.size()) && values.scalar_type() == ScalarType::Float;
  for (size_t d = 0; same && d < shape.size(); ++d) same = values.size(static_cast<int64_t>(d)) == shape[d];
  require(same, op, ": ", name, " has shape ", shape_text(values), " and dtype ",
          dtype_name(values.scalar_type()), ", expected float32 with one value per row of student",
          shape.size() == 2 ? " in each of 5 rows" : "");
  return torch::stable::contiguous(values);
}

// Writes the gradient to out, which may be the student's rows themselves.
void backward_into(const char* op, void* out, int64_t out_stride, const Call& call, const Tensor& grad_loss,
                   const Tensor& stats, const std::string& divergence) {
  const divergence::Problem& p = call.problem;
  const Tensor upstream = float_values(op, "grad_loss", grad_loss, {p.rows});
  const Tensor known = float_values(op, "stats", stats, {5, p.rows});
  if (p.rows == 0) return;
  const Tensor& like = call.student.tensor;
  dispatch_dtype(like.scalar_type(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    const bool aligned = aligned_with_student<T>(p, p.teacher, p.teacher_stride) &&
                         aligned_with_student<T>(p, out, out_stride);
    dispatch_rule(divergence, [&](auto rule) {
      using Rule = decltype(rule);
      const auto kernel =
          aligned ? divergence::backward<T, Rule, true> : divergence::backward<T, Rule, false>;
      kernel<<<static_cast<unsigned>(p.rows), threads_for<T>(p.vocab), 0, current_stream(like)>>>(
          p, static_cast<const float*>(upstream.const_data_ptr()),
          static_cast<const float*>(known.const_data_ptr()), out, out_stride);
      check_launch(op);
    });
  });
}

Tensor divergence_backward(const Tensor& grad_loss, const Tensor& student, const Tensor& teacher,
                           const std::optional<Tensor>& target, const Tensor& stats,
                           const std::string& divergence, double beta, double temperature, bool log_probs,
                           int64_t ignore_index) {
  constexpr const char* op = "divergence_backward";
  check(op, student, teacher, target, divergence, beta, temperature, log_probs);
  const DeviceGuard guard(student.get_device_index());
  RowOutput out = row_output(torch::stable::empty_like(student));
  const Call call(row_input(student), teacher, target, beta, temperature, log_probs, ignore_index);
  backward_into(op, out.data(), out.rows.stride, call, grad_loss, stats, divergence);
  out.finish();
  return out.result;
}

void divergence_backward_(const Tensor& grad_loss, const Tensor& student, const Tensor& teacher,
                          const std::optional<Tensor>& target, const Tensor& stats,
                          const std::string& divergence, double beta, double temperature, bool log_probs,
                          int64_t ignore_index) {
  constexpr const char* op = "divergence_backward_";
  check(op, student, teacher, target, divergence, beta, temperature, log_probs);
  const DeviceGuard guard(student.get_device_index());
  const Call call(rows_to_overwrite(op, student), teacher, target, beta, temperature, log_probs,
                  ignore_index);
  backward_into(op, call.student.tensor.mutable_data_ptr(), call.student.rows.stride, call, grad_loss, stats,
                divergence);
  write_back(student, call.student);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(liger, CUDA, m) {
  m.impl("divergence_forward", TORCH_BOX(&divergence_forward));
  m.impl("divergence_backward", TORCH_BOX(&divergence_backward));
  m.impl("divergence_backward_", TORCH_BOX(&divergence_backward_));
}

}  // namespace liger
