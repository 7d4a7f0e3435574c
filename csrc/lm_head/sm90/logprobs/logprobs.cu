// SPDX-License-Identifier: BSD-3-Clause

// fused_linear_logprobs on the wgmma engine: the gradients arrive after the forward.
//
// If the exponentials of all rows are kept from the forward to the backward, forward and backward take three
// GEMMs together. The backward does not write to the exponentials, so it may run again. Otherwise the
// backward recomputes them, chunk by chunk, which makes four GEMMs.
//
// python/liger/ops/fused_linear_logprobs/chunks.py calls these internal ops.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <tuple>
#include <type_traits>

#include "cross_entropy/cross_entropy.h"
#include "lm_head/sm90/chunk/chunk.h"
#include "lm_head/sm90/logprobs/kept_rows.cuh"
#include "lm_head/sm90/logprobs/logprobs.h"
#include "lm_head/sm90/logprobs/metrics.cuh"

namespace liger {
namespace {

using lm_head::Element16;
using lm_head::KeptRow;
using lm_head::memory_of;

constexpr const char* kOp = "fused_linear_logprobs";
using sm90::kKeptNumbers;

// Calls f(std::type_identity<T>) with the element type of a batch; IndexedRows has checked the dtype.
template <typename F>
void with_elements(const lm_head::Batch& batch, const F& f) {
  batch.is_float16() ? f(std::type_identity<__half>{}) : f(std::type_identity<__nv_bfloat16>{});
}

// Arguments of both forward and backward.
struct Call {
  const Tensor &input, &weight, &target;
  int64_t ignore_index;
  double temperature;
  int64_t memory_budget;
};

// The rows of a call with the index of the valid ones.
class IndexedRows {
 public:
  IndexedRows(const Call& call, bool need_grad_input, bool need_grad_weight, bool with_metrics)
      : target_(as_contiguous(call.target)),
        batch_(lm_head::batch_of(lm_head::dense(call.input), lm_head::dense(call.weight), need_grad_input,
                                 need_grad_weight, with_metrics, call.temperature)),
        index_memory_(empty({lm_head::row_index_bytes(batch_.rows())}, ScalarType::Byte, call.input)) {
    require(call.input.scalar_type() == ScalarType::BFloat16 || batch_.is_float16(), kOp,
            ": the engine of compute capability 9.0 does not take input of dtype ",
            dtype_name(call.input.scalar_type()), ", expected bfloat16 or float16");
    ce::Problem& problem = batch_.problem;
    problem.rows = batch_.rows();
    problem.vocab = static_cast<int>(batch_.vocab());
    problem.targets = {target_.const_data_ptr(), target_.scalar_type() == ScalarType::Int, call.ignore_index};
  }
  IndexedRows(const IndexedRows&) = delete;

  // Also writes the requested results of ignored rows.
  void index() { lm_head::index_valid_rows(batch_, static_cast<int32_t*>(index_memory_.mutable_data_ptr())); }
  lm_head::Batch& batch() { return batch_; }

 private:
  Tensor target_;
  lm_head::Batch batch_;
  Tensor index_memory_;
};

// The plan exists: the caller has called takes().
LinearCePlan plan_of(const lm_head::Batch& batch, bool one_chunk, int64_t memory_budget) {
  const LinearCeProblem problem{batch.rows(),           batch.hidden(), batch.vocab(), batch.need_grad_input,
                                batch.need_grad_weight, true,           memory_budget, 0};
  const std::optional<LinearCePlan> plan = one_chunk
                                               ? lm_head::plan_one_chunk_on_device(problem, batch.device)
                                               : lm_head::plan_on_device(problem, batch.device);
  require(plan.has_value(), kOp, ": the engine of compute capability 9.0 does not take ", batch.rows(),
          " rows with hidden size ", batch.hidden(), " and ", batch.vocab(), " classes");
  return *plan;
}

// Work on one chunk of a call: its buffers, and the kernels of kept_rows.cuh.
class ChunkOfCall {
 public:
  // grad_input and kept are pointers for this chunk. grad_input is null in a forward and if it is not needed.
  // If kept is null, the buffers include the kept rows.
  ChunkOfCall(const lm_head::Batch& batch, const LinearCePlan& plan, size_t index, Element16* grad_weight,
              unsigned char* panel_workspace, Element16* grad_input, KeptRow* kept, bool with_entropy,
              const Tensor& memory)
      : batch_(batch), planned_(plan.chunks[index]), kept_(kept) {
    Workspace workspace(memory, 0);
    class_one_hot_ = workspace.allocate<lm_head::OneHot>(batch.panels() * sm90::kPanel);
    int* const read_counts = workspace.allocate<int>(batch.panels());
    if (kept_ == nullptr) kept_ = workspace.allocate<KeptRow>(planned_.rows);
    if (with_entropy) entropy_terms_ = workspace.allocate<lm_head::EntropyTerm>(planned_.rows);
    Element16* const rows = own_rows(batch, plan, index, grad_input != nullptr) ? nullptr : grad_input;
    buffers_ = lm_head::ChunkBuffers::allocate(batch, planned_, rows, workspace);
    chunk_.emplace(batch, plan, index, planned_, buffers_,
                   lm_head::GradWeightBuffers{grad_weight, panel_workspace, class_one_hot_, read_counts},
                   grad_input);
  }
  ChunkOfCall(const ChunkOfCall&) = delete;

  static int64_t workspace_bytes(const lm_head::Batch& batch, const LinearCePlan& plan, size_t index,
                                 bool has_grad_input) {
    const PlannedChunk& chunk = plan.chunks[index];
    return Workspace::bytes_for(
        {lm_head::class_one_hot_bytes(batch), batch.panels() * int64_t{sizeof(int)},
         chunk.rows * int64_t{sizeof(KeptRow)}, chunk.rows * int64_t{sizeof(lm_head::EntropyTerm)},
         lm_head::ChunkBuffers::bytes(batch, chunk, own_rows(batch, plan, index, has_grad_input))});
  }

  const lm_head::Chunk& chunk() const { return *chunk_; }

  // After Chunk::exponentials().
  void keep_rows() const {
    const lm_head::KeepRows arguments{
        .chunk = rows(),
        .index = index(),
        .targets = batch_.problem.targets,
        .vocab = batch_.problem.vocab,
        .target_logit = buffers_.target_logit,
        .overflow = buffers_.overflow,
        .reference = buffers_.scale,
        .sums = buffers_.tile_sums,
        .columns = static_cast<int>(batch_.sums_per_row()),
        .entropy_sums = batch_.with_metrics ? buffers_.metrics.entropy_sums : nullptr,
        .class_one_hot = batch_.need_grad_weight ? class_one_hot_ : nullptr,
        .exponentials = chunk_->panels(),
        .out = kept_,
        .range = buffers_.range};
    with_elements(batch_, [&]<typename T>(std::type_identity<T>) {
      lm_head::keep_rows<T><<<blocks(), lm_head::kKeptRowThreads, 0, batch_.stream>>>(arguments);
      check_launch(kOp);
    });
  }

  // After Chunk::exponentials(), before the gathered rows are scaled. class_sum: null without mean_logits.
  void logit_metrics(const float* class_sum, float* log_sum_sq_probs, float* mean_logits) const {
    const auto columns = static_cast<int>(batch_.sums_per_row());
    const float* const squares =
        batch_.with_squares ? buffers_.metrics.entropy_sums + planned_.rows * columns : nullptr;
    const float factor = batch_.inverse_temperature / static_cast<float>(batch_.vocab());
    with_elements(batch_, [&]<typename T>(std::type_identity<T>) {
      lm_head::logit_metrics<T><<<blocks(), lm_head::kRowMetricThreads, 0, batch_.stream>>>(
          {.chunk = rows(),
           .index = index(),
           .sums = buffers_.tile_sums,
           .square_sums = squares,
           .columns = columns,
           .input = lm_head::elements_of<T>(buffers_.input),
           .hidden = static_cast<int>(batch_.hidden()),
           .class_sum = class_sum,
           .factor = factor,
           .log_sum_sq_probs = log_sum_sq_probs,
           .mean_logits = mean_logits});
      check_launch(kOp);
    });
  }

  // Clears the one-hot terms of the weight gradient. Chunk::exponentials() does not run for kept
  // exponentials.
  void clear_one_hot_terms() const {
    if (!batch_.need_grad_weight) return;
    check_cuda(cudaMemsetAsync(class_one_hot_, 0xff, lm_head::class_one_hot_bytes(batch_), batch_.stream),
               kOp);
  }

  // Arguments of the row-gradient kernels.
  lm_head::KeptChunk kept_chunk() const {
    return {batch_, planned_, batch_.problem.targets, kept_, entropy_terms_, class_one_hot_, buffers_};
  }

 private:
  // True if the buffers include the gathered rows, which are in the memory of their gradient otherwise.
  static bool own_rows(const lm_head::Batch& batch, const LinearCePlan& plan, size_t index,
                       bool has_grad_input) {
    return !has_grad_input || lm_head::Chunk::separate_rows(batch, plan, index);
  }
  lm_head::ChunkRows rows() const {
    return {batch_.row_index.count, static_cast<int>(planned_.first), static_cast<int>(planned_.rows)};
  }
  const int32_t* index() const { return batch_.row_index.index + planned_.first; }
  unsigned blocks() const { return static_cast<unsigned>(planned_.rows); }

  const lm_head::Batch& batch_;
  const PlannedChunk planned_;
  KeptRow* kept_;
  lm_head::EntropyTerm* entropy_terms_ = nullptr;
  lm_head::OneHot* class_one_hot_ = nullptr;
  lm_head::ChunkBuffers buffers_{};
  std::optional<lm_head::Chunk> chunk_;
};

Tensor workspace_of(const lm_head::Batch& batch, const LinearCePlan& plan, bool has_grad_input) {
  int64_t max_bytes = 0;
  for (size_t i = 0; i < plan.chunks.size(); ++i)
    max_bytes = std::max(max_bytes, ChunkOfCall::workspace_bytes(batch, plan, i, has_grad_input));
  return empty({max_bytes}, ScalarType::Byte, batch.input);
}

// True if the engine takes such a call on this device.
bool takes(int64_t rows, int64_t hidden, int64_t vocab, int64_t device) {
  const LinearCeProblem problem{rows, hidden, vocab, true, true, true, 1, 0};
  return lm_head::takes_on_device(problem, static_cast<int>(device));
}

// The sum of the rows of the weight, (hidden,) float32. The tensor's memory is longer: launch_row_sums()
// writes padding.
Tensor sum_of_classes(const lm_head::Batch& batch) {
  const int64_t length = round_up(batch.hidden(), int64_t{sm90::kTileN});
  const Tensor memory =
      empty({length + lm_head::row_sum_elements(batch.hidden())}, ScalarType::Float, batch.input);
  float* const sum = static_cast<float*>(memory.mutable_data_ptr());
  with_elements(batch, [&]<typename T>(std::type_identity<T>) {
    lm_head::launch_row_sums(
        lm_head::RowSums<T>{static_cast<const T*>(batch.weight.const_data_ptr()), batch.weight.stride(0),
                            batch.vocab(), nullptr, 0, nullptr, nullptr, batch.hidden(), sum + length, sum},
        batch.stream);
  });
  return memory;
}

using ForwardResults = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;

ForwardResults logprobs_forward(const Tensor& input, const Tensor& weight, const Tensor& target,
                                int64_t ignore_index, double temperature, int64_t memory_budget,
                                bool return_entropy, bool return_argmax, bool keep, bool need_grad_weight,
                                const Tensor& log_sum_sq_probs, const Tensor& mean_logits) {
  const OpGuard guard("fused_linear_logprobs forward", input.get_device_index());
  float* const squares_out = memory_of<float>(log_sum_sq_probs);
  float* const means_out = memory_of<float>(mean_logits);
  IndexedRows call({input, weight, target, ignore_index, temperature, memory_budget}, keep,
                   keep && need_grad_weight, return_entropy || return_argmax || squares_out != nullptr);
  lm_head::Batch& batch = call.batch();
  batch.with_squares = squares_out != nullptr;
  LinearCePlan plan = plan_of(batch, keep, memory_budget);
  // Only the input gradient uses split-K, and a forward has none.
  for (PlannedChunk& chunk : plan.chunks) chunk.k_splits = 1;

  const int64_t rows = batch.rows();
  const auto row_results = [&](bool requested, ScalarType dtype) {
    return empty({requested ? rows : 0}, dtype, input);
  };
  const Tensor logprobs = row_results(true, ScalarType::Float);
  const Tensor entropy = row_results(return_entropy, ScalarType::Float);
  const Tensor argmax = row_results(return_argmax, ScalarType::Long);
  batch.problem.logprobs = memory_of<float>(logprobs);
  batch.problem.entropy = memory_of<float>(entropy);
  batch.problem.predicted = memory_of<int64_t>(argmax);
  call.index();

  const int64_t kept_elements = keep ? batch.panels() * plan.workspace_panel_bytes / 2 : 0;
  const Tensor kept = empty({kept_elements}, input.scalar_type(), input);
  const Tensor kept_rows = empty({keep ? rows : 0, kKeptNumbers}, ScalarType::Float, input);
  const Tensor workspace = workspace_of(batch, plan, false);
  std::optional<Tensor> class_sum;
  if (means_out != nullptr) class_sum = sum_of_classes(batch);
  for (size_t i = 0; i < plan.chunks.size(); ++i) {
    const ChunkOfCall work(batch, plan, i, nullptr, memory_of<unsigned char>(kept), nullptr,
                           memory_of<KeptRow>(kept_rows), false, workspace);
    work.chunk().exponentials();
    work.chunk().apply_rule(false);
    if (squares_out != nullptr || means_out != nullptr)
      work.logit_metrics(class_sum ? memory_of<float>(*class_sum) : nullptr, squares_out, means_out);
    if (!keep) continue;
    work.keep_rows();
  }
  return {logprobs, entropy, argmax, kept, kept_rows};
}

std::tuple<Tensor, Tensor> logprobs_backward(const Tensor& grad_logprobs,
                                             const std::optional<Tensor>& grad_entropy, const Tensor& kept,
                                             const Tensor& kept_rows, const Tensor& input,
                                             const Tensor& weight, const Tensor& target, int64_t ignore_index,
                                             double temperature, int64_t memory_budget, bool need_grad_input,
                                             bool need_grad_weight) {
  const OpGuard guard("fused_linear_logprobs backward", input.get_device_index());
  const bool keeps = kept.numel() > 0, with_entropy = grad_entropy.has_value();
  if (!need_grad_input && !need_grad_weight)
    return {no_tensor(input.scalar_type(), input), no_tensor(input.scalar_type(), input)};
  IndexedRows call({input, weight, target, ignore_index, temperature, memory_budget}, need_grad_input,
                   need_grad_weight, with_entropy && !keeps);
  lm_head::Batch& batch = call.batch();
  const int64_t rows = batch.rows(), hidden = batch.hidden(), vocab = batch.vocab();
  lm_head::check_row_gradient(kOp, "the gradient of the log-probabilities", grad_logprobs, rows);
  if (with_entropy) lm_head::check_row_gradient(kOp, "the gradient of the entropies", *grad_entropy, rows);
  const int64_t panel_elements = round_up(rows, int64_t{sm90::kTileM}) * sm90::kPanel;
  require(
      !keeps || (kept.numel() == batch.panels() * panel_elements && kept_rows.numel() == rows * kKeptNumbers),
      kOp, ": kept has ", kept.numel(), " elements and kept_rows ", kept_rows.numel(), ", expected ",
      batch.panels() * panel_elements, " and ", rows * kKeptNumbers);
  call.index();

  // Gradients of entropies need a second matrix, so they are computed in chunks.
  const bool one_chunk = keeps && !with_entropy;
  const LinearCePlan plan = plan_of(batch, one_chunk, memory_budget);
  const auto matrix = [&](bool needed, int64_t length) {
    return empty({needed ? length : 0, hidden}, input.scalar_type(), input);
  };
  Tensor grad_input = matrix(need_grad_input, rows);
  Tensor grad_weight = matrix(need_grad_weight, (batch.panels() + plan.panel_offset) * sm90::kPanel);
  const Tensor panel_workspace =
      one_chunk ? kept : empty({lm_head::panel_workspace_bytes(batch, plan)}, ScalarType::Byte, input);
  const Tensor workspace = workspace_of(batch, plan, need_grad_input);
  Element16* const kept_memory = memory_of<Element16>(kept);
  const lm_head::Panels kept_panels{
      {kept_memory, kept_memory}, {panel_elements, panel_elements}, static_cast<int>(round_up(rows, 128))};

  for (size_t i = 0; i < plan.chunks.size(); ++i) {
    const int64_t first = plan.chunks[i].first;
    Element16* const grad_rows =
        need_grad_input ? memory_of<Element16>(grad_input) + first * hidden : nullptr;
    KeptRow* const of_rows = keeps ? memory_of<KeptRow>(kept_rows) + first : nullptr;
    const ChunkOfCall work(batch, plan, i, memory_of<Element16>(grad_weight),
                           memory_of<unsigned char>(panel_workspace), grad_rows, of_rows, with_entropy,
                           workspace);
    if (keeps) {
      work.clear_one_hot_terms();
    } else {
      work.chunk().exponentials();
      work.keep_rows();
    }
    const lm_head::KeptChunk rows_of_chunk = work.kept_chunk();
    const lm_head::Panels& panels = work.chunk().panels();
    rows_of_chunk.row_gradients(grad_logprobs, grad_entropy);
    if (with_entropy) rows_of_chunk.entropy_gradient(keeps ? kept_panels : panels, keeps ? first : 0, panels);
    work.chunk().gradients();
  }
  if (need_grad_input) {
    lm_head::scatter_rows(batch, batch.row_index.position, rows, memory_of<Element16>(grad_input));
  }
  const auto result = [&](Tensor& gradient, bool needed, int64_t length) {
    return needed ? torch::stable::narrow(gradient, 0, 0, length) : no_tensor(input.scalar_type(), input);
  };
  return {result(grad_input, need_grad_input, rows), result(grad_weight, need_grad_weight, vocab)};
}

}  // namespace

namespace lm_head {

void KeptChunk::row_gradients(const Tensor& grad_logprobs, const std::optional<Tensor>& grad_entropy) const {
  const auto blocks = static_cast<unsigned>(planned.rows);
  with_elements(batch, [&]<typename T>(std::type_identity<T>) {
    const RowGradients<T> arguments{
        .chunk = rows(),
        .index = index(),
        .targets = targets,
        .vocab = static_cast<int>(batch.vocab()),
        .kept = kept,
        .grad_logprobs = static_cast<const float*>(grad_logprobs.const_data_ptr()),
        .grad_entropy = static_cast<const float*>(data(grad_entropy)),
        .inverse_temperature = batch.inverse_temperature,
        .input = static_cast<const T*>(batch.input.const_data_ptr()),
        .input_stride = batch.input.stride(0),
        .hidden = static_cast<int>(batch.hidden()),
        .out = batch.need_grad_weight ? elements_of<T>(buffers.input) : nullptr,
        .scale = buffers.scale,
        .one_hot = buffers.one_hot,
        .class_one_hot = batch.need_grad_weight ? class_one_hot : nullptr,
        .entropy_terms = entropy_terms,
        .range = buffers.range};
    // Chunk::exponentials(), which clears largest_scaled, does not run for kept exponentials.
    if constexpr (kSmallRange<T>) {
      check_cuda(cudaMemsetAsync(arguments.range.largest_scaled, 0, sizeof(*arguments.range.largest_scaled),
                                 batch.stream),
                 kOp);
    }
    lm_head::row_gradients<T><<<blocks, kKeptRowThreads, 0, batch.stream>>>(arguments);
    check_launch(kOp);
    if constexpr (kSmallRange<T>) {
      if (arguments.out == nullptr) return;
      scale_rows<T><<<blocks, kRowThreads, 0, batch.stream>>>(rows(), arguments.out, arguments.hidden,
                                                              buffers.scale, arguments.range.largest_scaled);
      check_launch(kOp);
    }
  });
}

void KeptChunk::entropy_gradient(const Panels& from, int64_t first, const Panels& to) const {
  const int64_t tiles = ceil_div(planned.rows, int64_t{sm90::kTileM});
  const EntropyGradient arguments{.chunk = rows(),
                                  .from = from,
                                  .first = static_cast<int>(first),
                                  .to = to,
                                  .tiles = static_cast<int>(tiles),
                                  .terms = entropy_terms};
  const auto grid = static_cast<unsigned>(tiles * batch.panels());
  const auto row_blocks = static_cast<unsigned>(ceil_div(planned.rows, int64_t{kKeptRowThreads}));
  with_elements(batch, [&]<typename T>(std::type_identity<T>) {
    lm_head::entropy_gradient<T><<<grid, kKeptRowThreads, 0, batch.stream>>>(arguments);
    check_launch(kOp);
    put_targets<T><<<row_blocks, kKeptRowThreads, 0, batch.stream>>>(
        rows(), index(), targets, static_cast<int>(batch.vocab()), to, entropy_terms);
    check_launch(kOp);
  });
}

void check_row_gradient(const char* op, const char* name, const Tensor& gradient, int64_t rows) {
  require(gradient.scalar_type() == ScalarType::Float && gradient.is_contiguous() && gradient.numel() == rows,
          op, ": ", name, " has shape ", shape_text(gradient), ", expected one contiguous float32 per row (",
          rows, ")");
}

}  // namespace lm_head

// clang-format off: a schema is one line, whatever its length.
STABLE_TORCH_LIBRARY_FRAGMENT(liger_sm90, m) {
  m.def("takes_logprobs(int rows, int hidden, int vocab, int device) -> bool");
  // kept and kept_rows: the exponentials and what the backward needs of each row; empty unless `keep`. If
  // the forward ran without need_grad_weight, the backward cannot compute a weight gradient from them.
  // log_sum_sq_probs and mean_logits get the values of valid rows; empty if they are not needed.
  m.def("logprobs_forward(Tensor input, Tensor weight, Tensor target, int ignore_index, float temperature, int memory_budget, bool return_entropy, bool return_argmax, bool keep, bool need_grad_weight, Tensor(a!) log_sum_sq_probs, Tensor(b!) mean_logits) -> (Tensor logprobs, Tensor entropy, Tensor argmax, Tensor kept, Tensor kept_rows)");
  m.def("logprobs_backward(Tensor grad_logprobs, Tensor? grad_entropy, Tensor kept, Tensor kept_rows, Tensor input, Tensor weight, Tensor target, int ignore_index, float temperature, int memory_budget, bool need_grad_input, bool need_grad_weight) -> (Tensor grad_input, Tensor grad_weight)");
}
// clang-format on

STABLE_TORCH_LIBRARY_IMPL(liger_sm90, CompositeExplicitAutograd, m) {
  m.impl("takes_logprobs", TORCH_BOX(&takes));
}

STABLE_TORCH_LIBRARY_IMPL(liger_sm90, CUDA, m) {
  m.impl("logprobs_forward", TORCH_BOX(&logprobs_forward));
  m.impl("logprobs_backward", TORCH_BOX(&logprobs_backward));
}

}  // namespace liger
