// SPDX-License-Identifier: BSD-3-Clause
#include "lm_head/sm90/shards/step.h"

#include <algorithm>

#include "lm_head/sm90/chunk/select_kernel.h"
#include "lm_head/sm90/gemm/launch.cuh"
#include "lm_head/sm90/logprobs/kept_rows.cuh"
#include "lm_head/sm90/shards/rows.cuh"

namespace liger::lm_head {
namespace {

constexpr const char* kOp = kGemmOp;

unsigned blocks_of(int64_t rows, int rows_per_block) {
  return static_cast<unsigned>(ceil_div(rows, int64_t{rows_per_block}));
}

}  // namespace

// --- a batch -----------------------------------------------------------------------------------------------

ShardState::ShardState(const Tensor& memory, int64_t rows) {
  Workspace workspace(memory, 0);
  row_index = workspace.allocate<int32_t>(2 * rows + 1);
  local = workspace.allocate<int32_t>(rows);
  no_overflow = workspace.allocate<int>(padded_rows(rows) / sm90::kTileM);
}

int64_t ShardState::bytes(int64_t rows) {
  return Workspace::bytes_for({row_index_bytes(rows), rows * int64_t{sizeof(int32_t)},
                               padded_rows(rows) / sm90::kTileM * int64_t{sizeof(int)}});
}

Batch shard_batch(const Tensor& input, const Tensor& weight, bool need_grad_input, bool need_grad_weight,
                  std::optional<double> softcap, double temperature, bool with_metrics) {
  Batch batch = batch_of(input, weight, need_grad_input, need_grad_weight, with_metrics, temperature);
  batch.terms.transform.softcap = static_cast<float>(softcap.value_or(0.0));
  return batch;
}

void gather_shard(Batch& batch, const ShardState& state, int64_t vocab_start, const Tensor& target_logit,
                  const Tensor& rows) {
  const int64_t count = batch.rows(), ignore_index = batch.problem.targets.ignore_index;
  batch.problem.rows = count;
  index_valid_rows(batch, state.row_index);
  valid_rows::with_targets(batch.problem.targets, [&](auto* targets) {
    local_targets<<<valid_rows::blocks_of(count), kRowThreads, 0, batch.stream>>>(
        targets, ignore_index, vocab_start, static_cast<int>(batch.vocab()), count, state.local);
  });
  check_launch(kOp);
  batch.problem.targets = {state.local, true, ignore_index};
  const LinearCePlan whole{{{0, count, 1}}, 0, 0, 0, 0};
  ChunkBuffers buffers{};
  buffers.input = memory_of<Element16>(rows);
  buffers.target_logit = memory_of<float>(target_logit);
  buffers.overflow = state.no_overflow;
  Chunk(batch, whole, 0, whole.chunks[0], buffers, {}, nullptr).gather();
}

// --- a chunk -----------------------------------------------------------------------------------------------

void ShardChunk::exponentials(const ShardState& state) const {
  const NvtxRange range("exponentials");
  clear_class_one_hot();
  const int tiles = static_cast<int>(padded_rows(chunk_.rows) / sm90::kTileM);
  claim_first_rows<<<blocks_of(std::max<int64_t>(chunk_.rows, tiles), kRowThreads), kRowThreads, 0,
                     batch_.stream>>>(rows(), chunk_index(), state.local, first_row_of_class(),
                                      buffers_.overflow, tiles);
  check_launch(kOp);
  exponentials_of_gathered();
}

void ShardChunk::write_sums(int64_t vocab_start, float* sums) const {
  const ShardSums found{.chunk = rows(),
                        .target_logit = buffers_.target_logit,
                        .sums = buffers_.tile_sums,
                        .columns = static_cast<int>(batch_.sums_per_row()),
                        .overflow = buffers_.overflow,
                        .recomputed = buffers_.scale,
                        .metrics = buffers_.metrics,
                        .vocab_start = static_cast<int>(vocab_start),
                        .out = sums};
  write_shard_sums<<<blocks_of(chunk_.rows, kRowThreads / 32), kRowThreads, 0, batch_.stream>>>(found);
  check_launch(kOp);
}

void ShardChunk::apply_rule(const ShardState& state, const Tensor& sums, int64_t rank, bool gradient) const {
  const NvtxRange range("apply_rule");
  const bool metrics = batch_.with_metrics;
  const int numbers = metrics ? kRankNumbersWithMetrics : kRankNumbers;
  require(sums.dim() == 3 && sums.size(1) == numbers && sums.size(2) == chunk_.rows && sums.is_contiguous(),
          kOp, ": the sums of the ranks have shape ", shape_text(sums), ", expected (ranks, ", numbers, ", ",
          chunk_.rows, "), contiguous");
  require(0 <= rank && rank < sums.size(0), kOp, ": rank is ", rank, ", expected one of ", sums.size(0));
  const RankSums of_ranks{static_cast<const float*>(sums.const_data_ptr()), static_cast<int>(sums.size(0)),
                          static_cast<int>(rank), static_cast<int>(chunk_.rows), numbers};
  Rule<ShardOf<__nv_bfloat16>> rule{this->rule<__nv_bfloat16>(gradient), of_ranks, state.local,
                                    static_cast<int>(batch_.panels())};
  rule.columns = 0;  // the sums of the ranks replace the tile sums
  rule.metrics = {};
  const auto kernel = metrics ? lm_head::apply_rule<ShardOf<__nv_bfloat16>, true>
                              : lm_head::apply_rule<ShardOf<__nv_bfloat16>, false>;
  kernel<<<static_cast<unsigned>(chunk_.rows), kRowThreads, 0, batch_.stream>>>(rule);
  check_launch(kOp);
}

void ShardChunk::grad_input(float* sum) const {
  const NvtxRange range("grad_input");
  with_gradient_tiles<sm90::kGradInputWidths>(
      batch_.hidden(), batch_.vocab(), [&](auto partial_tiles, auto columns) {
        const FloatGradInputEpilogue<__nv_bfloat16, partial_tiles.value, columns.value> epilogue{
            {this->grad_input_of<__nv_bfloat16>()}, sum};
        launch_grad_input(maps_of(matrix_map(batch_.weight, sm90::StageOf<decltype(epilogue)>::kBoxRowsB)),
                          epilogue, batch_.device, batch_.stream);
      });
}

// --- a step ------------------------------------------------------------------------------------------------

int64_t ShardStep::workspace_bytes(const Batch& batch, const PlannedChunk& chunk) {
  return Workspace::bytes_for({class_one_hot_bytes(batch), batch.panels() * int64_t{sizeof(int)},
                               ChunkBuffers::bytes(batch, chunk, false),
                               chunk.rows * int64_t{sizeof(KeptRow)},
                               chunk.rows * int64_t{sizeof(EntropyTerm)}});
}

ShardStep::ShardStep(const char* op, const StepArguments& a)
    : guard(op, a.input.get_device_index()),
      batch(shard_batch(a.input, a.weight, a.need_grad_input || a.keep, a.grad_weight.numel() > 0 || a.keep,
                        a.softcap, a.temperature, a.with_metrics)),
      state(a.state, batch.rows()),
      plan(LinearCePlan::decode(a.plan)),
      index(static_cast<size_t>(a.index)),
      planned(plan.chunks.at(index)) {
  batch.row_index = state.index(batch.rows());
  batch.problem.rows = batch.rows();
  Workspace memory(a.workspace, 0);
  grad_weight = {
      memory_of<Element16>(a.grad_weight), static_cast<unsigned char*>(a.panel_workspace.mutable_data_ptr()),
      memory.allocate<OneHot>(batch.panels() * sm90::kPanel), memory.allocate<int>(batch.panels())};
  buffers = ChunkBuffers::allocate(batch, planned,
                                   memory_of<Element16>(a.rows) + planned.first * batch.hidden(), memory);
  references = buffers.target_logit;
  buffers.target_logit = memory_of<float>(a.target_logit) + planned.first;
  kept_rows = memory.allocate<KeptRow>(planned.rows);
  entropy_terms = memory.allocate<EntropyTerm>(planned.rows);
}

}  // namespace liger::lm_head
