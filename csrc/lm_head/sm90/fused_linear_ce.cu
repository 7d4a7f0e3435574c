// SPDX-License-Identifier: BSD-3-Clause
#include "lm_head/sm90/fused_linear_ce.h"

#include "lm_head/sm90/chunk/chunk.h"

namespace liger {
namespace {

using lm_head::Element16;

constexpr float kMaxSmoothing = 0.5f;

ce::Problem problem_of(const FusedLinearCe& call) {
  ce::Problem problem = call.options.problem;
  call.results.attach(problem, 0);
  return problem;
}

Tensor bytes(int64_t count, const Tensor& like) {
  return empty({count}, ScalarType::Byte, like);
}

Tensor matrix_or_none(bool needed, int64_t rows, int64_t columns, const Tensor& like) {
  return needed ? empty({rows, columns}, like.scalar_type(), like) : no_tensor(like.scalar_type(), like);
}

Tensor first_rows(Tensor matrix, int64_t rows) {
  return torch::stable::narrow(matrix, 0, 0, rows);
}

Element16* row_at(const Tensor& matrix, int64_t row) {
  return static_cast<Element16*>(matrix.mutable_data_ptr()) + row * matrix.size(1);
}

// Numbers of float32 elements in the buffers of LogitTerms.
struct TermElements {
  explicit TermElements(const FusedLinearCe& call)
      : bias(call.bias ? round_up(call.weight.size(0), int64_t{sm90::kTileN}) : 0),
        grad_bias(call.need_grad_bias ? round_up(call.weight.size(0), int64_t{sm90::kTileN}) : 0),
        hidden(smoothing(call) ? round_up(call.input.size(1), int64_t{sm90::kTileN}) : 0),
        partial(smoothing(call) ? lm_head::row_sum_elements(call.input.size(1)) : 0),
        bias_sum(smoothing(call) ? sm90::kTileN : 0),
        offset(call.bias && !(problem_of(call).extras & ce::kSoftcap) ? sm90::kTileN : 0) {}
  int64_t bias, grad_bias, hidden, partial, bias_sum, offset;

  int64_t total() const { return bias + grad_bias + 2 * hidden + partial + bias_sum + offset; }
  static bool smoothing(const FusedLinearCe& call) { return problem_of(call).extras & ce::kSmoothing; }
};

// memory: TermElements::total() elements; the caller keeps it until the last launch. T: the type of the
// elements. Also sets the offset of the problem.
template <typename T>
lm_head::LogitTerms logit_terms(const FusedLinearCe& call, lm_head::Batch& batch, const Tensor& memory,
                                const Tensor& grad_bias) {
  const TermElements elements(call);
  ce::Problem& problem = batch.problem;
  float* at = static_cast<float*>(memory.mutable_data_ptr());
  const auto take = [&](int64_t count) {
    float* const block = at;
    at += count;
    return count > 0 ? block : nullptr;
  };
  lm_head::LogitTerms terms{};
  float* const bias = take(elements.bias);
  terms.transform = {bias, problem.extras & ce::kSoftcap ? problem.softcap : 0.0f};
  terms.grad_bias_sum = take(elements.grad_bias);
  terms.grad_bias = call.need_grad_bias ? static_cast<Element16*>(grad_bias.mutable_data_ptr()) : nullptr;
  float* const class_sum = take(elements.hidden);
  terms.class_sum = class_sum;
  terms.row_sum = take(elements.hidden);
  terms.partial = take(elements.partial);
  float* const bias_sum = take(elements.bias_sum);
  float* const offset = take(elements.offset);
  problem.offset = offset;
  if (call.bias) {
    terms.bias_sum = bias_sum;
    const Tensor values = as_contiguous(*call.bias);
    lm_head::launch_bias_terms(
        lm_head::BiasTerms<T>{static_cast<const T*>(values.const_data_ptr()), problem.class_weight,
                              batch.vocab(), elements.bias, bias, bias_sum, offset},
        call.stream);
  }
  if (terms.smoothing()) {
    lm_head::launch_row_sums(
        lm_head::RowSums<T>{static_cast<const T*>(batch.weight.const_data_ptr()), batch.weight.stride(0),
                            batch.vocab(), nullptr, 0, nullptr, problem.class_weight, batch.hidden(),
                            terms.partial, class_sum},
        call.stream);
  }
  return terms;
}

}  // namespace

std::optional<LinearCePlan> plan_fused_linear_ce_sm90(const FusedLinearCe& call) {
  const unsigned extras = problem_of(call).extras;
  // Label smoothing needs the sum of a row's logits, which is not linear in the input if there is a softcap.
  // With strong smoothing the gradient is a small difference between probabilities and class weights, and the
  // rounding of the exponentials would dominate it.
  const bool smoothed = (extras & ce::kSmoothing) &&
                        ((extras & ce::kSoftcap) || call.options.problem.label_smoothing > kMaxSmoothing);
  const bool unsupported = smoothed || call.options.problem.softcap > sm90::kMaxSoftcap;
  const bool half = call.input.scalar_type() == ScalarType::Half;
  if (unsupported || (call.input.scalar_type() != ScalarType::BFloat16 && !half)) return std::nullopt;
  return lm_head::plan_on_device(
      {call.input.size(0), call.input.size(1), call.weight.size(0), call.need_grad_input,
       call.need_grad_weight, call.exact_accumulation, call.memory_budget, 0},
      call.device);
}

FusedLinearCeGradients fused_linear_ce_sm90(const FusedLinearCe& call, const LinearCePlan& plan) {
  const Tensor input = lm_head::dense(call.input);
  const ce::Problem problem = problem_of(call);
  lm_head::Batch batch{.input = input,
                       .weight = lm_head::dense(call.weight),
                       .need_grad_input = call.need_grad_input,
                       .need_grad_weight = call.need_grad_weight,
                       .with_metrics = (problem.extras & (ce::kArgmax | ce::kEntropy)) != 0,
                       .inverse_temperature = 1.0f,
                       .problem = problem,
                       .row_index = {},
                       .device = call.device,
                       .stream = call.stream};
  const int64_t rows = batch.rows(), hidden = batch.hidden(), vocab = batch.vocab();
  batch.problem.rows = rows;
  batch.problem.denominator = static_cast<const float*>(call.used_denominator.const_data_ptr());
  const Tensor index_memory = bytes(lm_head::row_index_bytes(rows), input);
  lm_head::index_valid_rows(batch, static_cast<int32_t*>(index_memory.mutable_data_ptr()));

  const Tensor grad_input = matrix_or_none(call.need_grad_input, rows, hidden, input);
  const int64_t panels = batch.panels();
  const Tensor weight_memory =
      matrix_or_none(call.need_grad_weight, (panels + plan.panel_offset) * sm90::kPanel, hidden, input);
  const Tensor term_memory = empty({TermElements(call).total()}, ScalarType::Float, input);
  const Tensor grad_bias = call.need_grad_bias ? empty({vocab}, input.scalar_type(), input)
                                               : no_tensor(input.scalar_type(), input);
  batch.terms = batch.is_float16() ? logit_terms<__half>(call, batch, term_memory, grad_bias)
                                   : logit_terms<__nv_bfloat16>(call, batch, term_memory, grad_bias);
  const Tensor panel_workspace = bytes(lm_head::panel_workspace_bytes(batch, plan), input);
  const Tensor class_one_hot =
      bytes(batch.need_class_one_hot() ? lm_head::class_one_hot_bytes(batch) : 0, input);
  const Tensor panel_read_counts = empty({plan.rows_in_grad_weight > 0 ? panels : 0}, ScalarType::Int, input);
  const lm_head::GradWeightBuffers grad_weight{
      static_cast<Element16*>(weight_memory.mutable_data_ptr()),
      static_cast<unsigned char*>(panel_workspace.mutable_data_ptr()),
      static_cast<lm_head::OneHot*>(class_one_hot.mutable_data_ptr()),
      static_cast<int*>(panel_read_counts.mutable_data_ptr())};

  // The buffers of a chunk use the memory of a gradient that is not written yet, or an allocation of their
  // own.
  std::optional<Tensor> own;
  for (size_t i = 0; i < plan.chunks.size(); ++i) {
    const PlannedChunk& chunk = plan.chunks[i];
    const bool separate_rows = lm_head::Chunk::separate_rows(batch, plan, i);
    const int64_t need = lm_head::ChunkBuffers::bytes(batch, chunk, separate_rows);
    const int64_t unwritten = (rows - chunk.first - chunk.rows) * hidden * 2;
    const int64_t offset_bytes = plan.panel_offset * sm90::kPanel * hidden * 2;
    std::optional<Workspace> workspace;
    if (i == 0 && call.need_grad_input && need <= unwritten) {
      workspace.emplace(grad_input, (chunk.first + chunk.rows) * hidden * 2);
    } else if (i > 0 && need <= offset_bytes) {
      workspace.emplace(weight_memory, panels * sm90::kPanel * hidden * 2);
    } else {
      if (!own || own->numel() < need) {
        own.reset();
        own.emplace(bytes(need, input));
      }
      workspace.emplace(*own, 0);
    }
    Element16* const grad_rows = call.need_grad_input ? row_at(grad_input, chunk.first) : nullptr;
    const lm_head::ChunkBuffers buffers =
        lm_head::ChunkBuffers::allocate(batch, chunk, separate_rows ? nullptr : grad_rows, *workspace);
    const lm_head::Chunk work(batch, plan, i, chunk, buffers, grad_weight, grad_rows);
    work.exponentials();
    work.apply_rule(true);
    work.gradients();
  }
  if (call.need_grad_input)
    lm_head::scatter_rows(batch, batch.row_index.position, rows, row_at(grad_input, 0));
  return {grad_input, call.need_grad_weight ? first_rows(weight_memory, vocab) : weight_memory, grad_bias};
}

}  // namespace liger
