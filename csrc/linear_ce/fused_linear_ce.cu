#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <climits>
#include <tuple>

#include "cross_entropy/cross_entropy.h"
#include "host/dispatch.h"
#include "host/gemm.h"
#include "host/readback.h"
#include "linear_ce/fused_linear_ce.cuh"
#include "linear_ce/planner.h"
#include "linear_ce/sm90/fused_linear_ce.h"
#include "linear_ce/valid_rows.cuh"

namespace liger {
namespace {

constexpr const char* kOp = "fused_linear_ce";

void zero(const Tensor& tensor, cudaStream_t stream) {
  if (tensor.numel() == 0) return;
  check_cuda(cudaMemsetAsync(tensor.mutable_data_ptr(), 0, tensor.numel() * tensor.element_size(), stream),
             kOp);
}

void add_column_sums(const Matrix& x, int64_t rows, int64_t columns, const Tensor& total, bool first,
                     const Tensor* rounded, cudaStream_t stream) {
  dispatch_dtype(x.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const int64_t per_block = 32 * kVec<T>;
    flce::sum_columns<T>
        <<<static_cast<unsigned>((columns + per_block - 1) / per_block), dim3(32, flce::kColumnWarps), 0,
           stream>>>(static_cast<const T*>(x.data), x.stride, static_cast<int>(rows),
                     static_cast<int>(columns), static_cast<float*>(total.mutable_data_ptr()), first,
                     rounded ? static_cast<T*>(rounded->mutable_data_ptr()) : nullptr);
  });
  check_launch(kOp);
}

void round_into(const Tensor& result, const Tensor& sum, cudaStream_t stream) {
  const int64_t size = result.numel();
  dispatch_dtype(result.scalar_type(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    const int64_t per_block = int64_t{flce::kRoundThreads} * kVec<T>;
    flce::round_sum<T>
        <<<static_cast<unsigned>((size + per_block - 1) / per_block), flce::kRoundThreads, 0, stream>>>(
            static_cast<const float*>(sum.const_data_ptr()), static_cast<T*>(result.mutable_data_ptr()),
            size);
  });
  check_launch(kOp);
}

// Rows of x, those that `source` says, to out.
template <typename Source>
void copy_rows(const Matrix& x, const Source& source, int64_t rows, int64_t columns, const Matrix& out,
               cudaStream_t stream) {
  dispatch_dtype(x.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    compact::launch_copy_rows<T>(static_cast<const T*>(x.data), x.stride, source, rows, columns,
                                 static_cast<T*>(out.data), out.stride, stream);
  });
  check_launch(kOp);
}

Tensor first_rows(Tensor memory, int64_t rows, int64_t columns) {
  return torch::stable::view(torch::stable::narrow(memory, 0, 0, rows * columns), {rows, columns});
}

// Leaves ignored rows out: the rows that are computed lie side by side, and results go back to where they
// belong.
class Compaction {
 public:
  Compaction(const CrossEntropyOptions& options, int device, cudaStream_t stream)
      : options_(options),
        rows_(options.target.numel()),
        stream_(stream),
        lists_(empty({2 * rows_ + 1}, ScalarType::Int, options.target)),
        readback_(device, kOp) {
    int32_t* const lists = static_cast<int32_t*>(lists_.mutable_data_ptr());
    list_ = {lists, lists + rows_, lists + 2 * rows_};
    compact::launch_list_rows(options.problem.targets, rows_, list_, readback_.numbers(), stream);
    check_launch(kOp);
    readback_.mark(stream);
  }

  // Waits for the list, so there should be other work behind it by now.
  void wait() { readback_.wait(); }
  int64_t valid_rows() const { return readback_.numbers()[0]; }
  int64_t leading_rows() const { return readback_.numbers()[1]; }

  // The computed rows from `first` on, of a matrix that has all rows.
  void gather(const Matrix& all, int64_t columns, int64_t first, int64_t count, const Matrix& out) const {
    copy_rows(all, compact::ListedRows{list_, first}, count, columns, out, stream_);
  }

  // The options of the computed rows.
  CrossEntropyOptions options() const {
    CrossEntropyOptions compacted = options_;
    compacted.target = empty({valid_rows()}, options_.target.scalar_type(), options_.target);
    compacted.problem.targets.data = compacted.target.const_data_ptr();
    float* token_weight = nullptr;
    if (options_.token_weight) {
      compacted.token_weight = empty({valid_rows()}, ScalarType::Float, options_.target);
      token_weight = static_cast<float*>(compacted.token_weight->mutable_data_ptr());
      compacted.problem.token_weight = token_weight;
    }
    compact::launch_gather_targets(options_.problem.targets, options_.problem.token_weight, valid_rows(),
                                   list_, compacted.target.mutable_data_ptr(), token_weight, stream_);
    check_launch(kOp);
    return compacted;
  }

  void expand(const CrossEntropyResults& computed, const CrossEntropyResults& all) const {
    compact::launch_expand_results(pointers(computed), pointers(all), list_.position, rows_, stream_);
    check_launch(kOp);
  }

  // The rows of a matrix that has all rows, in place: the computed ones are its first.
  void expand(const Matrix& x, int64_t columns) const {
    dispatch_dtype(x.dtype, [&](auto tag) {
      using T = typename decltype(tag)::type;
      compact::launch_expand_rows<T>(static_cast<T*>(x.data), x.stride, list_.position, rows_, columns,
                                     stream_);
    });
    check_launch(kOp);
  }

 private:
  static compact::Results pointers(const CrossEntropyResults& results) {
    ce::Problem problem{};
    results.attach(problem, 0);
    return {problem.loss, problem.z_loss, problem.logprobs, problem.entropy, problem.predicted};
  }

  const CrossEntropyOptions& options_;
  int64_t rows_;
  cudaStream_t stream_;
  Tensor lists_;
  compact::RowList list_{};
  Readback readback_;
};

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> fused_linear_ce_forward(
    const Tensor& input, const Tensor& weight, const Tensor& target, const std::optional<Tensor>& bias,
    const std::optional<Tensor>& ce_weight, const std::optional<Tensor>& token_weight,
    const std::optional<Tensor>& denominator, int64_t ignore_index, double label_smoothing,
    double lse_square_scale, std::optional<double> softcap, const std::string& reduction,
    std::optional<ScalarType> accum_dtype, std::optional<int64_t> memory_budget, bool return_z_loss,
    bool return_token_accuracy, bool return_predicted_tokens, bool return_logprobs, bool return_entropy,
    bool need_grad_input, bool need_grad_weight, bool need_grad_bias) {
  check_fused_linear_ce(input, weight, target, bias, ce_weight, token_weight, denominator, label_smoothing,
                        softcap, reduction, accum_dtype, memory_budget);
  require_cuda_dtype(kOp, "input", input);
  const int device = input.get_device_index();
  const DeviceGuard guard(device);
  const cudaStream_t stream = current_stream(input);
  const ScalarType dtype = input.scalar_type();
  const int64_t rows = input.size(0), hidden = input.size(1), vocab = weight.size(0);
  const int64_t element = static_cast<int64_t>(input.element_size());
  need_grad_bias = need_grad_bias && bias.has_value();

  CrossEntropyOptions options(target, ce_weight, token_weight, vocab, ignore_index, label_smoothing,
                              lse_square_scale, softcap);
  const Tensor used_denominator = empty({}, ScalarType::Float, input);
  prepare_cross_entropy(kOp, options, denominator, reduction == "mean", used_denominator);
  const CrossEntropyResults results(input, rows, reduction == "none", return_z_loss, return_token_accuracy,
                                    return_predicted_tokens, return_logprobs, return_entropy);

  const bool exact = !accum_dtype || *accum_dtype == ScalarType::Float;
  const FusedLinearCe call{input,
                           weight,
                           bias,
                           options,
                           results,
                           used_denominator,
                           need_grad_input,
                           need_grad_weight,
                           exact,
                           memory_budget ? *memory_budget : default_memory_budget(),
                           device,
                           stream};
  if (const std::optional<Sm90Plan> plan = plan_sm90(call)) {
    const FusedLinearCeGradients gradients = fused_linear_ce_sm90(call, *plan);
    results.reduce(kOp, options, used_denominator);
    return {results.loss,           results.z_loss,  results.token_accuracy, results.predicted_tokens,
            results.logprobs,       results.entropy, gradients.input,        gradients.weight,
            no_tensor(dtype, input)};
  }
  const ChunkProblem chunks{rows,
                            hidden,
                            vocab,
                            element,
                            need_grad_weight,
                            exact,
                            memory_budget ? *memory_budget : default_memory_budget()};
  ChunkLayout layout = lay_out_chunks(chunks, need_grad_input, rows, rows);
  const auto wanted = [&](bool needed, std::vector<int64_t> shape, ScalarType type) {
    return needed ? empty(std::move(shape), type, input) : no_tensor(type, input);
  };
  const bool summed = layout.plan.accumulator_bytes > 0;
  const bool in_grad_weight = layout.place == LogitsIn::kGradWeight;
  const bool in_grad_input = layout.place == LogitsIn::kGradInput;
  const Tensor grad_bias = wanted(need_grad_bias, {vocab}, dtype);
  const Tensor bias_sum = wanted(need_grad_bias, {vocab}, ScalarType::Float);
  Tensor grad_weight = wanted(need_grad_weight && (in_grad_weight || !summed), {vocab, hidden}, dtype);
  const Tensor weight_sum = summed ? empty({vocab, hidden}, ScalarType::Float, input) : grad_weight;
  std::optional<Tensor> logits = in_grad_weight ? grad_weight : empty({layout.elements}, dtype, input);
  const Tensor grad_input =
      in_grad_input ? first_rows(*logits, rows, hidden) : wanted(need_grad_input, {rows, hidden}, dtype);

  const Tensor x = as_matrix(input), w = as_matrix(weight);
  std::optional<Tensor> dense_bias;
  if (bias) dense_bias = torch::stable::contiguous(*bias);
  const bool write_gradient = need_grad_input || need_grad_weight || need_grad_bias;
  const auto from_row = [&](Matrix m, int64_t row) {
    m.data = static_cast<char*>(m.data) + row * m.stride * element;
    return m;
  };
  const auto logits_at = [&](const Chunk& chunk) {
    return Matrix{static_cast<char*>(logits->mutable_data_ptr()) + chunk.offset * element, dtype,
                  layout.stride};
  };
  const Gemm gemm(kOp, stream);

  // Copied rows lie where their gradient will, or in memory of their own where there is none.
  std::optional<Tensor> own_rows;
  const auto place_of = [&](int64_t first, int64_t count) {
    if (need_grad_input) return from_row(matrix(grad_input), first);
    if (!own_rows || own_rows->size(0) < count) own_rows = empty({count, hidden}, dtype, input);
    return matrix(*own_rows);
  };
  const auto gathered = [&](const Compaction& compaction, int64_t first, int64_t count) {
    const Matrix place = place_of(first, count);
    compaction.gather(matrix(x), hidden, first, count, place);
    return place;
  };

  // The device multiplies the head, which is needed in any case, while the host learns how many rows are
  // valid.
  std::optional<Compaction> compaction;
  int64_t head = 0;
  bool all_valid = false;  // as far as the host knows
  if (layout.head_rows > 0 && rows <= INT_MAX && !is_capturing(stream, kOp)) {
    compaction.emplace(options, device, stream);
    head = layout.head_rows;
    gemm(head, vocab, hidden, gathered(*compaction, 0, head), matrix(w, true), 0.0f,
         logits_at(layout.chunks.front()));
    compaction->wait();
    all_valid = compaction->valid_rows() == rows;
    layout = lay_out_chunks(chunks, need_grad_input, compaction->valid_rows(), compaction->leading_rows());
    if (layout.rows == rows) compaction.reset();
  }
  std::optional<CrossEntropyOptions> computed_options;
  std::optional<CrossEntropyResults> computed_results;
  if (compaction) {
    computed_options.emplace(compaction->options());
    computed_results.emplace(input, layout.rows, true, return_z_loss, return_token_accuracy,
                             return_predicted_tokens, return_logprobs, return_entropy);
  }

  for (const Chunk& chunk : layout.chunks) {
    const bool is_first = chunk.first == 0, is_last = chunk.first + chunk.rows == layout.rows;
    const int64_t count = chunk.rows;
    const Matrix z = logits_at(chunk), z_transposed{z.data, dtype, z.stride, true};
    const Matrix x_rows =
        compaction ? gathered(*compaction, chunk.first, count) : from_row(matrix(x), chunk.first);
    const int64_t done = is_first ? std::min(head, count) : 0;
    gemm(count - done, vocab, hidden, from_row(x_rows, done), matrix(w, true), 0.0f, from_row(z, done));

    ce::Problem problem = (compaction ? *computed_options : options).at_row(chunk.first);
    problem.logits = z.data;
    problem.row_stride = z.stride;
    problem.rows = count;
    problem.denominator = static_cast<const float*>(used_denominator.const_data_ptr());
    if (dense_bias) {
      problem.bias = dense_bias->const_data_ptr();
      problem.extras |= ce::kBias;
    }
    (compaction ? *computed_results : results).attach(problem, chunk.first);
    launch_rows(kOp, problem, dtype, write_gradient, device, stream);

    if (need_grad_weight) {
      Matrix counted = x_rows;
      if (!compaction && !all_valid) {
        // The gradient of an ignored row is zero, but zero times an infinite or NaN hidden state is NaN.
        counted = place_of(chunk.first, count);
        copy_rows(x_rows, compact::ValidRows{problem.targets}, count, hidden, counted, stream);
      }
      gemm(vocab, hidden, count, z_transposed, counted, is_first ? 0.0f : 1.0f, matrix(weight_sum));
    }
    if (need_grad_bias) {
      add_column_sums(z, count, vocab, bias_sum, is_first, is_last ? &grad_bias : nullptr, stream);
    }
    // Last, because it may overwrite the rows of the input.
    if (need_grad_input) {
      gemm(count, hidden, vocab, z, matrix(w), 0.0f, from_row(matrix(grad_input), chunk.first));
    }
  }
  if (compaction) {
    compaction->expand(*computed_results, results);
    if (need_grad_input && !layout.chunks.empty()) compaction->expand(matrix(grad_input), hidden);
  }
  if (summed && !in_grad_weight) {
    logits.reset();  // its memory is free for the allocator before the gradient asks for some
    grad_weight = wanted(true, {vocab, hidden}, dtype);
  }
  if (layout.chunks.empty()) {
    zero(grad_input, stream);
    zero(grad_weight, stream);
    zero(grad_bias, stream);
  } else if (summed) {
    round_into(grad_weight, weight_sum, stream);
  }
  results.reduce(kOp, options, used_denominator);
  return {results.loss,
          results.z_loss,
          results.token_accuracy,
          results.predicted_tokens,
          results.logprobs,
          results.entropy,
          grad_input,
          grad_weight,
          grad_bias};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(liger, CUDA, m) {
  m.impl("fused_linear_ce_forward", TORCH_BOX(&fused_linear_ce_forward));
}

}  // namespace liger
