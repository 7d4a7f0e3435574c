// SPDX-License-Identifier: BSD-3-Clause
#include "lm_head/generic_engine.h"

#include <algorithm>
#include <climits>

#include "host/gemm.h"
#include "host/launch/dispatch.h"
#include "host/readback.h"
#include "lm_head/planner.h"
#include "lm_head/reductions.cuh"
#include "lm_head/valid_rows.cuh"

namespace liger {
namespace {

constexpr const char* kOp = FusedLinearCe::kOp;

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
    lm_head::sum_columns<T>
        <<<static_cast<unsigned>(ceil_div(columns, per_block)), dim3(32, lm_head::kColumnWarps), 0, stream>>>(
            static_cast<const T*>(x.data), x.stride, static_cast<int>(rows), static_cast<int>(columns),
            static_cast<float*>(total.mutable_data_ptr()), first,
            rounded ? static_cast<T*>(rounded->mutable_data_ptr()) : nullptr);
  });
  check_launch(kOp);
}

void round_into(const Tensor& result, const Tensor& sum, cudaStream_t stream) {
  const int64_t size = result.numel();
  dispatch_dtype(result.scalar_type(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    const int64_t per_block = int64_t{lm_head::kRoundThreads} * kVec<T>;
    lm_head::round_sum<T>
        <<<static_cast<unsigned>(ceil_div(size, per_block)), lm_head::kRoundThreads, 0, stream>>>(
            static_cast<const float*>(sum.const_data_ptr()), static_cast<T*>(result.mutable_data_ptr()),
            size);
  });
  check_launch(kOp);
}

template <typename Source>
void copy_rows(const Matrix& x, const Source& source, int64_t rows, int64_t columns, const Matrix& out,
               cudaStream_t stream) {
  dispatch_dtype(x.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    valid_rows::launch_copy_rows<T>(static_cast<const T*>(x.data), x.stride, source, rows, columns,
                                    static_cast<T*>(out.data), out.stride, stream);
  });
  check_launch(kOp);
}

Tensor as_rows(Tensor memory, int64_t rows, int64_t columns) {
  return torch::stable::view(torch::stable::narrow(memory, 0, 0, rows * columns), {rows, columns});
}

// Skips ignored rows: the engine computes the compacted valid rows, and results are scattered to the rows of
// the batch.
class ValidRows {
 public:
  ValidRows(const CrossEntropyOptions& options, int device, cudaStream_t stream)
      : options_(options),
        rows_(options.target.numel()),
        stream_(stream),
        memory_(empty({2 * rows_ + 1}, ScalarType::Int, options.target)),
        readback_(device, kOp) {
    int32_t* const memory = static_cast<int32_t*>(memory_.mutable_data_ptr());
    index_ = {memory, memory + rows_, memory + 2 * rows_};
    valid_rows::launch_index_valid_rows(options.problem.targets, rows_, index_, readback_.numbers(), stream);
    check_launch(kOp);
    readback_.mark(stream);
  }

  // The host waits for the index. Call it after other work has been launched.
  void wait() { readback_.wait(); }
  int64_t count() const { return readback_.numbers()[0]; }
  int64_t leading_count() const { return readback_.numbers()[1]; }

  // Copies `count` valid rows, starting with valid row `first`, from a matrix with all rows.
  void gather(const Matrix& all, int64_t columns, int64_t first, int64_t count, const Matrix& out) const {
    copy_rows(all, valid_rows::GatheredRows{index_, first}, count, columns, out, stream_);
  }

  // The options of the valid rows.
  CrossEntropyOptions options() const {
    CrossEntropyOptions compacted = options_;
    compacted.target = empty({count()}, options_.target.scalar_type(), options_.target);
    compacted.problem.targets.data = compacted.target.const_data_ptr();
    float* token_weight = nullptr;
    if (options_.token_weight) {
      compacted.token_weight = empty({count()}, ScalarType::Float, options_.target);
      token_weight = static_cast<float*>(compacted.token_weight->mutable_data_ptr());
      compacted.problem.token_weight = token_weight;
    }
    valid_rows::launch_gather_targets(options_.problem.targets, options_.problem.token_weight, count(),
                                      index_, compacted.target.mutable_data_ptr(), token_weight, stream_);
    check_launch(kOp);
    return compacted;
  }

  void scatter(const CrossEntropyResults& compacted, const CrossEntropyResults& all) const {
    valid_rows::launch_expand_results(pointers(compacted), pointers(all), index_.position, rows_, stream_);
    check_launch(kOp);
  }

  // Moves the valid rows at the start of x to their rows, in place.
  void scatter(const Matrix& x, int64_t columns) const {
    dispatch_dtype(x.dtype, [&](auto tag) {
      using T = typename decltype(tag)::type;
      valid_rows::launch_expand_rows<T>(static_cast<T*>(x.data), x.stride, index_.position, rows_, columns,
                                        stream_);
    });
    check_launch(kOp);
  }

 private:
  static valid_rows::Results pointers(const CrossEntropyResults& results) {
    ce::Problem problem{};
    results.attach(problem, 0);
    return {problem.loss, problem.z_loss, problem.logprobs, problem.entropy, problem.predicted};
  }

  const CrossEntropyOptions& options_;
  int64_t rows_;
  cudaStream_t stream_;
  Tensor memory_;
  valid_rows::RowIndex index_{};
  Readback readback_;
};

class GenericEngine {
 public:
  explicit GenericEngine(const FusedLinearCe& call)
      : call_(call),
        stream_(call.stream),
        dtype_(call.input.scalar_type()),
        element_(static_cast<int64_t>(call.input.element_size())),
        rows_(call.input.size(0)),
        hidden_(call.input.size(1)),
        vocab_(call.weight.size(0)),
        problem_{rows_,
                 hidden_,
                 vocab_,
                 element_,
                 call.need_grad_weight,
                 call.exact_accumulation,
                 call.memory_budget},
        layout_(lay_out_chunks(problem_, call.need_grad_input, rows_, rows_)),
        x_(as_matrix(call.input)),
        w_(as_matrix(call.weight)),
        bias_(call.bias ? std::optional<Tensor>(as_contiguous(*call.bias)) : std::nullopt),
        gemm_(kOp, call.stream),
        grad_bias_(allocate(call.need_grad_bias, {vocab_}, dtype_)),
        bias_sum_(allocate(call.need_grad_bias, {vocab_}, ScalarType::Float)),
        grad_weight_(allocate(call.need_grad_weight && (in(LogitsIn::kGradWeight) || !accumulates()),
                              {vocab_, hidden_}, dtype_)),
        weight_sum_(accumulates() ? empty({vocab_, hidden_}, ScalarType::Float, call.input) : grad_weight_),
        logits_(in(LogitsIn::kGradWeight) ? grad_weight_ : empty({layout_.elements}, dtype_, call.input)),
        grad_input_(in(LogitsIn::kGradInput) ? as_rows(*logits_, rows_, hidden_)
                                             : allocate(call.need_grad_input, {rows_, hidden_}, dtype_)) {}

  FusedLinearCeGradients run() {
    prefetch();
    if (valid_) {
      valid_options_.emplace(valid_->options());
      valid_results_.emplace(call_.results.for_rows(call_.input, layout_.rows));
    }
    for (const Chunk& chunk : layout_.chunks) run_chunk(chunk);
    if (valid_) {
      valid_->scatter(*valid_results_, call_.results);
      if (call_.need_grad_input && !layout_.chunks.empty()) valid_->scatter(matrix(grad_input_), hidden_);
    }
    finish();
    return {grad_input_, grad_weight_, grad_bias_};
  }

 private:
  bool accumulates() const { return layout_.plan.accumulator_bytes > 0; }
  bool in(LogitsIn memory) const { return layout_.logits_in == memory; }
  Tensor allocate(bool needed, std::vector<int64_t> shape, ScalarType dtype) const {
    return needed ? empty(std::move(shape), dtype, call_.input) : no_tensor(dtype, call_.input);
  }
  Matrix from_row(Matrix m, int64_t row) const {
    m.data = static_cast<char*>(m.data) + row * m.stride * element_;
    return m;
  }
  Matrix logits_of(const Chunk& chunk) const {
    return {static_cast<char*>(logits_->mutable_data_ptr()) + chunk.offset * element_, dtype_,
            layout_.stride};
  }

  // Memory for copied rows of the input: the memory of their gradient, or a buffer if the gradient is not
  // needed.
  Matrix rows_memory(int64_t first, int64_t count) {
    if (call_.need_grad_input) return from_row(matrix(grad_input_), first);
    if (!own_rows_ || own_rows_->size(0) < count) own_rows_ = empty({count, hidden_}, dtype_, call_.input);
    return matrix(*own_rows_);
  }
  Matrix gather(int64_t first, int64_t count) {
    const Matrix rows = rows_memory(first, count);
    valid_->gather(matrix(x_), hidden_, first, count, rows);
    return rows;
  }

  // The logits GEMM of the first rows, which hides the time until the host knows the number of valid rows.
  void prefetch() {
    const NvtxRange range("prefetch logits");
    if (layout_.prefetch_rows == 0 || rows_ > INT_MAX || is_capturing(stream_, kOp)) return;
    valid_.emplace(call_.options, call_.device, stream_);
    prefetched_ = layout_.prefetch_rows;
    gemm_(prefetched_, vocab_, hidden_, gather(0, prefetched_), matrix(w_, true), 0.0f,
          logits_of(layout_.chunks.front()));
    valid_->wait();
    all_valid_ = valid_->count() == rows_;
    layout_ = lay_out_chunks(problem_, call_.need_grad_input, valid_->count(), valid_->leading_count());
    if (layout_.rows == rows_) valid_.reset();
  }

  void run_chunk(const Chunk& chunk) {
    const NvtxRange range("chunk");
    const bool first = chunk.first == 0, last = chunk.first + chunk.rows == layout_.rows;
    const Matrix z = logits_of(chunk);
    const Matrix x = valid_ ? gather(chunk.first, chunk.rows) : from_row(matrix(x_), chunk.first);
    const int64_t done = first ? std::min(prefetched_, chunk.rows) : 0;
    gemm_(chunk.rows - done, vocab_, hidden_, from_row(x, done), matrix(w_, true), 0.0f, from_row(z, done));
    const ce::Problem problem = gradient_of_logits(chunk, z);
    if (call_.need_grad_weight) {
      const Matrix z_transposed{z.data, dtype_, z.stride, true};
      gemm_(vocab_, hidden_, chunk.rows, z_transposed, without_ignored(x, chunk, problem),
            first ? 0.0f : 1.0f, matrix(weight_sum_));
    }
    if (call_.need_grad_bias) {
      add_column_sums(z, chunk.rows, vocab_, bias_sum_, first, last ? &grad_bias_ : nullptr, stream_);
    }
    // The input gradient comes last, because it may overwrite the rows of the input.
    if (call_.need_grad_input) {
      gemm_(chunk.rows, hidden_, vocab_, z, matrix(w_), 0.0f, from_row(matrix(grad_input_), chunk.first));
    }
  }

  // Losses and metrics of the chunk; the gradient overwrites the logits.
  ce::Problem gradient_of_logits(const Chunk& chunk, const Matrix& z) const {
    ce::Problem problem = (valid_ ? *valid_options_ : call_.options).at_row(chunk.first);
    problem.logits = z.data;
    problem.row_stride = z.stride;
    problem.rows = chunk.rows;
    problem.denominator = static_cast<const float*>(call_.used_denominator.const_data_ptr());
    if (bias_) {
      problem.bias = bias_->const_data_ptr();
      problem.extras |= ce::kBias;
    }
    (valid_ ? *valid_results_ : call_.results).attach(problem, chunk.first);
    const bool need_gradient = call_.need_grad_input || call_.need_grad_weight || call_.need_grad_bias;
    launch_rows(kOp, problem, dtype_, need_gradient, call_.device, stream_);
    return problem;
  }

  // The gradient of an ignored row is zero, but zero times an infinite or NaN hidden state is NaN.
  Matrix without_ignored(const Matrix& x, const Chunk& chunk, const ce::Problem& problem) {
    if (valid_ || all_valid_) return x;
    const Matrix masked = rows_memory(chunk.first, chunk.rows);
    copy_rows(x, valid_rows::MaskedRows{problem.targets}, chunk.rows, hidden_, masked, stream_);
    return masked;
  }

  void finish() {
    if (accumulates() && !in(LogitsIn::kGradWeight)) {
      logits_.reset();  // the allocator can reuse the memory for the gradient
      grad_weight_ = allocate(true, {vocab_, hidden_}, dtype_);
    }
    if (layout_.chunks.empty()) {
      zero(grad_input_, stream_);
      zero(grad_weight_, stream_);
      zero(grad_bias_, stream_);
    } else if (accumulates()) {
      round_into(grad_weight_, weight_sum_, stream_);
    }
  }

  const FusedLinearCe& call_;
  const cudaStream_t stream_;
  const ScalarType dtype_;
  const int64_t element_, rows_, hidden_, vocab_;
  const ChunkProblem problem_;
  ChunkLayout layout_;
  const Tensor x_, w_;
  const std::optional<Tensor> bias_;
  const Gemm gemm_;
  const Tensor grad_bias_, bias_sum_;
  Tensor grad_weight_;
  const Tensor weight_sum_;
  std::optional<Tensor> logits_;
  const Tensor grad_input_;

  std::optional<Tensor> own_rows_;
  std::optional<ValidRows> valid_;  // if ignored rows are skipped
  std::optional<CrossEntropyOptions> valid_options_;
  std::optional<CrossEntropyResults> valid_results_;
  int64_t prefetched_ = 0;
  bool all_valid_ = false;  // the host knows that no row is ignored
};

}  // namespace

FusedLinearCeGradients fused_linear_ce_generic(const FusedLinearCe& call) {
  return GenericEngine(call).run();
}

}  // namespace liger
