// SPDX-License-Identifier: BSD-3-Clause

// The planners as ops: Python code that cuts chunks, `liger plan`, and tests call them.
#include <torch/csrc/stable/library.h>

#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "experts/sm90/schedule.h"
#include "lm_head/planner.h"
#include "lm_head/sm90/planner.h"
#include "lm_head/sm90/sizes.h"

namespace liger {
namespace {

void require_at_least(const char* op, const char* name, int64_t value, int64_t minimum) {
  if (value >= minimum) return;
  throw std::runtime_error(std::string(op) + ": " + name + " is " + std::to_string(value) +
                           ", expected at least " + std::to_string(minimum));
}

std::vector<int64_t> plan_chunks_op(int64_t rows, int64_t hidden, int64_t vocab, int64_t element_size,
                                    bool need_grad_weight, bool exact_accumulation,
                                    std::optional<int64_t> memory_budget) {
  const ChunkPlan plan = plan_chunks({rows, hidden, vocab, element_size, need_grad_weight, exact_accumulation,
                                      memory_budget ? *memory_budget : default_memory_budget()});
  return {plan.chunk_rows, plan.chunks, plan.logits_bytes, plan.accumulator_bytes};
}

std::tuple<int64_t, int64_t, int64_t, int64_t, int64_t, std::vector<int64_t>, std::vector<int64_t>>
lay_out_chunks_op(int64_t rows, int64_t hidden, int64_t vocab, int64_t element_size, bool need_grad_input,
                  bool need_grad_weight, bool exact_accumulation, std::optional<int64_t> memory_budget,
                  std::optional<int64_t> valid_rows, std::optional<int64_t> leading_rows) {
  const ChunkLayout layout =
      lay_out_chunks({rows, hidden, vocab, element_size, need_grad_weight, exact_accumulation,
                      memory_budget ? *memory_budget : default_memory_budget()},
                     need_grad_input, valid_rows.value_or(rows), leading_rows.value_or(rows));
  std::vector<int64_t> chunk_rows, chunk_offsets;
  for (const Chunk& chunk : layout.chunks) {
    chunk_rows.push_back(chunk.rows);
    chunk_offsets.push_back(chunk.offset);
  }
  return {static_cast<int64_t>(layout.logits_in),
          layout.stride,
          layout.elements,
          layout.plan.accumulator_bytes,
          layout.prefetch_rows,
          std::move(chunk_rows),
          std::move(chunk_offsets)};
}

template <size_t kCount>
std::string listed(const int (&values)[kCount]) {
  std::string text;
  for (const int value : values) text += (text.empty() ? "" : ",") + std::to_string(value);
  return text;
}

// The result is text ("name=value" or "name=value,value"), so a new constant needs no new schema.
std::vector<std::string> plan_constants_op() {
  const auto field = [](const char* name, int64_t value) {
    return std::string(name) + "=" + std::to_string(value);
  };
  return {field("hidden_unit", sm90::kHiddenUnit),
          field("min_rows", sm90::kMinRows),
          field("max_softcap", sm90::kMaxSoftcap),
          field("full_speed_rows", kFullSpeedRows),
          field("tile_rows", sm90::kTileM),
          field("cluster_rows", sm90::kTileM * sm90::kCluster),
          field("logits_tile", sm90::kPingpongColumns),
          field("panel", sm90::kPanel),
          field("kept_numbers", sm90::kKeptNumbers),
          field("rank_numbers", sm90::kRankNumbers),
          field("rank_numbers_with_metrics", sm90::kRankNumbersWithMetrics),
          field("max_experts", experts::kMaxExperts),
          field("expert_columns", experts::kColumns),
          "grad_input_widths=" + listed(sm90::kGradInputWidths),
          "grad_weight_widths=" + listed(sm90::kGradWeightWidths)};
}

std::tuple<std::vector<int64_t>, std::vector<int64_t>, std::vector<int64_t>, int64_t, int64_t, int64_t,
           int64_t>
plan_chunks_sm90_op(int64_t rows, int64_t hidden, int64_t vocab, bool need_grad_input, bool need_grad_weight,
                    bool exact_accumulation, std::optional<int64_t> memory_budget, int64_t clusters,
                    int64_t group_rows) {
  const int64_t budget = memory_budget ? *memory_budget : default_memory_budget();
  check_chunk_problem({rows, hidden, vocab, 2, need_grad_weight, exact_accumulation, budget});
  require_at_least("plan_chunks_sm90", "clusters", clusters, 1);
  require_at_least("plan_chunks_sm90", "group_rows", group_rows, 1);
  const std::optional<LinearCePlan> plan =
      plan_chunks_sm90({rows, hidden, vocab, need_grad_input, need_grad_weight, exact_accumulation, budget,
                        clusters, group_rows});
  if (!plan) return {};
  std::vector<int64_t> first, count, k_splits;
  for (const PlannedChunk& chunk : plan->chunks) {
    first.push_back(chunk.first);
    count.push_back(chunk.rows);
    k_splits.push_back(chunk.k_splits);
  }
  return {std::move(first),
          std::move(count),
          std::move(k_splits),
          plan->rows_in_grad_weight,
          plan->workspace_panel_bytes,
          plan->scale_bytes,
          plan->panel_offset};
}

std::tuple<int64_t, int64_t, int64_t, int64_t, int64_t, int64_t> plan_linear_backward_sm90_op(
    int64_t rows, int64_t hidden, int64_t vocab, bool need_grad_input, bool need_grad_weight,
    int64_t aux_rows, std::optional<int64_t> memory_budget, int64_t clusters, int64_t group_rows,
    bool aux_in_grad_weight) {
  const int64_t budget = memory_budget ? *memory_budget : default_memory_budget();
  check_chunk_problem({rows, hidden, vocab, 2, need_grad_weight, true, budget});
  require_at_least("plan_linear_backward_sm90", "clusters", clusters, 1);
  require_at_least("plan_linear_backward_sm90", "aux_rows", aux_rows, 0);
  require_at_least("plan_linear_backward_sm90", "group_rows", group_rows, 1);
  const std::optional<LinearBackwardPlan> plan = plan_linear_backward_sm90(
      {rows, hidden, vocab, need_grad_input, need_grad_weight, true, budget, clusters, group_rows}, aux_rows,
      aux_in_grad_weight);
  if (!plan) return {0, 0, 0, 0, 0, 0};
  return {plan->first_rows, plan->first_k_splits, plan->chunk_rows,
          plan->slice_rows, plan->k_splits,       plan->scale_bytes};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(liger, CompositeExplicitAutograd, m) {
  m.impl("default_memory_budget", TORCH_BOX(&default_memory_budget));
  m.impl("plan_chunks", TORCH_BOX(&plan_chunks_op));
  m.impl("lay_out_chunks", TORCH_BOX(&lay_out_chunks_op));
  m.impl("plan_constants", TORCH_BOX(&plan_constants_op));
  m.impl("plan_split_k_sums_sm90", TORCH_BOX(&sm90::split_k_sums));
  m.impl("plan_chunks_sm90", TORCH_BOX(&plan_chunks_sm90_op));
  m.impl("plan_linear_backward_sm90", TORCH_BOX(&plan_linear_backward_sm90_op));
}

}  // namespace liger
