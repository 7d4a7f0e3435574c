// The backward of a linear layer over classes from a row-major dlogits, by the wgmma GEMMs of
// fused_linear_ce: the weight gradient is accumulated over chunks in its own memory. For losses that compute
// dlogits in their own way.
//
// Internal ops: the caller allocates all memory as linear_backward_plan() says.
#include <torch/csrc/stable/library.h>

#include <tuple>

#include "linear_ce/sm90/chunk.h"

namespace liger {
namespace {

constexpr const char* kOp = "linear_backward";

// The fields of LinearBackwardPlan, and the workspace of the first chunk and of the others. All zero if the
// engine cannot take the problem.
using PlanNumbers = std::tuple<int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t>;

PlanNumbers linear_backward_plan(const Tensor& input, const Tensor& weight, int64_t aux_rows,
                                 int64_t group_rows, int64_t memory_budget, bool need_grad_input,
                                 bool need_grad_weight, bool aux_in_grad_weight) {
  if (input.scalar_type() != ScalarType::BFloat16) return {};
  const DeviceGuard guard(input.get_device_index());
  const int64_t hidden = input.size(1), vocab = weight.size(0);
  const std::optional<LinearBackwardPlan> plan = linear_ce::plan_linear_backward_on_device(
      {input.size(0), hidden, vocab, need_grad_input, need_grad_weight, true, memory_budget, 0, group_rows},
      aux_rows, aux_in_grad_weight, input.get_device_index());
  if (!plan) return {};
  const auto workspace_bytes = [&](int64_t rows, int64_t k_splits) {
    return linear_ce::linear_backward_bytes(rows, hidden, vocab, k_splits);
  };
  return {plan->first_rows,
          plan->first_k_splits,
          plan->chunk_rows,
          plan->slice_rows,
          plan->k_splits,
          plan->scale_bytes,
          workspace_bytes(plan->first_rows, plan->first_k_splits),
          workspace_bytes(plan->chunk_rows, plan->k_splits)};
}

// Null for a result that is not needed.
linear_ce::Bf16* written(const Tensor& tensor) {
  return tensor.numel() > 0 ? static_cast<linear_ce::Bf16*>(tensor.mutable_data_ptr()) : nullptr;
}

// One chunk. grad_logits (rows, vocab), input and grad_input (rows, hidden). A result that is not needed is
// empty.
void linear_backward(const Tensor& grad_logits, const Tensor& input, const Tensor& weight, int64_t k_splits,
                     bool first, bool last, const Tensor& grad_weight, const Tensor& scale_exponents,
                     const Tensor& workspace, const Tensor& grad_input) {
  require(grad_logits.stride(1) == 1 && grad_logits.stride(0) % 8 == 0, kOp,
          ": TMA cannot read rows of grad_logits with stride ", grad_logits.stride(0),
          ", expected a multiple of 8");
  const OpGuard guard("linear_backward", input.get_device_index());
  linear_ce::linear_backward({grad_logits, linear_ce::dense(input), linear_ce::dense(weight), k_splits, first,
                              last, input.get_device_index(), current_stream(input)},
                             written(grad_weight),
                             static_cast<unsigned char*>(scale_exponents.mutable_data_ptr()),
                             written(grad_input), workspace);
}

}  // namespace

// clang-format off: a schema is one line, whatever its length.
STABLE_TORCH_LIBRARY_FRAGMENT(liger_sm90, m) {
  m.def("linear_backward_plan(Tensor input, Tensor weight, int aux_rows, int group_rows, int memory_budget, bool need_grad_input, bool need_grad_weight, bool aux_in_grad_weight) -> (int first_rows, int first_k_splits, int chunk_rows, int slice_rows, int k_splits, int scale_bytes, int first_workspace_bytes, int workspace_bytes)");
  m.def("linear_backward(Tensor grad_logits, Tensor input, Tensor weight, int k_splits, bool first, bool last, Tensor(a!) grad_weight, Tensor(b!) scale_exponents, Tensor(c!) workspace, Tensor(d!) grad_input) -> ()");
}
// clang-format on

STABLE_TORCH_LIBRARY_IMPL(liger_sm90, CUDA, m) {
  m.impl("linear_backward_plan", TORCH_BOX(&linear_backward_plan));
  m.impl("linear_backward", TORCH_BOX(&linear_backward));
}

}  // namespace liger
