#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <tuple>

#include "common/dispatch.h"
#include "common/gemm.h"
#include "cross_entropy.h"
#include "kernels/fused_linear_ce.cuh"
#include "planner.h"

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

// Where the logits of each chunk lie, and how many rows a chunk has.
//
// Pooled, for chunks too small for the speed of the products: the memory of a chunk follows that of
// grad_input, so that the rows of grad_input which are not written yet hold logits too. Chunks begin twice as
// large where the two are of one size, and never are smaller than planned. The pool lives as long as
// grad_input: no longer than until the backward of what made the input, and no larger than what the op held
// anyway.
struct ChunkMemory {
  const ChunkPlan& plan;
  int64_t rows, hidden, stride;
  bool pooled;

  ChunkMemory(const ChunkPlan& plan, int64_t rows, int64_t hidden, int64_t stride, int64_t element,
              bool possible)
      : plan(plan),
        rows(rows),
        hidden(hidden),
        stride(stride),
        pooled(possible && plan.chunks > 1 && plan.chunk_rows < kFullSpeedRows &&
               hidden * element % 16 == 0) {}

  int64_t pool_size() const { return rows * hidden + plan.chunk_rows * stride; }
  Tensor grad_input(const Tensor& pool) const {
    Tensor all = pool;
    return torch::stable::view(torch::stable::narrow(all, 0, 0, rows * hidden), {rows, hidden});
  }

  int64_t rows_at(int64_t first) const {
    const int64_t left = rows - first;
    if (!pooled) return std::min(plan.chunk_rows, left);
    // The rows of grad_input that this chunk writes, and its logits behind them.
    const int64_t fit = (pool_size() - first * hidden) / (hidden + stride);
    if (fit >= left) return left;
    // A tile that is less than half full costs more than it brings.
    const int64_t whole = fit / kTileRows * kTileRows;
    return whole > 0 && fit - whole < kTileRows / 2 ? whole : fit;
  }
  // In elements, from the start of the pool or of the chunk's own memory.
  int64_t offset_at(int64_t first, int64_t count) const { return pooled ? (first + count) * hidden : 0; }
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
  const ChunkPlan plan = plan_chunks({rows, hidden, vocab, element, need_grad_weight, exact,
                                      memory_budget ? *memory_budget : default_memory_budget()});
  const auto wanted = [&](bool needed, std::vector<int64_t> shape, ScalarType type) {
    return needed ? empty(std::move(shape), type, input) : no_tensor(type, input);
  };
  // Rows of logits start at 16-byte boundaries whatever the vocabulary: odd strides slow every product down.
  const int64_t stride = logits_row_bytes(vocab, element) / element;
  // While the weight gradient is summed in float32 elsewhere, its own memory holds the logits, if they fit.
  const bool summed = plan.accumulator_bytes > 0;
  const bool hosted = summed && plan.chunk_rows * stride <= vocab * hidden;
  const ChunkMemory memory(plan, rows, hidden, stride, element, need_grad_input && !hosted);
  const Tensor pool = memory.pooled ? empty({memory.pool_size()}, dtype, input) : no_tensor(dtype, input);
  const Tensor grad_input =
      memory.pooled ? memory.grad_input(pool) : wanted(need_grad_input, {rows, hidden}, dtype);
  const Tensor grad_bias = wanted(need_grad_bias, {vocab}, dtype);
  const Tensor bias_sum = wanted(need_grad_bias, {vocab}, ScalarType::Float);
  Tensor grad_weight = wanted(need_grad_weight && (hosted || !summed), {vocab, hidden}, dtype);
  const Tensor weight_sum = summed ? empty({vocab, hidden}, ScalarType::Float, input) : grad_weight;
  std::optional<Tensor> logits = memory.pooled ? pool
                                 : hosted      ? grad_weight
                                               : empty({plan.chunk_rows, stride}, dtype, input);

  const Tensor x = as_matrix(input), w = as_matrix(weight);
  std::optional<Tensor> dense_bias;
  if (bias) dense_bias = torch::stable::contiguous(*bias);
  const bool write_gradient = need_grad_input || need_grad_weight || need_grad_bias;
  const auto from_row = [&](Matrix m, int64_t row) {
    m.data = static_cast<char*>(m.data) + row * m.stride * element;
    return m;
  };

  const Gemm gemm(kOp, stream);
  int64_t count = 0;
  for (int64_t first = 0; first < rows && plan.chunks > 0; first += count) {
    count = memory.rows_at(first);
    const bool is_first = first == 0, is_last = first + count == rows;
    const Matrix chunk{
        static_cast<char*>(logits->mutable_data_ptr()) + memory.offset_at(first, count) * element, dtype,
        stride};
    const Matrix chunk_transposed{chunk.data, dtype, stride, true};
    const Matrix x_rows = from_row(matrix(x), first);
    gemm(count, vocab, hidden, x_rows, matrix(w, true), 0.0f, chunk);

    ce::Problem problem = options.at_row(first);
    problem.logits = chunk.data;
    problem.row_stride = stride;
    problem.rows = count;
    problem.denominator = static_cast<const float*>(used_denominator.const_data_ptr());
    if (dense_bias) {
      problem.bias = dense_bias->const_data_ptr();
      problem.extras |= ce::kBias;
    }
    results.attach(problem, first);
    launch_rows(kOp, problem, dtype, write_gradient, device, stream);

    if (need_grad_input) {
      gemm(count, hidden, vocab, chunk, matrix(w), 0.0f, from_row(matrix(grad_input), first));
    }
    if (need_grad_weight) {
      gemm(vocab, hidden, count, chunk_transposed, x_rows, is_first ? 0.0f : 1.0f, matrix(weight_sum));
    }
    if (need_grad_bias) {
      add_column_sums(chunk, count, vocab, bias_sum, is_first, is_last ? &grad_bias : nullptr, stream);
    }
  }
  if (summed) {
    if (!hosted) {
      logits.reset();  // its memory is free for the allocator before the gradient asks for some
      grad_weight = wanted(true, {vocab, hidden}, dtype);
    }
    round_into(grad_weight, weight_sum, stream);
  } else if (plan.chunks == 0) {
    zero(grad_weight, stream);
    zero(grad_bias, stream);
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
