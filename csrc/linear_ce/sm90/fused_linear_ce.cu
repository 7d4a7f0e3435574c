#include "linear_ce/sm90/fused_linear_ce.h"

#include "linear_ce/sm90/chunk.h"

namespace liger {
namespace {

using flce90::Bf16;

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

std::optional<Sm90Plan> plan_sm90(const FusedLinearCe& call) {
  const unsigned extras = problem_of(call).extras, observed = extras & (ce::kArgmax | ce::kEntropy);
  if (call.input.scalar_type() != ScalarType::BFloat16 || call.bias || extras != observed) {
    return std::nullopt;
  }
  return flce90::plan_on_device(
      {call.input.size(0), call.input.size(1), call.weight.size(0), call.need_grad_input,
       call.need_grad_weight, call.exact_accumulation, call.memory_budget, 0, 1, observed != 0},
      call.device);
}

FusedLinearCeGradients fused_linear_ce_sm90(const FusedLinearCe& call, const Sm90Plan& plan) {
  const Tensor input = flce90::dense(call.input);
  const ce::Problem problem = problem_of(call);
  flce90::Batch batch{input,
                      flce90::dense(call.weight),
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
  const Tensor lists = bytes(flce90::list_bytes(rows), input);
  flce90::list_rows(batch, static_cast<int32_t*>(lists.mutable_data_ptr()));

  const Tensor grad_input = matrix_or_none(call.need_grad_input, rows, hidden, input);
  const int64_t panels = vocab / sm90::kPanel;
  const Tensor weight_memory =
      matrix_or_none(call.need_grad_weight, (panels + plan.slack) * sm90::kPanel, hidden, input);
  const Tensor extra = bytes(flce90::extra_bytes(batch, plan), input);
  const Tensor owners = bytes(call.need_grad_weight ? vocab * int64_t{sizeof(flce90::OneHot)} : 0, input);
  const Tensor readers = empty({plan.hosted_rows > 0 ? panels : 0}, ScalarType::Int, input);
  const flce90::WeightSum sum{static_cast<Bf16*>(weight_memory.mutable_data_ptr()),
                              static_cast<unsigned char*>(extra.mutable_data_ptr()),
                              static_cast<flce90::OneHot*>(owners.mutable_data_ptr()),
                              static_cast<int*>(readers.mutable_data_ptr())};

  std::optional<Tensor> own;  // workspace of chunks for which neither gradient has room
  for (size_t i = 0; i < plan.chunks.size(); ++i) {
    const Sm90Chunk& chunk = plan.chunks[i];
    const bool apart = flce90::Chunk::rows_apart(batch, plan, i);
    const int64_t need = flce90::places_bytes(batch, chunk, apart);
    const int64_t unwritten = (rows - chunk.first - chunk.rows) * hidden * 2;
    const int64_t slack = plan.slack * sm90::kPanel * hidden * 2;
    std::optional<Workspace> workspace;
    if (i == 0 && call.need_grad_input && need <= unwritten) {
      workspace.emplace(grad_input, (chunk.first + chunk.rows) * hidden * 2);
    } else if (i > 0 && need <= slack) {
      workspace.emplace(weight_memory, vocab * hidden * 2);
    } else {
      if (!own || own->numel() < need) {
        own.reset();
        own.emplace(bytes(need, input));
      }
      workspace.emplace(*own, 0);
    }
    Bf16* const grad_rows = call.need_grad_input ? row_at(grad_input, chunk.first) : nullptr;
    const flce90::Places places = take_places(batch, chunk, apart ? nullptr : grad_rows, *workspace);
    const flce90::Chunk work(batch, plan, i, chunk, places, sum, grad_rows);
    work.exponentials();
    work.apply_rule(true);
    work.multiply();
  }
  if (call.need_grad_input) flce90::spread_rows(batch, batch.list.position, rows, row_at(grad_input, 0));
  return {grad_input, call.need_grad_weight ? first_rows(weight_memory, vocab) : weight_memory};
}

}  // namespace liger
