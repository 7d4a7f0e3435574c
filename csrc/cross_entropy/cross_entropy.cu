// SPDX-License-Identifier: BSD-3-Clause
#include "cross_entropy/cross_entropy.h"

#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <climits>
#include <cstdlib>
#include <cstring>
#include <string>
#include <tuple>

#include "cross_entropy/cross_entropy.cuh"
#include "device/integers.h"
#include "host/checks/parts.h"
#include "host/launch/dispatch.h"

namespace liger {
namespace {

// Each block counts the valid rows of a call with at most so many, without a launch before the rows.
constexpr int64_t kCountedRows = 256;

// The environment variable LIGER_CHECK_TARGETS, read once.
bool check_targets() {
  static const bool requested = [] {
    const char* set = std::getenv("LIGER_CHECK_TARGETS");
    const std::string text = set == nullptr ? "" : set;
    require(text.empty() || text == "0" || text == "1", "LIGER_CHECK_TARGETS: expected 0 or 1, got '", text,
            "'");
    return text == "1";
  }();
  return requested;
}

Tensor as_float(const Tensor& tensor) {
  return as_contiguous(
      tensor.scalar_type() == ScalarType::Float ? tensor : torch::stable::to(tensor, ScalarType::Float));
}

float* float_or_null(const std::optional<Tensor>& tensor) {
  return tensor ? static_cast<float*>(tensor->mutable_data_ptr()) : nullptr;
}

// A pointer to the value of a row in a result; null if the result was not requested and has no elements.
template <typename T>
T* at_row(const Tensor& result, int64_t row) {
  return result.numel() > 0 ? static_cast<T*>(result.mutable_data_ptr()) + row : nullptr;
}

ce::Scalar scalar_type(const Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case ScalarType::Half:
      return ce::Scalar::kHalf;
    case ScalarType::BFloat16:
      return ce::Scalar::kBFloat16;
    case ScalarType::Double:
      return ce::Scalar::kDouble;
    case ScalarType::Int:
      return ce::Scalar::kInt32;
    case ScalarType::Long:
      return ce::Scalar::kInt64;
    default:
      return ce::Scalar::kFloat;
  }
}

template <typename T, bool kExtras>
void launch_backward(const char* op, const ce::Problem& p, const ce::Backward& b, cudaStream_t stream) {
  const bool aligned = rows_same_alignment<T>(p, b.out, b.out_stride);
  const unsigned tiles = backward_tiles<T>(op, p);
  const auto kernel =
      aligned ? ce::backward_from_stats<T, kExtras, true> : ce::backward_from_stats<T, kExtras, false>;
  kernel<<<static_cast<unsigned>(p.rows) * tiles, ce::kBackwardThreads, 0, stream>>>(p, b,
                                                                                     static_cast<int>(tiles));
  check_launch(op);
}

}  // namespace

void CrossEntropyArguments::check(const char* op, const Tensor& logits) const {
  check_cross_entropy(op, logits, target, ce_weight, token_weight, denominator, label_smoothing, softcap,
                      reduction);
  require_cuda_dtype(op, "logits", logits);
}

CrossEntropyOptions::CrossEntropyOptions(const CrossEntropyArguments& arguments, int64_t vocab)
    : target(as_contiguous(arguments.target)) {
  require(vocab < INT_MAX, "cross_entropy: ", vocab, " classes, expected fewer than 2^31 - 1");
  const bool smoothing = arguments.label_smoothing != 0.0;
  if (arguments.ce_weight) class_weight = as_float(*arguments.ce_weight);
  if (arguments.token_weight) token_weight = as_float(*arguments.token_weight);
  if (class_weight && smoothing) weight_sum = empty({}, ScalarType::Float, target);
  problem.vocab = static_cast<int>(vocab);
  problem.targets = {target.const_data_ptr(), target.scalar_type() == ScalarType::Int,
                     arguments.ignore_index};
  problem.class_weight = static_cast<const float*>(data(class_weight));
  problem.token_weight = static_cast<const float*>(data(token_weight));
  problem.weight_sum = static_cast<const float*>(data(weight_sum));
  problem.label_smoothing = static_cast<float>(arguments.label_smoothing);
  problem.lse_square_scale = static_cast<float>(arguments.lse_square_scale);
  problem.softcap = static_cast<float>(arguments.softcap.value_or(0.0));
  if (arguments.softcap) problem.extras |= ce::kSoftcap;
  if (smoothing) problem.extras |= ce::kSmoothing;
}

ce::Problem CrossEntropyOptions::at_row(int64_t row) const {
  ce::Problem p = problem;
  p.targets.data = static_cast<const char*>(p.targets.data) + row * (p.targets.is_int32 ? 4 : 8);
  if (p.token_weight != nullptr) p.token_weight += row;
  return p;
}

void prepare_cross_entropy(const char* op, CrossEntropyOptions& options,
                           const std::optional<Tensor>& given_denominator, bool mean,
                           const std::optional<Tensor>& denominator) {
  const ce::Problem& problem = options.problem;
  ce::Preparation p{};
  p.targets = problem.targets;
  p.rows = options.target.numel();
  p.vocab = problem.vocab;
  p.class_weight = problem.class_weight;
  p.given_denominator = data(given_denominator);
  if (given_denominator) p.given_type = scalar_type(*given_denominator);
  p.mean = mean;
  p.denominator = float_or_null(denominator);
  p.weight_sum = float_or_null(options.weight_sum);
  p.fused = std::strcmp(op, "fused_linear_ce") == 0;
  if (p.denominator == nullptr && p.weight_sum == nullptr) return;
  const cudaStream_t stream = current_stream(options.target);
  if (check_targets()) {
    ce::prepare<true><<<1, ce::kReduceThreads, 0, stream>>>(p);
  } else {
    ce::prepare<false><<<1, ce::kReduceThreads, 0, stream>>>(p);
  }
  check_launch(op);
}

CrossEntropyResults::CrossEntropyResults(const Tensor& like, int64_t rows, bool per_row,
                                         const CrossEntropyOutputs& outputs)
    : per_row_(per_row), outputs_(outputs) {
  const auto buffer = [&](bool requested, ScalarType dtype) {
    return empty({requested ? rows : 0}, dtype, like);
  };
  const auto scalar = [&](bool requested) {
    return requested ? empty({}, ScalarType::Float, like) : no_tensor(ScalarType::Float, like);
  };
  row_loss = buffer(true, ScalarType::Float);
  row_z_loss = buffer(outputs.z_loss, ScalarType::Float);
  predicted = buffer(outputs.argmax || outputs.token_accuracy, ScalarType::Long);
  logprobs = buffer(outputs.logprobs, ScalarType::Float);
  entropy = buffer(outputs.entropy, ScalarType::Float);
  loss = per_row ? row_loss : scalar(true);
  // Placeholders are shared with what the op does not return.
  z_loss = per_row || !outputs.z_loss ? row_z_loss : scalar(true);
  token_accuracy = scalar(outputs.token_accuracy);
  argmax = outputs.argmax || !outputs.token_accuracy ? predicted : no_tensor(ScalarType::Long, like);
}

void CrossEntropyResults::attach(ce::Problem& problem, int64_t first_row) const {
  problem.loss = at_row<float>(row_loss, first_row);
  problem.z_loss = at_row<float>(row_z_loss, first_row);
  problem.logprobs = at_row<float>(logprobs, first_row);
  problem.entropy = at_row<float>(entropy, first_row);
  problem.predicted = at_row<int64_t>(predicted, first_row);
  if (problem.entropy != nullptr) problem.extras |= ce::kEntropy;
  if (problem.predicted != nullptr) problem.extras |= ce::kArgmax;
}

void CrossEntropyResults::reduce(const char* op, const CrossEntropyOptions& options,
                                 const Tensor& denominator) const {
  ce::Reduction r{};
  r.targets = options.problem.targets;
  r.rows = options.target.numel();
  r.denominator = static_cast<const float*>(denominator.const_data_ptr());
  r.row_loss = static_cast<const float*>(row_loss.const_data_ptr());
  r.row_z_loss = static_cast<const float*>(row_z_loss.const_data_ptr());
  r.predicted = static_cast<const int64_t*>(predicted.const_data_ptr());
  if (!per_row_) {
    r.loss = at_row<float>(loss, 0);
    r.z_loss = at_row<float>(z_loss, 0);
  }
  r.accuracy = at_row<float>(token_accuracy, 0);
  if (r.loss == nullptr && r.accuracy == nullptr) return;
  ce::reduce_rows<<<1, ce::kReduceThreads, 0, current_stream(denominator)>>>(r);
  check_launch(op);
}

void write_back(const Tensor& logits, const RowInput& rows) {
  if (rows.tensor.get() == logits.get()) return;
  Tensor written = logits;
  torch::stable::copy_(written, rows.tensor);
}

namespace {

constexpr const char* kOp = "cross_entropy";

// One call of cross_entropy_forward or cross_entropy_forward_ with checked arguments.
class Forward {
 public:
  Forward(const char* op, const Tensor& logits, const CrossEntropyArguments& arguments,
          const CrossEntropyOutputs& outputs)
      : guard_(op, logits.get_device_index()),
        arguments_(arguments),
        options_(arguments, logits.size(1)),
        results(logits, logits.size(0), arguments.reduction == "none", outputs),
        logits(row_input(logits)),
        stats(empty({2, logits.size(0)}, ScalarType::Float, logits)),
        used_denominator(empty({}, ScalarType::Float, logits)) {}

  // Fills the results, and `gradient` with the gradient of the reduced loss if it is not null. It may be the
  // logits.
  void run(void* gradient, int64_t gradient_stride) {
    const Tensor& like = logits.tensor;
    const bool mean = arguments_.reduction == "mean";
    ce::Problem problem = options_.problem;
    if (rows_find_denominator(mean)) {
      problem.new_denominator = static_cast<float*>(used_denominator.mutable_data_ptr());
      problem.mean = mean;
    } else {
      prepare_cross_entropy(kOp, options_, arguments_.denominator, mean, used_denominator);
    }
    problem.logits = logits.data();
    problem.row_stride = logits.rows.stride;
    problem.gradient = gradient;
    problem.gradient_stride = gradient_stride;
    problem.rows = like.size(0);
    problem.denominator = static_cast<const float*>(used_denominator.const_data_ptr());
    problem.row_max = at_row<float>(stats, 0);
    problem.row_sum = at_row<float>(stats, like.size(0));
    results.attach(problem, 0);
    launch_rows(kOp, problem, like.scalar_type(), gradient != nullptr, like.get_device_index(),
                current_stream(like));
    results.reduce(kOp, options_, used_denominator);
  }

 private:
  // Whether the kernel of the rows can write used_denominator: the number of rows, if they are few, or 1.
  bool rows_find_denominator(bool mean) const {
    const int64_t rows = logits.tensor.size(0);
    return rows > 0 && !arguments_.denominator && !options_.weight_sum && !check_targets() &&
           (!mean || (!options_.class_weight && rows <= kCountedRows));
  }

  const OpGuard guard_;
  const CrossEntropyArguments& arguments_;
  CrossEntropyOptions options_;

 public:
  const CrossEntropyResults results;
  const RowInput logits;
  const Tensor stats, used_denominator;
};

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> cross_entropy_forward(
    const Tensor& logits, const Tensor& target, const std::optional<Tensor>& ce_weight,
    const std::optional<Tensor>& token_weight, const std::optional<Tensor>& denominator, int64_t ignore_index,
    double label_smoothing, double lse_square_scale, std::optional<double> softcap,
    const std::string& reduction, bool return_z_loss, bool return_token_accuracy, bool return_argmax,
    bool return_logprobs, bool return_entropy, bool need_grad) {
  const CrossEntropyArguments arguments{.target = target,
                                        .ce_weight = ce_weight,
                                        .token_weight = token_weight,
                                        .denominator = denominator,
                                        .ignore_index = ignore_index,
                                        .label_smoothing = label_smoothing,
                                        .lse_square_scale = lse_square_scale,
                                        .softcap = softcap,
                                        .reduction = reduction};
  arguments.check(kOp, logits);
  Forward call("cross_entropy_forward", logits, arguments,
               {return_z_loss, return_token_accuracy, return_argmax, return_logprobs, return_entropy});
  std::optional<RowOutput> gradient;
  if (need_grad) {
    gradient = row_output(new_like(logits));
    call.run(gradient->data(), gradient->rows.stride);
    gradient->finish();
  } else {
    call.run(nullptr, 0);
  }
  const CrossEntropyResults& r = call.results;
  return {r.loss,
          r.z_loss,
          r.token_accuracy,
          r.argmax,
          r.logprobs,
          r.entropy,
          call.stats,
          call.used_denominator,
          gradient ? gradient->result : no_tensor(logits.scalar_type(), logits)};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> cross_entropy_forward_(
    const Tensor& logits, const Tensor& target, const std::optional<Tensor>& ce_weight,
    const std::optional<Tensor>& token_weight, const std::optional<Tensor>& denominator, int64_t ignore_index,
    double label_smoothing, double lse_square_scale, std::optional<double> softcap,
    const std::string& reduction, bool return_z_loss, bool return_token_accuracy, bool return_argmax,
    bool return_logprobs, bool return_entropy) {
  const CrossEntropyArguments arguments{.target = target,
                                        .ce_weight = ce_weight,
                                        .token_weight = token_weight,
                                        .denominator = denominator,
                                        .ignore_index = ignore_index,
                                        .label_smoothing = label_smoothing,
                                        .lse_square_scale = lse_square_scale,
                                        .softcap = softcap,
                                        .reduction = reduction};
  arguments.check(kOp, logits);
  check_written(kOp, {{"logits", logits}},
                {{"target", target},
                 {"ce_weight", ce_weight},
                 {"token_weight", token_weight},
                 {"denominator", denominator}});
  Forward call("cross_entropy_forward_", logits, arguments,
               {return_z_loss, return_token_accuracy, return_argmax, return_logprobs, return_entropy});
  call.run(call.logits.tensor.mutable_data_ptr(), call.logits.rows.stride);
  write_back(logits, call.logits);
  const CrossEntropyResults& r = call.results;
  return {r.loss, r.z_loss, r.token_accuracy, r.argmax, r.logprobs, r.entropy};
}

// The backward divides by the denominator of the forward.
const std::optional<Tensor> kNoDenominator;
const std::string kNoReduction = "none";

// Writes the gradient to out, which may be the logits themselves.
void backward_into(const char* op, void* out, int64_t out_stride, const RowInput& logits,
                   const Tensor& grad_loss, const Tensor& stats, const Tensor& used_denominator,
                   const CrossEntropyArguments& arguments) {
  const Tensor& like = logits.tensor;
  const int64_t rows = like.size(0), vocab = like.size(1);
  require(stats.dim() == 2 && stats.size(0) == 2 && stats.size(1) == rows &&
              stats.scalar_type() == ScalarType::Float,
          op, ": stats has shape ", shape_text(stats), " and dtype ", dtype_name(stats.scalar_type()),
          ", expected (2, ", rows, ") float32");
  require(grad_loss.numel() == (grad_loss.dim() == 1 ? rows : 1), op, ": grad_loss has shape ",
          shape_text(grad_loss), ", expected () or (", rows, ",)");
  require(used_denominator.numel() == 1 && used_denominator.scalar_type() == ScalarType::Float, op,
          ": used_denominator has shape ", shape_text(used_denominator), ", expected one float32");
  check_same_device(op, "grad_loss", grad_loss, "logits", like);
  check_same_device(op, "stats", stats, "logits", like);
  check_same_device(op, "used_denominator", used_denominator, "logits", like);
  if (rows == 0 || vocab == 0) return;
  CrossEntropyOptions options(arguments, vocab);
  prepare_cross_entropy(op, options, std::nullopt, false, std::nullopt);
  const Tensor upstream = as_float(grad_loss), row_stats = as_contiguous(stats);
  ce::Problem problem = options.problem;
  problem.logits = logits.data();
  problem.row_stride = logits.rows.stride;
  problem.rows = rows;
  ce::Backward backward{};
  backward.grad_loss = static_cast<const float*>(upstream.const_data_ptr());
  backward.per_row = grad_loss.dim() == 1;
  backward.stats = static_cast<const float*>(row_stats.const_data_ptr());
  backward.denominator = static_cast<const float*>(used_denominator.const_data_ptr());
  backward.out = out;
  backward.out_stride = out_stride;

  dispatch_dtype(like.scalar_type(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    const auto launch = problem.extras == 0 ? launch_backward<T, false> : launch_backward<T, true>;
    launch(op, problem, backward, current_stream(like));
  });
}

Tensor cross_entropy_backward(const Tensor& grad_loss, const Tensor& logits, const Tensor& target,
                              const Tensor& stats, const Tensor& used_denominator,
                              const std::optional<Tensor>& ce_weight,
                              const std::optional<Tensor>& token_weight, int64_t ignore_index,
                              double label_smoothing, double lse_square_scale,
                              std::optional<double> softcap) {
  constexpr const char* op = "cross_entropy_backward";
  const CrossEntropyArguments arguments{.target = target,
                                        .ce_weight = ce_weight,
                                        .token_weight = token_weight,
                                        .denominator = kNoDenominator,
                                        .ignore_index = ignore_index,
                                        .label_smoothing = label_smoothing,
                                        .lse_square_scale = lse_square_scale,
                                        .softcap = softcap,
                                        .reduction = kNoReduction};
  arguments.check(op, logits);
  const OpGuard guard(op, logits.get_device_index());
  RowOutput out = row_output(new_like(logits));
  backward_into(op, out.data(), out.rows.stride, row_input(logits), grad_loss, stats, used_denominator,
                arguments);
  out.finish();
  return out.result;
}

void cross_entropy_backward_(const Tensor& grad_loss, const Tensor& logits, const Tensor& target,
                             const Tensor& stats, const Tensor& used_denominator,
                             const std::optional<Tensor>& ce_weight,
                             const std::optional<Tensor>& token_weight, int64_t ignore_index,
                             double label_smoothing, double lse_square_scale, std::optional<double> softcap) {
  constexpr const char* op = "cross_entropy_backward_";
  const CrossEntropyArguments arguments{.target = target,
                                        .ce_weight = ce_weight,
                                        .token_weight = token_weight,
                                        .denominator = kNoDenominator,
                                        .ignore_index = ignore_index,
                                        .label_smoothing = label_smoothing,
                                        .lse_square_scale = lse_square_scale,
                                        .softcap = softcap,
                                        .reduction = kNoReduction};
  arguments.check(op, logits);
  const OpGuard guard(op, logits.get_device_index());
  check_written(op, {{"logits", logits}},
                {{"grad_loss", grad_loss},
                 {"target", target},
                 {"stats", stats},
                 {"used_denominator", used_denominator},
                 {"ce_weight", ce_weight},
                 {"token_weight", token_weight}});
  const RowInput rows = row_input(logits);
  backward_into(op, rows.tensor.mutable_data_ptr(), rows.rows.stride, rows, grad_loss, stats,
                used_denominator, arguments);
  write_back(logits, rows);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(liger, CUDA, m) {
  m.impl("cross_entropy_forward", TORCH_BOX(&cross_entropy_forward));
  m.impl("cross_entropy_forward_", TORCH_BOX(&cross_entropy_forward_));
  m.impl("cross_entropy_backward", TORCH_BOX(&cross_entropy_backward));
  m.impl("cross_entropy_backward_", TORCH_BOX(&cross_entropy_backward_));
}

}  // namespace liger
