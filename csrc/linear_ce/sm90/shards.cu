// vocab_parallel_fused_linear_ce on the wgmma engine, in steps: each rank has the weight of a shard of the classes, and
// torch.distributed communicates between the steps (python/liger/distributed/_sm90_shards.py).
//
//   shard_begin         once: gathers the valid rows and computes the logits of the targets of this shard
//     all-reduce        of the logits of the targets, which all ranks use as references
//   shard_exponentials  a chunk: exponentials, and (reference, sum) of each row
//     all-gather        of those
//   shard_rule          losses, scales, and the input gradient of the shard in float32
//     all-reduce        of the input gradient
//   shard_grad_weight   adds to the weight gradient of the shard
//   shard_finish        once: moves the input gradients of valid rows to their rows
//
// Internal ops: the caller has checked the options, and allocates all memory. `rows` are the gathered rows of the whole
// batch, in the memory of their gradient: that of a chunk is rounded there when its rows have been read for the last
// time.
#include "linear_ce/sm90/shard_rows.cuh"

#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <tuple>

#include "cross_entropy/cross_entropy.h"
#include "linear_ce/sm90/chunk.h"
#include "linear_ce/sm90/gemm_launch.cuh"
#include "linear_ce/sm90/step.h"

namespace liger::linear_ce {
namespace {

constexpr const char* kOp = "fused_linear_ce";

// What the steps of all chunks read.
struct State {
  int32_t* row_index;  // of valid rows, as index_valid_rows() takes its memory
  int32_t* local;      // the targets of the shard, of all rows
  int* no_overflow;    // written by shard_begin, and not used

  static int64_t bytes(int64_t rows) {
    return Workspace::bytes_for({row_index_bytes(rows), rows * int64_t{sizeof(int32_t)},
                                 padded_rows(rows) / sm90::kTileM * int64_t{sizeof(int)}});
  }
  State(const Tensor& memory, int64_t rows) {
    Workspace workspace(memory, 0);
    row_index = workspace.allocate<int32_t>(2 * rows + 1);
    local = workspace.allocate<int32_t>(rows);
    no_overflow = workspace.allocate<int>(padded_rows(rows) / sm90::kTileM);
  }
  valid_rows::RowIndex index(int64_t rows) const {
    return {row_index, row_index + rows, row_index + 2 * rows};
  }
};

Batch batch_of(const Tensor& input, const Tensor& weight, bool need_grad_input, bool need_grad_weight,
               std::optional<double> softcap) {
  Batch batch{input, weight, need_grad_input,          need_grad_weight,     false, 1.0f,
              {},    {},     input.get_device_index(), current_stream(input)};
  batch.terms.transform.softcap = static_cast<float>(softcap.value_or(0.0));
  return batch;
}

float* floats(const Tensor& tensor) {
  return tensor.numel() > 0 ? static_cast<float*>(tensor.mutable_data_ptr()) : nullptr;
}

Bf16* elements_of(const Tensor& tensor) {
  return tensor.numel() > 0 ? static_cast<Bf16*>(tensor.mutable_data_ptr()) : nullptr;
}

// The steps of a chunk.
class ShardChunk : public Chunk {
 public:
  using Chunk::Chunk;

  // sums: (2, rows of the chunk).
  void exponentials(const State& state, float* sums) const {
    const NvtxRange range("exponentials");
    clear_class_one_hot();
    const int tiles = static_cast<int>(padded_rows(chunk_.rows) / sm90::kTileM);
    claim_first_rows<<<blocks(std::max<int64_t>(chunk_.rows, tiles), kRowThreads), kRowThreads, 0,
                       stream()>>>(rows(), chunk_index(), state.local, first_row_of_class(),
                                   buffers_.overflow, tiles);
    check_launch(kOp);
    exponentials_of_gathered();
    const ShardSums found{rows(),
                          buffers_.target_logit,
                          buffers_.tile_sums,
                          static_cast<int>(batch_.sums_per_row()),
                          buffers_.overflow,
                          buffers_.scale,
                          sums};
    write_shard_sums<<<blocks(chunk_.rows, kRowThreads / 32), kRowThreads, 0, stream()>>>(found);
    check_launch(kOp);
  }

  void apply_rule(const State& state, const RankSums& sums) const {
    const NvtxRange range("apply_rule");
    Rule<ShardOf<Bf16>> rule{this->rule<Bf16>(true), sums, state.local, static_cast<int>(batch_.panels())};
    rule.columns = 0;  // the sums of the ranks replace those of the tiles
    linear_ce::apply_rule<ShardOf<Bf16>, false>
        <<<static_cast<unsigned>(chunk_.rows), kRowThreads, 0, stream()>>>(rule);
    check_launch(kOp);
  }

  // sum: (rows of the chunk, hidden).
  void grad_input(float* sum) const {
    const NvtxRange range("grad_input");
    with_gradient_tiles(batch_.hidden(), batch_.vocab(), [&](auto partial_tiles, auto columns) {
      const FloatGradInputEpilogue<Bf16, partial_tiles.value, columns.value> epilogue{
          {this->grad_input_of<Bf16>()}, sum};
      launch_gemm(maps_of(matrix_map(batch_.weight)), epilogue, batch_.device, stream());
    });
    if (chunk_.k_splits == 1) return;
    reduce_k_splits_to_float<Bf16>
        <<<static_cast<unsigned>(chunk_.rows), kRowThreads, 0, stream()>>>(this->grad_input_of<Bf16>(), sum);
    check_launch(kOp);
  }

 private:
  cudaStream_t stream() const { return batch_.stream; }
  const int* chunk_index() const { return batch_.row_index.index + chunk_.first; }
  static unsigned blocks(int64_t rows, int rows_per_block) {
    return static_cast<unsigned>(ceil_div(rows, int64_t{rows_per_block}));
  }
};

int64_t chunk_bytes(const Batch& batch, const PlannedChunk& chunk) {
  return Workspace::bytes_for({class_one_hot_bytes(batch), batch.panels() * int64_t{sizeof(int)},
                               ChunkBuffers::bytes(batch, chunk, false)});
}

// Arguments that all steps of a chunk take. input and weight are as dense() returns them; target_logit has
// padded_rows() of all rows; a weight gradient that is not needed is empty.
struct StepArguments {
  const Tensor &input, &weight;
  std::optional<double> softcap;
  bool need_grad_input;
  const std::vector<int64_t>& plan;
  int64_t index;
  const Tensor &state, &target_logit, &rows, &grad_weight, &panel_workspace, &workspace;
};

// One step of a chunk.
class Step {
 public:
  explicit Step(const StepArguments& a)
      : guard_("vocab_parallel_fused_linear_ce", a.input.get_device_index()),
        batch(batch_of(a.input, a.weight, a.need_grad_input, a.grad_weight.numel() > 0, a.softcap)),
        state(a.state, batch.rows()),
        plan_(LinearCePlan::decode(a.plan)),
        planned_(plan_.chunks.at(a.index)),
        index_(a.index) {
    batch.row_index = state.index(batch.rows());
    Workspace memory(a.workspace, 0);
    grad_weight_ = {
        elements_of(a.grad_weight), static_cast<unsigned char*>(a.panel_workspace.mutable_data_ptr()),
        memory.allocate<OneHot>(batch.panels() * sm90::kPanel), memory.allocate<int>(batch.panels())};
    buffers_ = ChunkBuffers::allocate(batch, planned_, elements_of(a.rows) + planned_.first * batch.hidden(),
                                      memory);
    buffers_.target_logit = floats(a.target_logit) + planned_.first;
  }
  Step(const Step&) = delete;  // a chunk refers to the batch and the plan

  // Of the batch as it is now.
  ShardChunk chunk() const {
    return {batch, plan_, static_cast<size_t>(index_), planned_, buffers_, grad_weight_, nullptr};
  }
  int64_t rows() const { return planned_.rows; }

 private:
  const OpGuard guard_;

 public:
  Batch batch;
  const State state;

 private:
  const LinearCePlan plan_;
  const PlannedChunk planned_;
  const int64_t index_;
  GradWeightBuffers grad_weight_;
  ChunkBuffers buffers_;
};

// --- the ops -------------------------------------------------------------------------------------------------

// Clusters that run at a time on the device of a tensor, 0 if the engine cannot run there.
int64_t shard_clusters(const Tensor& input) {
  const DeviceGuard guard(input.get_device_index());
  return clusters_on_device(input.get_device_index());
}

// Bytes of the state, and of the workspace of the chunks.
std::tuple<int64_t, int64_t> shard_memory(const Tensor& input, const Tensor& weight,
                                          std::vector<int64_t> plan, bool need_grad_input,
                                          bool need_grad_weight) {
  const Batch batch = batch_of(input, weight, need_grad_input, need_grad_weight, std::nullopt);
  int64_t most = 0;
  for (const PlannedChunk& chunk : LinearCePlan::decode(plan).chunks)
    most = std::max(most, chunk_bytes(batch, chunk));
  return {State::bytes(batch.rows()), most};
}

void shard_begin(const Tensor& input, const Tensor& weight, const Tensor& target,
                 const std::optional<Tensor>& ce_weight, const std::optional<Tensor>& denominator,
                 int64_t ignore_index, std::optional<double> softcap, bool mean, int64_t vocab_start,
                 int64_t vocab_size, const Tensor& state_memory, const Tensor& target_logit,
                 const Tensor& rows, const Tensor& used_denominator, const Tensor& loss, const Tensor& z_loss,
                 const Tensor& logprobs) {
  const OpGuard guard("vocab_parallel_fused_linear_ce begin", input.get_device_index());
  const std::string reduction = mean ? "mean" : "sum";
  CrossEntropyOptions options(
      {target, ce_weight, std::nullopt, denominator, ignore_index, 0.0, 0.0, softcap, reduction}, vocab_size);
  prepare_cross_entropy(kOp, options, denominator, mean, used_denominator);
  Batch batch = batch_of(input, weight, false, false, softcap);
  const int64_t count = batch.rows();
  const State state(state_memory, count);
  batch.problem = options.problem;
  batch.problem.rows = count;
  batch.problem.loss = floats(loss);
  batch.problem.z_loss = floats(z_loss);
  batch.problem.logprobs = floats(logprobs);
  index_valid_rows(batch, state.row_index);
  valid_rows::with_targets(batch.problem.targets, [&](auto* targets) {
    local_targets<<<valid_rows::blocks_of(count), kRowThreads, 0, batch.stream>>>(
        targets, ignore_index, vocab_start, static_cast<int>(batch.vocab()), count, state.local);
  });
  check_launch(kOp);
  // The logit of a target of another shard is 0, so the all-reduce adds zeros to one number.
  batch.problem.targets = {state.local, true, ignore_index};
  const LinearCePlan whole{{{0, count, 1}}, 0, 0, 0, 0};
  ChunkBuffers buffers{};
  buffers.input = elements_of(rows);
  buffers.target_logit = floats(target_logit);
  buffers.overflow = state.no_overflow;
  Chunk(batch, whole, 0, whole.chunks[0], buffers, {}, nullptr).gather();
}

void shard_exponentials(const Tensor& input, const Tensor& weight, std::optional<double> softcap,
                        bool need_grad_input, std::vector<int64_t> plan, int64_t index, const Tensor& state,
                        const Tensor& target_logit, const Tensor& rows, const Tensor& grad_weight,
                        const Tensor& panel_workspace, const Tensor& workspace, const Tensor& sums) {
  const Step step({input, weight, softcap, need_grad_input, plan, index, state, target_logit, rows,
                   grad_weight, panel_workspace, workspace});
  step.chunk().exponentials(step.state, floats(sums));
}

// sums: (ranks, 2, rows of the chunk). Without gradients only the results are written.
void shard_rule(const Tensor& target, const std::optional<Tensor>& ce_weight,
                const std::optional<Tensor>& token_weight, const Tensor& used_denominator,
                int64_t ignore_index, double lse_square_scale, int64_t vocab_size, const Tensor& sums,
                int64_t rank, const Tensor& input, const Tensor& weight, std::optional<double> softcap,
                bool need_grad_input, std::vector<int64_t> plan, int64_t index, const Tensor& state,
                const Tensor& target_logit, const Tensor& rows, const Tensor& grad_weight,
                const Tensor& panel_workspace, const Tensor& workspace, const Tensor& grad_input_sum,
                const Tensor& loss, const Tensor& z_loss, const Tensor& logprobs) {
  Step step({input, weight, softcap, need_grad_input, plan, index, state, target_logit, rows, grad_weight,
             panel_workspace, workspace});
  require(sums.dim() == 3 && sums.size(1) == 2 && sums.size(2) == step.rows() && sums.is_contiguous(), kOp,
          ": the sums of the ranks have shape ", shape_text(sums), ", expected (ranks, 2, ", step.rows(),
          "), contiguous");
  require(0 <= rank && rank < sums.size(0), kOp, ": rank is ", rank, ", expected one of ", sums.size(0));
  const std::optional<Tensor> denominator = used_denominator;
  const std::string reduction = "sum";
  const CrossEntropyOptions options(
      {target, ce_weight, token_weight, denominator, ignore_index, 0.0, lse_square_scale, softcap, reduction},
      vocab_size);
  ce::Problem& problem = step.batch.problem;
  problem = options.problem;
  problem.rows = step.batch.rows();
  problem.denominator = static_cast<const float*>(used_denominator.const_data_ptr());
  problem.loss = floats(loss);
  problem.z_loss = floats(z_loss);
  problem.logprobs = floats(logprobs);
  const ShardChunk chunk = step.chunk();
  chunk.apply_rule(step.state,
                   {static_cast<const float*>(sums.const_data_ptr()), static_cast<int>(sums.size(0)),
                    static_cast<int>(rank), static_cast<int>(step.rows())});
  if (need_grad_input) chunk.grad_input(floats(grad_input_sum));
}

void shard_grad_weight(const Tensor& input, const Tensor& weight, std::optional<double> softcap,
                       bool need_grad_input, std::vector<int64_t> plan, int64_t index, const Tensor& state,
                       const Tensor& target_logit, const Tensor& rows, const Tensor& grad_weight,
                       const Tensor& panel_workspace, const Tensor& workspace) {
  const Step step({input, weight, softcap, need_grad_input, plan, index, state, target_logit, rows,
                   grad_weight, panel_workspace, workspace});
  step.chunk().grad_weight();
}

void shard_finish(const Tensor& state, const Tensor& grad_input) {
  const OpGuard guard("vocab_parallel_fused_linear_ce finish", grad_input.get_device_index());
  const Batch batch = batch_of(grad_input, grad_input, true, false, std::nullopt);
  const int64_t rows = batch.rows();
  scatter_rows(batch, State(state, rows).index(rows).position, rows, elements_of(grad_input));
}

}  // namespace

// clang-format off: a schema is one line, whatever its length.
STABLE_TORCH_LIBRARY_FRAGMENT(liger_sm90, m) {
  m.def("shard_clusters(Tensor input) -> int");
  m.def("shard_memory(Tensor input, Tensor weight, int[] plan, bool need_grad_input, bool need_grad_weight) -> (int state_bytes, int workspace_bytes)");
  m.def("shard_begin(Tensor input, Tensor weight, Tensor target, Tensor? ce_weight, Tensor? denominator, int ignore_index, float? softcap, bool mean, int vocab_start, int vocab_size, Tensor(a!) state, Tensor(b!) target_logit, Tensor(c!) rows, Tensor(d!) used_denominator, Tensor(e!) loss, Tensor(f!) z_loss, Tensor(g!) logprobs) -> ()");
  m.def("shard_exponentials(Tensor input, Tensor weight, float? softcap, bool need_grad_input, int[] plan, int index, Tensor state, Tensor target_logit, Tensor rows, Tensor(a!) grad_weight, Tensor(b!) panel_workspace, Tensor(c!) workspace, Tensor(d!) sums) -> ()");
  m.def("shard_rule(Tensor target, Tensor? ce_weight, Tensor? token_weight, Tensor used_denominator, int ignore_index, float lse_square_scale, int vocab_size, Tensor sums, int rank, Tensor input, Tensor weight, float? softcap, bool need_grad_input, int[] plan, int index, Tensor state, Tensor target_logit, Tensor(a!) rows, Tensor(b!) grad_weight, Tensor(c!) panel_workspace, Tensor(d!) workspace, Tensor(e!) grad_input_sum, Tensor(f!) loss, Tensor(g!) z_loss, Tensor(h!) logprobs) -> ()");
  m.def("shard_grad_weight(Tensor input, Tensor weight, float? softcap, bool need_grad_input, int[] plan, int index, Tensor state, Tensor target_logit, Tensor rows, Tensor(a!) grad_weight, Tensor(b!) panel_workspace, Tensor(c!) workspace) -> ()");
  m.def("shard_finish(Tensor state, Tensor(a!) grad_input) -> ()");
}
// clang-format on

STABLE_TORCH_LIBRARY_IMPL(liger_sm90, CUDA, m) {
  m.impl("shard_clusters", TORCH_BOX(&shard_clusters));
  m.impl("shard_memory", TORCH_BOX(&shard_memory));
  m.impl("shard_begin", TORCH_BOX(&shard_begin));
  m.impl("shard_exponentials", TORCH_BOX(&shard_exponentials));
  m.impl("shard_rule", TORCH_BOX(&shard_rule));
  m.impl("shard_grad_weight", TORCH_BOX(&shard_grad_weight));
  m.impl("shard_finish", TORCH_BOX(&shard_finish));
}

}  // namespace liger::linear_ce
