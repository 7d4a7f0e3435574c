// SPDX-License-Identifier: BSD-3-Clause
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <climits>
#include <tuple>

#include "cross_entropy/cross_entropy.h"
#include "device/integers.h"
#include "divergence/divergence.h"
#include "host/checks/parts.h"

namespace liger {
namespace {

// Makes weights or gradients of rows contiguous. One value for all rows (stride 0) is used without a copy.
Tensor row_values(const Tensor& values) {
  return values.dim() == 0 || values.stride(0) == 0 ? values : as_contiguous(values);
}

// The arguments of a call as kernel parameters. It owns the tensors that had to be copied.
struct Call {
  RowInput student, teacher;
  std::optional<Tensor> target, row_weight;
  divergence::Problem problem{};

  Call(RowInput student_rows, const Tensor& teacher_logits, const std::optional<Tensor>& target_,
       const std::optional<Tensor>& row_weight_, double beta, double temperature, bool log_probs,
       int64_t ignore_index)
      : student(std::move(student_rows)), teacher(row_input(teacher_logits)) {
    if (target_) target = as_contiguous(*target_);
    if (row_weight_) row_weight = row_values(*row_weight_);
    problem.student = student.data();
    problem.teacher = teacher.data();
    problem.student_stride = student.rows.stride;
    problem.teacher_stride = teacher.rows.stride;
    problem.rows = student.tensor.size(0);
    problem.vocab = static_cast<int>(student.tensor.size(1));
    problem.targets = {data(target), target && target->scalar_type() == ScalarType::Int, ignore_index};
    // 1 - beta must not round to 1: the logarithm of a mixture would be infinite.
    problem.beta = std::clamp(static_cast<float>(beta), 0x1p-24f, 1.0f - 0x1p-24f);
    problem.inverse_temperature = static_cast<float>(1.0 / temperature);
    problem.exp2_scale = static_cast<float>(1.4426950408889634 / temperature);
    problem.log_probs = log_probs;
  }

  divergence::Results results(float* losses, const Tensor& stats) const {
    divergence::Results r{};
    r.loss = losses;
    r.stats = static_cast<float*>(stats.mutable_data_ptr());
    if (row_weight) {
      r.weights = {static_cast<const float*>(row_weight->const_data_ptr()),
                   row_weight->dim() == 0 ? 0 : row_weight->stride(0)};
    }
    return r;
  }
};

void check(const char* op, const Tensor& student, const Tensor& teacher, const std::optional<Tensor>& target,
           const std::optional<Tensor>& row_weight, const std::string& divergence, double beta,
           double temperature, bool log_probs) {
  check_divergence(op, student, teacher, target, row_weight, divergence, beta, temperature, log_probs);
  require_cuda_dtype(op, "student", student);
  require(student.size(0) <= INT_MAX && student.size(1) <= INT_MAX, op, ": student has shape ",
          shape_text(student), ", which is more than one launch can take");
}

// Every thread has two vectors of each row in flight.
template <typename T>
unsigned threads_for(int vocab) {
  const int64_t vectors = ceil_div(int64_t{vocab}, int64_t{kVec<T>});
  return static_cast<unsigned>(
      std::clamp<int64_t>(ceil_div(vectors, 2 * 32) * 32, 32, divergence::kMaxThreads));
}

void launch_forward(const char* op, const Call& call, const divergence::Results& r,
                    const std::string& divergence) {
  const divergence::Problem& p = call.problem;
  const Tensor& like = call.student.tensor;
  dispatch_dtype(like.scalar_type(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    dispatch_divergence(divergence, [&](auto rule) {
      using Rule = decltype(rule);
      const auto kernel = aligned_with_student<T>(p, p.teacher, p.teacher_stride)
                              ? divergence::forward<T, Rule, true>
                              : divergence::forward<T, Rule, false>;
      kernel<<<static_cast<unsigned>(p.rows), threads_for<T>(p.vocab), 0, current_stream(like)>>>(p, r);
      check_launch(op);
    });
  });
}

// The gradient may overwrite the student's rows if it has their dtype.
void launch_backward(const char* op, const Call& call, const divergence::Results& r,
                     ScalarType gradient_dtype, const std::string& divergence) {
  const divergence::Problem& p = call.problem;
  const Tensor& like = call.student.tensor;
  dispatch_gradient(like.scalar_type(), gradient_dtype, [&](auto tag, auto gradient_tag) {
    using T = typename decltype(tag)::type;
    using G = typename decltype(gradient_tag)::type;
    const bool aligned = aligned_with_student<T>(p, p.teacher, p.teacher_stride) &&
                         aligned_with_student<T, G>(p, r.gradient, r.gradient_stride);
    dispatch_divergence(divergence, [&](auto rule) {
      using Rule = decltype(rule);
      const auto kernel =
          aligned ? divergence::backward<T, G, Rule, true> : divergence::backward<T, G, Rule, false>;
      kernel<<<static_cast<unsigned>(p.rows), threads_for<T>(p.vocab), 0, current_stream(like)>>>(p, r);
      check_launch(op);
    });
  });
}

// The memory of the gradient. Without data no gradient is computed.
struct GradientOutput {
  void* data = nullptr;
  int64_t stride = 0;
  ScalarType dtype = ScalarType::Float;
};

// Losses and stats of all rows, and their gradient if `gradient` has data.
void run_rows(const char* op, const Call& call, divergence::Results r, const std::string& divergence,
              const GradientOutput& gradient) {
  if (call.problem.rows == 0) return;
  const Tensor& like = call.student.tensor;
  r.gradient = gradient.data;
  r.gradient_stride = gradient.stride;
  if (gradient.data != nullptr &&
      launch_divergence_smem(op, divergence, call.problem, r, like.scalar_type(), gradient.dtype,
                             like.get_device_index(), current_stream(like))) {
    return;
  }
  launch_forward(op, call, r, divergence);
  if (gradient.data != nullptr) launch_backward(op, call, r, gradient.dtype, divergence);
}

// The gradient overwrites the student's rows.
GradientOutput student_in_place(const Call& call) {
  const Tensor& rows = call.student.tensor;
  return {rows.mutable_data_ptr(), call.student.rows.stride, rows.scalar_type()};
}

GradientOutput gradient_output(const RowOutput& output) {
  return {output.data(), output.rows.stride, output.written.scalar_type()};
}

// Sums `count` values in a fixed order. grid: one block.
__global__ void __launch_bounds__(divergence::kMaxThreads)
    sum_all(const float* values, int64_t count, float* total) {
  __shared__ float scratch[32];
  float sum = 0.0f;
  for (int64_t i = threadIdx.x; i < count; i += blockDim.x) sum += values[i];
  sum = block_reduce<Sum>(sum, scratch);
  if (threadIdx.x == 0) *total = sum;
}

// Per-row losses, or their sum, as an op returns them.
Tensor reduce_losses(const char* op, const Tensor& losses, bool per_row) {
  if (per_row) return losses;
  const Tensor total = empty({}, ScalarType::Float, losses);
  sum_all<<<1, divergence::kMaxThreads, 0, current_stream(losses)>>>(
      static_cast<const float*>(losses.const_data_ptr()), losses.numel(),
      static_cast<float*>(total.mutable_data_ptr()));
  check_launch(op);
  return total;
}

std::tuple<Tensor, Tensor, Tensor> divergence_forward(const Tensor& student, const Tensor& teacher,
                                                      const std::optional<Tensor>& target,
                                                      const std::optional<Tensor>& row_weight,
                                                      const std::string& divergence, double beta,
                                                      double temperature, bool log_probs,
                                                      int64_t ignore_index, bool per_row, bool need_grad) {
  constexpr const char* op = "divergence_forward";
  check(op, student, teacher, target, row_weight, divergence, beta, temperature, log_probs);
  const OpGuard guard(op, student.get_device_index());
  const int64_t rows = student.size(0);
  const Tensor losses = empty({rows}, ScalarType::Float, student);
  const Tensor stats = empty({5, rows}, ScalarType::Float, student);
  const Call call(row_input(student), teacher, target, row_weight, beta, temperature, log_probs,
                  ignore_index);
  if (!need_grad) {
    run_rows(op, call, call.results(static_cast<float*>(losses.mutable_data_ptr()), stats), divergence, {});
    return {reduce_losses(op, losses, per_row), stats, no_tensor(student.scalar_type(), student)};
  }
  RowOutput gradient = row_output(torch::stable::empty_like(student));
  run_rows(op, call, call.results(static_cast<float*>(losses.mutable_data_ptr()), stats), divergence,
           gradient_output(gradient));
  gradient.finish();
  return {reduce_losses(op, losses, per_row), stats, gradient.result};
}

Tensor divergence_forward_(const Tensor& student, const Tensor& teacher, const std::optional<Tensor>& target,
                           const std::optional<Tensor>& row_weight, const std::string& divergence,
                           double beta, double temperature, bool log_probs, int64_t ignore_index,
                           bool per_row) {
  constexpr const char* op = "divergence_forward_";
  check(op, student, teacher, target, row_weight, divergence, beta, temperature, log_probs);
  const OpGuard guard(op, student.get_device_index());
  const int64_t rows = student.size(0);
  const Tensor losses = empty({rows}, ScalarType::Float, student);
  const Tensor stats = empty({5, rows}, ScalarType::Float, student);
  check_written(op, {{"student", student}},
                {{"teacher", teacher}, {"target", target}, {"row_weight", row_weight}});
  const Call call(row_input(student), teacher, target, row_weight, beta, temperature, log_probs,
                  ignore_index);
  run_rows(op, call, call.results(static_cast<float*>(losses.mutable_data_ptr()), stats), divergence,
           student_in_place(call));
  write_back(student, call.student);
  return reduce_losses(op, losses, per_row);
}

std::tuple<Tensor, Tensor> divergence_ce_forward_(const Tensor& student, const Tensor& teacher,
                                                  const std::optional<Tensor>& target,
                                                  const std::optional<Tensor>& row_weight,
                                                  const std::string& divergence, double beta,
                                                  double temperature, double cross_entropy,
                                                  int64_t ignore_index, const Tensor& gradient) {
  constexpr const char* op = "divergence_ce_forward_";
  check(op, student, teacher, target, row_weight, divergence, beta, temperature, false);
  check_divergence_gradient(op, student, target, temperature, cross_entropy, gradient);
  check_written(op, {{"gradient", gradient}},
                {{"student", student}, {"teacher", teacher}, {"target", target}, {"row_weight", row_weight}});
  const OpGuard guard(op, student.get_device_index());
  const int64_t rows = student.size(0);
  const Tensor losses = empty({rows}, ScalarType::Float, student);
  const Tensor stats = empty({5, rows}, ScalarType::Float, student);
  const Tensor hard = empty({cross_entropy != 0.0 ? rows : 0}, ScalarType::Float, student);
  Call call(row_input(student), teacher, target, row_weight, beta, temperature, false, ignore_index);
  call.problem.cross_entropy = static_cast<float>(cross_entropy);
  divergence::Results results = call.results(static_cast<float*>(losses.mutable_data_ptr()), stats);
  if (cross_entropy != 0.0) results.hard = static_cast<float*>(hard.mutable_data_ptr());
  RowOutput out = row_output(gradient, true);
  run_rows(op, call, results, divergence, gradient_output(out));
  out.finish();
  return {losses, hard};
}

void check_for_backward(const char* op, const Tensor& student, const Tensor& grad_loss, const Tensor& stats) {
  const int64_t rows = student.size(0);
  require(grad_loss.scalar_type() == ScalarType::Float &&
              (grad_loss.dim() == 0 || (grad_loss.dim() == 1 && grad_loss.size(0) == rows)),
          op, ": grad_loss has shape ", shape_text(grad_loss), " and dtype ",
          dtype_name(grad_loss.scalar_type()),
          ", expected float32 with one value, or one per row of student");
  require(stats.scalar_type() == ScalarType::Float && stats.dim() == 2 && stats.size(0) == 5 &&
              stats.size(1) == rows,
          op, ": stats has shape ", shape_text(stats), " and dtype ", dtype_name(stats.scalar_type()),
          ", expected float32 with 5 values per row of student");
  check_same_device(op, "grad_loss", grad_loss, "student", student);
  check_same_device(op, "stats", stats, "student", student);
}

Tensor divergence_backward(const Tensor& grad_loss, const Tensor& student, const Tensor& teacher,
                           const std::optional<Tensor>& target, const Tensor& stats,
                           const std::string& divergence, double beta, double temperature, bool log_probs,
                           int64_t ignore_index) {
  constexpr const char* op = "divergence_backward";
  check(op, student, teacher, target, std::nullopt, divergence, beta, temperature, log_probs);
  check_for_backward(op, student, grad_loss, stats);
  const OpGuard guard(op, student.get_device_index());
  RowOutput out = row_output(torch::stable::empty_like(student));
  const Call call(row_input(student), teacher, target, grad_loss, beta, temperature, log_probs, ignore_index);
  const Tensor contiguous_stats = as_contiguous(stats);
  divergence::Results r = call.results(nullptr, contiguous_stats);
  r.gradient = out.data();
  r.gradient_stride = out.rows.stride;
  if (call.problem.rows > 0) launch_backward(op, call, r, out.written.scalar_type(), divergence);
  out.finish();
  return out.result;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(liger, CUDA, m) {
  m.impl("divergence_forward", TORCH_BOX(&divergence_forward));
  m.impl("divergence_forward_", TORCH_BOX(&divergence_forward_));
  m.impl("divergence_ce_forward_", TORCH_BOX(&divergence_ce_forward_));
  m.impl("divergence_backward", TORCH_BOX(&divergence_backward));
}

}  // namespace liger
