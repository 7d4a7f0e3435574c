// The gradients of a linear layer over classes from rows that hold the gradient of its logits, by the
// products of fused_linear_ce on compute capability 9.0: the weight gradient is summed over chunks in its own
// memory. For losses that make that gradient in a way of their own.
//
// The ops are no public ones: memory is laid out by their caller as head_plan() says.
#include <torch/csrc/stable/library.h>

#include "linear_ce/sm90/chunk.h"

namespace liger {
namespace {

constexpr const char* kOp = "head_gradients";

// Rows of the first chunk, of the others, and of a part of one that has logits of so many rows of 16 bits for
// each row of its gradient; then parts of the classes and bytes of workspace, of the first chunk and of the
// others; bytes of units. Empty where this engine cannot do it.
std::vector<int64_t> head_plan(const Tensor& input, const Tensor& weight, int64_t beside, int64_t group_rows,
                               int64_t memory_budget, bool need_grad_input, bool need_grad_weight,
                               bool hosted) {
  if (input.scalar_type() != ScalarType::BFloat16) return {};
  const DeviceGuard guard(input.get_device_index());
  const int64_t hidden = input.size(1), vocab = weight.size(0);
  const std::optional<Sm90HeadPlan> plan = flce90::plan_head_on_device(
      {input.size(0), hidden, vocab, need_grad_input, need_grad_weight, true, memory_budget, 0, group_rows},
      beside, hosted, input.get_device_index());
  if (!plan) return {};
  const auto workspace = [&](int64_t rows, int64_t parts) {
    return flce90::gradient_rows_bytes(rows, hidden, vocab, parts);
  };
  return {plan->first_rows,
          plan->chunk_rows,
          plan->part_rows,
          plan->first_parts,
          plan->parts,
          workspace(plan->first_rows, plan->first_parts),
          workspace(plan->chunk_rows, plan->parts),
          plan->units_bytes};
}

flce90::Bf16* written(const Tensor& tensor) {
  return tensor.numel() > 0 ? static_cast<flce90::Bf16*>(tensor.mutable_data_ptr()) : nullptr;
}

// gradient: of the logits of a chunk; input, grad_input: its rows. What is not needed has no elements.
void head_gradients(const Tensor& gradient, const Tensor& input, const Tensor& weight, int64_t parts,
                    bool first, bool last, const Tensor& grad_weight, const Tensor& units,
                    const Tensor& workspace, const Tensor& grad_input) {
  require(gradient.stride(1) == 1 && gradient.stride(0) % 8 == 0, kOp,
          ": the gradient of the logits has rows that the copy engine cannot read");
  const DeviceGuard guard(input.get_device_index());
  flce90::multiply_rows({gradient, flce90::dense(input), flce90::dense(weight), parts, first, last,
                         input.get_device_index(), current_stream(input)},
                        written(grad_weight), static_cast<unsigned char*>(units.mutable_data_ptr()),
                        written(grad_input), workspace);
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(liger_sm90, m) {
  m.def(
      "head_plan(Tensor input, Tensor weight, int beside, int group_rows, int memory_budget, bool "
      "need_grad_input, bool need_grad_weight, bool hosted) -> int[]");
  m.def(
      "head_gradients(Tensor gradient, Tensor input, Tensor weight, int parts, bool first, bool last,"
      " Tensor(a!) grad_weight, Tensor(b!) units, Tensor(c!) workspace, Tensor(d!) grad_input) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(liger_sm90, CUDA, m) {
  m.impl("head_plan", TORCH_BOX(&head_plan));
  m.impl("head_gradients", TORCH_BOX(&head_gradients));
}

}  // namespace liger
