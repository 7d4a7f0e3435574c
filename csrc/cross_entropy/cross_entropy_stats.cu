// SPDX-License-Identifier: BSD-3-Clause
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <climits>

#include "cross_entropy/cross_entropy.h"
#include "cross_entropy/cross_entropy_stats.cuh"
#include "device/integers.h"
#include "host/checks/parts.h"
#include "host/launch/dispatch.h"

namespace liger {
namespace {

CrossEntropyOptions stats_options(const char* op, const Tensor& logits, const Tensor& target,
                                  const std::optional<Tensor>& ce_weight, int64_t ignore_index,
                                  std::optional<double> softcap, bool per_class) {
  const std::optional<Tensor> none;
  const std::string reduction = "sum";
  const CrossEntropyArguments arguments{.target = target,
                                        .ce_weight = ce_weight,
                                        .token_weight = none,
                                        .denominator = none,
                                        .ignore_index = ignore_index,
                                        .label_smoothing = 0.0,
                                        .lse_square_scale = 0.0,
                                        .softcap = softcap,
                                        .reduction = reduction};
  arguments.check(op, logits);
  const CrossEntropyArguments used{.target = target,
                                   .ce_weight = per_class ? ce_weight : none,
                                   .token_weight = none,
                                   .denominator = none,
                                   .ignore_index = ignore_index,
                                   .label_smoothing = 0.0,
                                   .lse_square_scale = 0.0,
                                   .softcap = softcap,
                                   .reduction = reduction};
  CrossEntropyOptions options(used, logits.size(1));
  options.problem.rows = logits.size(0);
  if (per_class) options.problem.extras |= ce::kSmoothing;
  return options;
}

template <typename T>
void launch_stats(const char* op, const ce::Problem& p, const ce::StatsOutput& o, float* square_sum,
                  cudaStream_t stream) {
  const int64_t vectors = ceil_div(p.vocab, kVec<T>);
  // Every thread has four vectors in flight.
  const int64_t threads = std::clamp<int64_t>(ceil_div(vectors, 4 * 32) * 32, 32, ce::kMaxThreads);
  auto kernel = p.extras == 0 ? ce::stats_streamed<T, false> : ce::stats_streamed<T, true>;
  if (square_sum != nullptr)
    kernel = p.extras == 0 ? ce::stats_streamed<T, false, true> : ce::stats_streamed<T, true, true>;
  kernel<<<static_cast<unsigned>(p.rows), static_cast<unsigned>(threads), 0, stream>>>(p, o, square_sum);
  check_launch(op);
}

Tensor cross_entropy_stats(const Tensor& logits, const Tensor& target, const std::optional<Tensor>& ce_weight,
                           int64_t vocab_start, int64_t ignore_index, std::optional<double> softcap,
                           bool return_class_sum, bool return_square_sum) {
  constexpr const char* op = "cross_entropy_stats";
  CrossEntropyOptions options =
      stats_options(op, logits, target, ce_weight, ignore_index, softcap, return_class_sum);
  const OpGuard guard(op, logits.get_device_index());
  const int64_t rows = logits.size(0);
  require(rows <= INT_MAX, op, ": ", rows, " rows are more than one launch can take");
  const int results = 3 + return_class_sum + return_square_sum;
  const Tensor stats = empty({results, rows}, ScalarType::Float, logits);
  if (rows == 0) return stats;
  const RowInput input = row_input(logits);
  options.problem.logits = input.data();
  options.problem.row_stride = input.rows.stride;
  float* out = static_cast<float*>(stats.mutable_data_ptr());
  const ce::StatsOutput output{vocab_start, out, out + rows, out + 2 * rows,
                               return_class_sum ? out + 3 * rows : nullptr};
  float* const square_sum = return_square_sum ? out + (results - 1) * rows : nullptr;
  dispatch_dtype(logits.scalar_type(), [&](auto tag) {
    launch_stats<typename decltype(tag)::type>(op, options.problem, output, square_sum,
                                               current_stream(logits));
  });
  return stats;
}

// Checks a vector with one float per row and makes it contiguous. The caller must hold the result until the
// launch.
Tensor row_values(const char* op, const char* name, const Tensor& values, const Tensor& logits) {
  const int64_t rows = logits.size(0);
  require(values.dim() == 1 && values.size(0) == rows && values.scalar_type() == ScalarType::Float, op, ": ",
          name, " has shape ", shape_text(values), " and dtype ", dtype_name(values.scalar_type()),
          ", expected (", rows, ",) float32");
  check_same_device(op, name, values, "logits", logits);
  return as_contiguous(values);
}

template <typename T, bool kExtras>
void launch_backward(const char* op, const ce::Problem& p, const ce::StatsBackward& b, cudaStream_t stream) {
  const bool aligned = rows_same_alignment<T>(p, b.out, b.out_stride);
  const unsigned tiles = backward_tiles<T>(op, p);
  const auto kernel = aligned ? ce::backward_from_coefficients<T, kExtras, true>
                              : ce::backward_from_coefficients<T, kExtras, false>;
  kernel<<<static_cast<unsigned>(p.rows) * tiles, ce::kBackwardThreads, 0, stream>>>(p, b,
                                                                                     static_cast<int>(tiles));
  check_launch(op);
}

// Writes the gradient to out, which may be the logits themselves.
void backward_into(const char* op, void* out, int64_t out_stride, const RowInput& logits,
                   CrossEntropyOptions& options, const Tensor& reference, const Tensor& coef_exp,
                   const Tensor& coef_target, const std::optional<Tensor>& coef_class,
                   const std::optional<Tensor>& coef_log, int64_t vocab_start) {
  const Tensor& like = logits.tensor;
  const int64_t rows = like.size(0);
  const Tensor contiguous_reference = row_values(op, "reference", reference, like);
  const Tensor contiguous_exp = row_values(op, "coef_exp", coef_exp, like);
  const Tensor contiguous_target = row_values(op, "coef_target", coef_target, like);
  std::optional<Tensor> contiguous_class, contiguous_log;
  if (coef_class) contiguous_class = row_values(op, "coef_class", *coef_class, like);
  if (coef_log) contiguous_log = row_values(op, "coef_log", *coef_log, like);
  if (rows == 0) return;
  options.problem.logits = logits.data();
  options.problem.row_stride = logits.rows.stride;
  if (coef_log) options.problem.extras |= ce::kCoefLog;
  const auto floats = [](const Tensor& t) { return static_cast<const float*>(t.const_data_ptr()); };
  const ce::StatsBackward backward{vocab_start,
                                   floats(contiguous_reference),
                                   floats(contiguous_exp),
                                   floats(contiguous_target),
                                   contiguous_class ? floats(*contiguous_class) : nullptr,
                                   contiguous_log ? floats(*contiguous_log) : nullptr,
                                   out,
                                   out_stride};
  dispatch_dtype(like.scalar_type(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    const auto launch = options.problem.extras == 0 ? launch_backward<T, false> : launch_backward<T, true>;
    launch(op, options.problem, backward, current_stream(like));
  });
}

Tensor cross_entropy_stats_backward(const Tensor& logits, const Tensor& target, const Tensor& reference,
                                    const Tensor& coef_exp, const Tensor& coef_target,
                                    const std::optional<Tensor>& coef_class,
                                    const std::optional<Tensor>& ce_weight, int64_t vocab_start,
                                    int64_t ignore_index, std::optional<double> softcap,
                                    const std::optional<Tensor>& coef_log) {
  constexpr const char* op = "cross_entropy_stats_backward";
  CrossEntropyOptions options =
      stats_options(op, logits, target, ce_weight, ignore_index, softcap, coef_class.has_value());
  const OpGuard guard(op, logits.get_device_index());
  RowOutput out = row_output(new_like(logits));
  backward_into(op, out.data(), out.rows.stride, row_input(logits), options, reference, coef_exp, coef_target,
                coef_class, coef_log, vocab_start);
  out.finish();
  return out.result;
}

void cross_entropy_stats_backward_(const Tensor& logits, const Tensor& target, const Tensor& reference,
                                   const Tensor& coef_exp, const Tensor& coef_target,
                                   const std::optional<Tensor>& coef_class,
                                   const std::optional<Tensor>& ce_weight, int64_t vocab_start,
                                   int64_t ignore_index, std::optional<double> softcap,
                                   const std::optional<Tensor>& coef_log) {
  constexpr const char* op = "cross_entropy_stats_backward_";
  CrossEntropyOptions options =
      stats_options(op, logits, target, ce_weight, ignore_index, softcap, coef_class.has_value());
  const OpGuard guard(op, logits.get_device_index());
  check_written(op, {{"logits", logits}},
                {{"target", target},
                 {"reference", reference},
                 {"coef_exp", coef_exp},
                 {"coef_target", coef_target},
                 {"coef_class", coef_class},
                 {"ce_weight", ce_weight},
                 {"coef_log", coef_log}});
  const RowInput rows = row_input(logits);
  backward_into(op, rows.tensor.mutable_data_ptr(), rows.rows.stride, rows, options, reference, coef_exp,
                coef_target, coef_class, coef_log, vocab_start);
  write_back(logits, rows);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(liger, CUDA, m) {
  m.impl("cross_entropy_stats", TORCH_BOX(&cross_entropy_stats));
  m.impl("cross_entropy_stats_backward", TORCH_BOX(&cross_entropy_stats_backward));
  m.impl("cross_entropy_stats_backward_", TORCH_BOX(&cross_entropy_stats_backward_));
}

}  // namespace liger
