#include "linear_ce/sm90/fused_linear_ce.h"

#include "linear_ce/sm90/chunk.h"

namespace liger {
namespace {

using linear_ce::Bf16;

ce::Problem problem_of(const FusedLinearCe& call) {
  ce::Problem problem = call.options.problem;
  call.results.attach(problem, 0);
  return problem;
}

Tensor bytes(int64_t count, const Tensor& like) {
  return empty({count}, ScalarType::Byte, like);
}

Tensor matrix_or_none(bool needed, int64_t rows, int64_t columns, const Tensor& like) {
  return needed ? empty({rows, columns}, ScalarType::BFloat16, like) : no_tensor(ScalarType::BFloat16, like);
}

Tensor first_rows(Tensor matrix, int64_t rows) {
  return torch::stable::narrow(matrix, 0, 0, rows);
}

Bf16* row_at(const Tensor& matrix, int64_t row) {
  return static_cast<Bf16*>(matrix.mutable_data_ptr()) + row * matrix.size(1);
}

}  // namespace

std::optional<LinearCePlan> plan_sm90(const FusedLinearCe& call) {
  const unsigned extras = problem_of(call).extras, metrics = extras & (ce::kArgmax | ce::kEntropy);
  if (call.input.scalar_type() != ScalarType::BFloat16 || call.bias || extras != metrics) {
    return std::nullopt;
  }
  return linear_ce::plan_on_device(
      {call.input.size(0), call.input.size(1), call.weight.size(0), call.need_grad_input,
       call.need_grad_weight, call.exact_accumulation, call.memory_budget, 0, 1, metrics != 0},
      call.device);
}

FusedLinearCeGradients fused_linear_ce_sm90(const FusedLinearCe& call, const LinearCePlan& plan) {
  const Tensor input = linear_ce::dense(call.input);
  const ce::Problem problem = problem_of(call);
  linear_ce::Batch batch{input,
                         linear_ce::dense(call.weight),
                         call.need_grad_input,
                         call.need_grad_weight,
                         problem.extras != 0,
                         1.0f,
                         problem,
                         {},
                         call.device,
                         call.stream};
  const int64_t rows = batch.rows(), hidden = batch.hidden(), vocab = batch.vocab();
  batch.problem.rows = rows;
  batch.problem.denominator = static_cast<const float*>(call.used_denominator.const_data_ptr());
  const Tensor index_memory = bytes(linear_ce::row_index_bytes(rows), input);
  linear_ce::index_valid_rows(batch, static_cast<int32_t*>(index_memory.mutable_data_ptr()));

  const Tensor grad_input = matrix_or_none(call.need_grad_input, rows, hidden, input);
  const int64_t panels = batch.panels();
  const Tensor weight_memory =
      matrix_or_none(call.need_grad_weight, (panels + plan.panel_offset) * sm90::kPanel, hidden, input);
  const Tensor panel_workspace = bytes(linear_ce::panel_workspace_bytes(batch, plan), input);
  const Tensor class_one_hot =
      bytes(call.need_grad_weight ? linear_ce::class_one_hot_bytes(batch) : 0, input);
  const Tensor panel_read_counts = empty({plan.rows_in_grad_weight > 0 ? panels : 0}, ScalarType::Int, input);
  const linear_ce::GradWeightBuffers grad_weight{
      static_cast<Bf16*>(weight_memory.mutable_data_ptr()),
      static_cast<unsigned char*>(panel_workspace.mutable_data_ptr()),
      static_cast<linear_ce::OneHot*>(class_one_hot.mutable_data_ptr()),
      static_cast<int*>(panel_read_counts.mutable_data_ptr())};

  // The buffers of a chunk use memory of a gradient that is not written yet, else their own.
  std::optional<Tensor> own;
  for (size_t i = 0; i < plan.chunks.size(); ++i) {
    const PlannedChunk& chunk = plan.chunks[i];
    const bool separate_rows = linear_ce::Chunk::separate_rows(batch, plan, i);
    const int64_t need = linear_ce::ChunkBuffers::bytes(batch, chunk, separate_rows);
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
    Bf16* const grad_rows = call.need_grad_input ? row_at(grad_input, chunk.first) : nullptr;
    const linear_ce::ChunkBuffers buffers =
        linear_ce::ChunkBuffers::allocate(batch, chunk, separate_rows ? nullptr : grad_rows, *workspace);
    const linear_ce::Chunk work(batch, plan, i, chunk, buffers, grad_weight, grad_rows);
    work.exponentials();
    work.apply_rule(true);
    work.gradients();
  }
  if (call.need_grad_input)
    linear_ce::scatter_rows(batch, batch.row_index.position, rows, row_at(grad_input, 0));
  return {grad_input, call.need_grad_weight ? first_rows(weight_memory, vocab) : weight_memory,
          no_tensor(ScalarType::BFloat16, input)};
}

}  // namespace liger
