// A chunk of a linear layer's logits in two steps, by the products of compute capability 9.0: first the
// log-probabilities of the targets (and entropies and most probable classes, as metrics), then, when their
// gradient is known, those of the layer. For liger.losses, which computes the one from the other in between.
//
// The ops are no public ones: what they write are parts of tensors that their caller has laid out as plan()
// says, and a second step follows every first one before the next chunk.
//
// A chunk has some of the rows of every part of the batch: one range of them, or two for pairs, whose chosen
// and rejected sequences are the halves of the batch. Kernels find them by the list of its valid rows. Only
// the gradients of several ranges lie side by side, chunk after chunk, until place_rows(): the rows
// themselves lie there before, and the products want them in one piece.
#include <torch/csrc/stable/library.h>

#include <algorithm>

#include "cross_entropy/cross_entropy.h"
#include "linear_ce/sm90/chunk.h"

namespace liger {
namespace {

using flce90::Bf16;

constexpr const char* kOp = "fused_linear_loss";
// What plan() gives: five numbers, then five for each chunk.
constexpr size_t kHeader = 5, kPerChunk = 5;

// The memory of a chunk besides its rows: its list, owners, readers, and what take_places() takes.
int64_t scratch_bytes(const flce90::Batch& batch, const Sm90Chunk& chunk) {
  return Workspace::bytes_for(
      {(chunk.rows + 1) * int64_t{sizeof(int32_t)}, batch.vocab() * int64_t{sizeof(flce90::OneHot)},
       batch.vocab() / sm90::kPanel * int64_t{sizeof(int)}, flce90::places_bytes(batch, chunk, false)});
}

flce90::Batch batch_of(const Tensor& input, const Tensor& weight, bool need_grad_input, bool need_grad_weight,
                       bool observed, double temperature) {
  return {input,
          weight,
          need_grad_input,
          need_grad_weight,
          observed,
          static_cast<float>(1.0 / temperature),
          {},
          {},
          input.get_device_index(),
          current_stream(input)};
}

// For matrices of these sizes: hosted_rows, panel_bytes, units_bytes, slack, whether entropies and most
// probable classes are observed; then of each chunk the first row, rows, parts, whether its rows are to be
// apart from their gradient, and the bytes of workspace. Empty where this engine cannot do it.
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

// (rows,), of the whole batch: log-probabilities, entropies and most probable classes; the last two without
// elements where not observed. Those of ignored rows are left alone.
struct Found {
  const Tensor &logprobs, &entropy, &predicted;
};

// Both steps see a chunk the same way. input and weight are as dense() gives them, target is contiguous.
class Step {
 public:
  Step(const Tensor& input, const Tensor& weight, const Tensor& target, int64_t ignore_index,
       double temperature, const std::vector<int64_t>& numbers, int64_t index, int64_t ranges,
       const Tensor& position, const Tensor& grad_weight, const Tensor& extra, const Tensor& rows,
       const Tensor& workspace, const Tensor& grad_input)
      : batch_(batch_of(input, weight, grad_input.numel() > 0, grad_weight.numel() > 0, numbers[4] != 0,
                        temperature)),
        plan_{{}, numbers[0], numbers[1], numbers[2], numbers[3]},
        ranges_(ranges) {
    for (size_t i = kHeader; i < numbers.size(); i += kPerChunk) {
      plan_.chunks.push_back({numbers[i], numbers[i + 1], numbers[i + 2]});
    }
    require(ranges == 1 || ranges == 2, kOp, ": a chunk of ", ranges, " ranges, expected 1 or 2");
    ce::Problem& problem = batch_.problem;
    problem.rows = batch_.rows();
    problem.vocab = static_cast<int>(batch_.vocab());
    problem.targets = {target.const_data_ptr(), target.scalar_type() == ScalarType::Int, ignore_index};
    first_ = plan_.chunks[index].first;
    // The list is of this chunk alone.
    const Sm90Chunk chunk{0, plan_.chunks[index].rows, plan_.chunks[index].parts};
    rows_ = chunk.rows;
    Workspace memory(workspace, 0);
    int32_t* const list = memory.allocate<int32_t>(rows_ + 1);
    batch_.list = {list, static_cast<int32_t*>(position.mutable_data_ptr()), list + rows_};
    const flce90::WeightSum sum{static_cast<Bf16*>(grad_weight.mutable_data_ptr()),
                                static_cast<unsigned char*>(extra.mutable_data_ptr()),
                                memory.allocate<flce90::OneHot>(batch_.vocab()),
                                memory.allocate<int>(batch_.vocab() / sm90::kPanel)};
    const flce90::Places places =
        take_places(batch_, chunk, static_cast<Bf16*>(rows.mutable_data_ptr()), memory);
    chunk_.emplace(batch_, plan_, index, chunk, places, sum,
                   static_cast<Bf16*>(grad_input.mutable_data_ptr()));
  }
  Step(const Step&) = delete;  // the chunk refers to the batch and the plan

  void logprobs(const Found& found) {
    ce::Problem& problem = batch_.problem;
    problem.logprobs = static_cast<float*>(found.logprobs.mutable_data_ptr());
    if (batch_.observed) {
      problem.entropy = static_cast<float*>(found.entropy.mutable_data_ptr());
      problem.predicted = static_cast<int64_t*>(found.predicted.mutable_data_ptr());
    }
    // Of one range, the gradients go to where they belong chunk by chunk.
    const compact::RowRanges which{first_ / ranges_, rows_ / ranges_, (batch_.rows() - rows_) / ranges_,
                                   ranges_ > 1 ? static_cast<int>(first_) : 0};
    compact::launch_list_rows(problem.targets, rows_, batch_.list, nullptr, batch_.stream, which);
    check_launch(kOp);
    chunk_->exponentials();
    chunk_->apply_rule(false);
  }

  // minus_of_logprob: (rows,), of the whole batch
  void gradients(const Tensor& minus_of_logprob, const Tensor& grad_input) {
    batch_.problem.token_weight = static_cast<const float*>(minus_of_logprob.const_data_ptr());
    chunk_->apply_rule(true);
    chunk_->multiply();
    if (batch_.need_grad_input && ranges_ == 1) {
      flce90::spread_rows(batch_, batch_.list.position + first_, rows_,
                          static_cast<Bf16*>(grad_input.mutable_data_ptr()));
    }
  }

 private:
  flce90::Batch batch_;
  Sm90Plan plan_;
  const int64_t ranges_;
  int64_t first_ = 0, rows_ = 0;  // of the chunk, among those of all chunks
  std::optional<flce90::Chunk> chunk_;
};

void logprobs(const Tensor& input, const Tensor& weight, const Tensor& target, int64_t ignore_index,
              double temperature, std::vector<int64_t> numbers, int64_t index, int64_t ranges,
              const Tensor& position, const Tensor& grad_weight, const Tensor& extra, const Tensor& rows,
              const Tensor& workspace, const Tensor& grad_input, const Tensor& found, const Tensor& entropy,
              const Tensor& predicted) {
  const DeviceGuard guard(input.get_device_index());
  Step(input, weight, target, ignore_index, temperature, numbers, index, ranges, position, grad_weight, extra,
       rows, workspace, grad_input)
      .logprobs({found, entropy, predicted});
}

void gradients(const Tensor& minus_of_logprob, const Tensor& input, const Tensor& weight,
               const Tensor& target, int64_t ignore_index, double temperature, std::vector<int64_t> numbers,
               int64_t index, int64_t ranges, const Tensor& position, const Tensor& grad_weight,
               const Tensor& extra, const Tensor& rows, const Tensor& workspace, const Tensor& grad_input) {
  require(minus_of_logprob.scalar_type() == ScalarType::Float && minus_of_logprob.is_contiguous() &&
              minus_of_logprob.numel() == input.size(0),
          kOp, ": the gradient of the log-probabilities has shape ", shape_text(minus_of_logprob),
          ", expected one contiguous float32 per row");
  const DeviceGuard guard(input.get_device_index());
  Step(input, weight, target, ignore_index, temperature, numbers, index, ranges, position, grad_weight, extra,
       rows, workspace, grad_input)
      .gradients(minus_of_logprob, grad_input);
}

// rows[i] becomes rows[position[i]], or zeros where that is negative, by way of other memory: as many columns
// at a time as it has room for.
void place_rows(const Tensor& position, const Tensor& memory, const Tensor& rows) {
  const DeviceGuard guard(rows.get_device_index());
  const int64_t count = rows.size(0), hidden = rows.size(1);
  constexpr int64_t kVector = kVec<Bf16>;
  const int64_t bytes = memory.numel() * static_cast<int64_t>(memory.element_size());
  const int64_t fitting = bytes / (count * int64_t{sizeof(Bf16)}) / kVector * kVector;
  require(fitting > 0, kOp, ": ", bytes, " bytes are too few to move ", count, " rows");
  const int64_t columns = round_up(ceil_div(hidden, ceil_div(hidden, fitting)), kVector);
  const auto* const at = static_cast<const int32_t*>(position.const_data_ptr());
  Bf16* const aside = static_cast<Bf16*>(memory.mutable_data_ptr());
  const cudaStream_t stream = current_stream(rows);
  for (int64_t first = 0; first < hidden; first += columns) {
    const int64_t width = std::min(columns, hidden - first);
    Bf16* const x = static_cast<Bf16*>(rows.mutable_data_ptr()) + first;
    compact::launch_copy_rows<Bf16>(x, hidden, compact::PlacedRows{nullptr}, count, width, aside, width,
                                    stream);
    compact::launch_copy_rows<Bf16>(aside, width, compact::PlacedRows{at}, count, width, x, hidden, stream);
    check_launch(kOp);
  }
}

}  // namespace

STABLE_TORCH_LIBRARY(liger_sm90, m) {
  m.def(
      "plan(Tensor input, Tensor weight, int group_rows, bool exact_accumulation, int memory_budget, bool "
      "observed, bool need_grad_input, bool need_grad_weight) -> int[]");
  // A matrix as the others want input and weight: itself, or a copy.
  m.def("dense(Tensor(a) matrix) -> Tensor(a)");
  // rows, grad_input: of the chunk; all else of the batch. What is not needed has no elements.
  m.def(
      "logprobs(Tensor input, Tensor weight, Tensor target, int ignore_index, float temperature, int[] plan,"
      " int index, int ranges, Tensor(a!) position, Tensor(b!) grad_weight, Tensor(c!) extra,"
      " Tensor(d!) rows, Tensor(e!) workspace, Tensor(f!) grad_input, Tensor(g!) logprobs, Tensor(h!) entropy,"
      " Tensor(i!) argmax) -> ()");
  m.def(
      "gradients(Tensor minus_of_logprob, Tensor input, Tensor weight, Tensor target, int ignore_index,"
      " float temperature, int[] plan, int index, int ranges, Tensor position, Tensor(b!) grad_weight,"
      " Tensor(c!) extra, Tensor(d!) rows, Tensor(e!) workspace, Tensor(f!) grad_input) -> ()");
  m.def("place_rows(Tensor position, Tensor(a!) memory, Tensor(b!) rows) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(liger_sm90, CUDA, m) {
  m.impl("plan", TORCH_BOX(&plan));
  m.impl("dense", TORCH_BOX(&flce90::dense));
  m.impl("logprobs", TORCH_BOX(&logprobs));
  m.impl("gradients", TORCH_BOX(&gradients));
  m.impl("place_rows", TORCH_BOX(&place_rows));
}

}  // namespace liger
