// A chunk of a linear layer's logits in two steps, by the products of compute capability 9.0: first the
// log-probabilities of the targets (and entropies and most probable classes, as metrics), then, when their
// gradient is known, those of the layer. For liger.losses, which computes the one from the other in between.
//
// The ops are no public ones: what they write are parts of tensors that their caller has laid out as plan()
// says, and a second step follows every first one before the next chunk.
#include <torch/csrc/stable/library.h>

#include <tuple>

#include "cross_entropy.h"
#include "fused_linear_ce_sm90_chunk.h"

namespace liger {
namespace {

using flce90::Bf16;

constexpr const char* kOp = "fused_linear_loss";
// What plan() gives: five numbers, then five for each chunk.
constexpr size_t kHeader = 5, kPerChunk = 5;

// The memory of a chunk besides its rows: lists, owners, readers, and what take_places() takes.
int64_t scratch_bytes(const flce90::Batch& batch, const Sm90Chunk& chunk) {
  return Scratch::bytes_for({flce90::list_bytes(chunk.rows), batch.vocab() * int64_t{sizeof(flce90::OneHot)},
                             batch.vocab() / sm90::kPanel * int64_t{sizeof(int)},
                             flce90::places_bytes(batch, chunk, false)});
}

flce90::Batch batch_of(const Tensor& input, const Tensor& weight, bool need_grad_input, bool need_grad_weight,
                       bool observed, double temperature) {
  return {flce90::dense(input),
          flce90::dense(weight),
          need_grad_input,
          need_grad_weight,
          observed,
          static_cast<float>(1.0 / temperature),
          {},
          {},
          input.get_device_index(),
          current_stream(input)};
}

// hosted_rows, panel_bytes, units_bytes, slack, whether entropies and most probable classes are observed;
// then of each chunk the first row, rows, parts, whether its rows are to be apart from their gradient, and
// the bytes of scratch. Empty where this engine cannot do it.
std::vector<int64_t> plan(const Tensor& input, const Tensor& weight, int64_t group_rows,
                          bool exact_accumulation, int64_t memory_budget, bool observed, bool need_grad_input,
                          bool need_grad_weight) {
  if (input.scalar_type() != ScalarType::BFloat16) return {};
  const DeviceGuard guard(input.get_device_index());
  const flce90::Batch batch = batch_of(input, weight, need_grad_input, need_grad_weight, observed, 1.0);
  const std::optional<Sm90Plan> plan =
      flce90::plan_on_device({batch.rows(), batch.hidden(), batch.vocab(), need_grad_input, need_grad_weight,
                              exact_accumulation, memory_budget, 0, group_rows, observed},
                             batch.device);
  if (!plan) return {};
  std::vector<int64_t> result = {plan->hosted_rows, plan->panel_bytes, plan->units_bytes, plan->slack,
                                 observed};
  for (size_t i = 0; i < plan->chunks.size(); ++i) {
    const Sm90Chunk& chunk = plan->chunks[i];
    const int64_t apart = flce90::Chunk::rows_apart(batch, *plan, i);
    result.insert(result.end(), {chunk.first, chunk.rows, chunk.parts, apart, scratch_bytes(batch, chunk)});
  }
  return result;
}

// Log-probabilities, entropies and most probable classes; the last two without elements where not observed.
using Found = std::tuple<Tensor, Tensor, Tensor>;

// Both steps see a chunk the same way.
class Step {
 public:
  Step(const Tensor& input, const Tensor& weight, const Tensor& target, int64_t ignore_index,
       double temperature, const std::vector<int64_t>& numbers, int64_t index, const Tensor& grad_weight,
       const Tensor& extra, const Tensor& rows, const Tensor& scratch, const Tensor& grad_input)
      : batch_(batch_of(input, weight, grad_input.numel() > 0, grad_weight.numel() > 0, numbers[4] != 0,
                        temperature)),
        target_(torch::stable::contiguous(target)),
        plan_{{}, numbers[0], numbers[1], numbers[2], numbers[3]} {
    for (size_t i = kHeader; i < numbers.size(); i += kPerChunk) {
      plan_.chunks.push_back({numbers[i], numbers[i + 1], numbers[i + 2]});
    }
    ce::Problem& problem = batch_.problem;
    problem.rows = batch_.rows();
    problem.vocab = static_cast<int>(batch_.vocab());
    problem.targets = {target_.const_data_ptr(), target_.scalar_type() == ScalarType::Int, ignore_index};
    // The rows of this chunk are the whole batch.
    const Sm90Chunk chunk{0, batch_.rows(), plan_.chunks[index].parts};
    Scratch memory(scratch, 0);
    lists_ = memory.take<int32_t>(2 * batch_.rows() + 1);
    batch_.list = {lists_, lists_ + batch_.rows(), lists_ + 2 * batch_.rows()};
    const flce90::WeightSum sum{static_cast<Bf16*>(grad_weight.mutable_data_ptr()),
                                static_cast<unsigned char*>(extra.mutable_data_ptr()),
                                memory.take<flce90::OneHot>(batch_.vocab()),
                                memory.take<int>(batch_.vocab() / sm90::kPanel)};
    const flce90::Places places =
        take_places(batch_, chunk, static_cast<Bf16*>(rows.mutable_data_ptr()), memory);
    chunk_.emplace(batch_, plan_, index, chunk, places, sum,
                   static_cast<Bf16*>(grad_input.mutable_data_ptr()));
  }
  Step(const Step&) = delete;  // the chunk refers to the batch and the plan

  Found logprobs() {
    const auto per_row = [&](bool wanted, ScalarType dtype) {
      return empty({wanted ? batch_.rows() : 0}, dtype, batch_.input);
    };
    const Tensor logprobs = per_row(true, ScalarType::Float);
    const Tensor entropy = per_row(batch_.observed, ScalarType::Float);
    const Tensor predicted = per_row(batch_.observed, ScalarType::Long);
    ce::Problem& problem = batch_.problem;
    problem.logprobs = static_cast<float*>(logprobs.mutable_data_ptr());
    if (batch_.observed) {
      problem.entropy = static_cast<float*>(entropy.mutable_data_ptr());
      problem.predicted = static_cast<int64_t*>(predicted.mutable_data_ptr());
    }
    flce90::list_rows(batch_, lists_);
    chunk_->exponentials();
    chunk_->apply_rule(false);
    return {logprobs, entropy, predicted};
  }

  // of_logprob: (rows,), float32
  void gradients(const Tensor& minus_of_logprob, const Tensor& grad_input) {
    batch_.problem.token_weight = static_cast<const float*>(minus_of_logprob.const_data_ptr());
    chunk_->apply_rule(true);
    chunk_->multiply();
    if (batch_.need_grad_input) {
      flce90::spread_rows(batch_, static_cast<Bf16*>(grad_input.mutable_data_ptr()));
    }
  }

 private:
  flce90::Batch batch_;
  Tensor target_;
  Sm90Plan plan_;
  int32_t* lists_ = nullptr;
  std::optional<flce90::Chunk> chunk_;
};

Found logprobs(const Tensor& input, const Tensor& weight, const Tensor& target, int64_t ignore_index,
               double temperature, std::vector<int64_t> numbers, int64_t index, const Tensor& grad_weight,
               const Tensor& extra, const Tensor& rows, const Tensor& scratch, const Tensor& grad_input) {
  const DeviceGuard guard(input.get_device_index());
  return Step(input, weight, target, ignore_index, temperature, numbers, index, grad_weight, extra, rows,
              scratch, grad_input)
      .logprobs();
}

void gradients(const Tensor& minus_of_logprob, const Tensor& input, const Tensor& weight,
               const Tensor& target, int64_t ignore_index, double temperature, std::vector<int64_t> numbers,
               int64_t index, const Tensor& grad_weight, const Tensor& extra, const Tensor& rows,
               const Tensor& scratch, const Tensor& grad_input) {
  require(minus_of_logprob.scalar_type() == ScalarType::Float && minus_of_logprob.is_contiguous() &&
              minus_of_logprob.numel() == input.size(0),
          kOp, ": the gradient of the log-probabilities has shape ", shape_text(minus_of_logprob),
          ", expected one contiguous float32 per row");
  const DeviceGuard guard(input.get_device_index());
  Step(input, weight, target, ignore_index, temperature, numbers, index, grad_weight, extra, rows, scratch,
       grad_input)
      .gradients(minus_of_logprob, grad_input);
}

}  // namespace

STABLE_TORCH_LIBRARY(liger_sm90, m) {
  m.def(
      "plan(Tensor input, Tensor weight, int group_rows, bool exact_accumulation, int memory_budget, bool "
      "observed, bool need_grad_input, bool need_grad_weight) -> int[]");
  // input, target, rows, grad_input: of the chunk; what is not needed has no elements
  m.def(
      "logprobs(Tensor input, Tensor weight, Tensor target, int ignore_index, float temperature, int[] plan, "
      "int index, Tensor(a!) grad_weight, Tensor(b!) extra, Tensor(c!) rows, Tensor(d!) scratch, Tensor(e!) "
      "grad_input) -> (Tensor logprobs, Tensor entropy, Tensor argmax)");
  m.def(
      "gradients(Tensor minus_of_logprob, Tensor input, Tensor weight, Tensor target, int ignore_index, "
      "float "
      "temperature, int[] plan, int index, Tensor(a!) grad_weight, Tensor(b!) extra, Tensor(c!) rows, "
      "Tensor(d!) scratch, Tensor(e!) grad_input) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(liger_sm90, CUDA, m) {
  m.impl("plan", TORCH_BOX(&plan));
  m.impl("logprobs", TORCH_BOX(&logprobs));
  m.impl("gradients", TORCH_BOX(&gradients));
}

}  // namespace liger
