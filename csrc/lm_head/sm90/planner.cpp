// SPDX-License-Identifier: BSD-3-Clause
#include "lm_head/sm90/planner.h"

#include <algorithm>
#include <string>

#include "device/integers.h"
#include "host/log.h"
#include "lm_head/sm90/sizes.h"

namespace liger {
namespace {

using sm90::kHiddenUnit;
using sm90::kMinRows;
using sm90::kPanel;
using sm90::kTileK;
using sm90::kTileM;

// If the generic engine may sum in bf16, it is faster than chunks with fewer rows (its float32 sum needs far
// more memory).
constexpr int64_t kMinRowsPerPass = 1024;
// The cost of a chunk beyond its GEMMs, in rows with GEMMs of the same time (measured, docs/lab):
// launches, and another pass over the accumulated weight gradient, which the GEMMs hide only in part.
constexpr double kLaunchRows = 4, kPassRows = 60;
// The cost of each logits GEMM of a slice, in the same unit: its launches and its tail effect (estimated).
constexpr double kSliceRows = 12;
// A row of float32 logits occupies as much memory as this many 16-bit rows.
constexpr int64_t kRowsPerFloatLogits = 2;
// Number of panels between a panel that is read and the panel that may be written at the same time. Two would
// keep blocks from waiting for tiles that start later; the other two hide differences in the speed of blocks.
constexpr int64_t kPanelOffset = 4;
// Maximum number of splits of the input gradient. Exponentials and split sums together may exceed the budget
// by budget / kExcessShare.
constexpr int64_t kMaxSplits = 24, kExcessShare = 16;
// The cost of each further split, as a fraction of the GEMM's time: its epilogue, and the traffic of the
// float32 sums, which is divided by the number of classes.
constexpr double kSplitEpilogue = 0.001, kSplitTraffic = 900;
// More splits must gain this much in utilisation, relative, to justify the memory of their sums.
constexpr double kMinGain = 0.025;

// Estimated times, in rows of one GEMM at full utilisation.
class CostModel {
 public:
  explicit CostModel(const LinearCeProblem& problem) : p_(problem) {}

  struct SplitK {
    int64_t k_splits;
    double utilisation;  // of the SMs, by the GEMM of the input gradient
  };
  // room: bytes available for the sums.
  SplitK split_k(int64_t rows, int64_t room) const {
    if (!p_.need_grad_input) return {1, 1.0};
    SplitK best{1, 0.0};
    const int64_t row_pairs = ceil_div(rows, 2 * kTileM), width = sm90::grad_input_columns(p_.hidden),
                  columns = sm90::column_tiles(p_.hidden, width);
    const double useful = static_cast<double>(rows) / (2 * kTileM) * p_.hidden / width;
    const double penalty = kSplitEpilogue + kSplitTraffic / static_cast<double>(p_.vocab);
    // Every split sums at least one block of kTileK classes.
    const bool fit = 4 * sm90::split_k_sums(rows, p_.hidden, kMaxSplits) <= room;
    const int64_t max_splits = fit ? std::min(kMaxSplits, ceil_div(p_.vocab, int64_t{kTileK})) : 1;
    // The time with whole waves. The search ends where even this time is too long.
    const double min_time = static_cast<double>(row_pairs * columns) / useful;
    for (int64_t k_splits = 1; k_splits <= max_splits; ++k_splits) {
      const double cost = penalty * static_cast<double>(k_splits - 1);
      const double wanted = best.utilisation * (1.0 + kMinGain);
      if ((min_time + cost) * wanted >= 1.0) break;
      const int64_t jobs = row_pairs * columns * k_splits;
      const double waves = static_cast<double>(ceil_div(jobs, p_.clusters));
      const double time =
          waves * static_cast<double>(p_.clusters) / (useful * static_cast<double>(k_splits)) + cost;
      if (1.0 / time > wanted) best = {k_splits, 1.0 / time};
    }
    return best;
  }

  // The logits GEMM of these rows, with wave quantisation.
  double logits(int64_t rows) const {
    const int64_t row_pairs = ceil_div(rows, 2 * kTileM), columns = sm90::logits_tiles(p_.vocab);
    const double waves = static_cast<double>(ceil_div(row_pairs * columns, p_.clusters));
    return waves * p_.clusters * 2 * kTileM / columns;
  }

  // The cost of a chunk with this cost of its logits.
  double chunk(int64_t rows, double logits, SplitK split) const {
    const double input = p_.need_grad_input ? static_cast<double>(rows) / split.utilisation : 0.0;
    const double weight = p_.need_grad_weight ? static_cast<double>(rows) : 0.0;
    return kLaunchRows + (logits + weight + input) / 3;
  }

  // The cost of another chunk's pass over the accumulated weight gradient.
  double pass() const { return p_.need_grad_weight ? kPassRows : 0.0; }

 private:
  const LinearCeProblem& p_;
};

bool supported(const LinearCeProblem& p) {
  return p.rows >= kMinRows && p.hidden > 0 && p.vocab > 0 && p.hidden % kHiddenUnit == 0;
}

// Chunks are multiples of a tile or of a group.
int64_t granularity(const LinearCeProblem& p) {
  return p.group_rows == 1 ? int64_t{kTileM} : p.group_rows;
}

// One block-scale exponent, a byte, for the elements of a tile in a row of the weight gradient.
int64_t scale_bytes(const LinearCeProblem& p, int64_t classes) {
  return p.need_grad_weight ? classes * sm90::column_tiles(p.hidden, sm90::grad_weight_columns(p.hidden)) : 0;
}

// A plan of fused_linear_ce: sizes, and the costs of its chunks. The budget is for the exponentials of a
// chunk in the panel workspace; sums and other numbers per row, per class and per tile come on top (1 to 2
// %).
class ChunkSearch {
 public:
  explicit ChunkSearch(const LinearCeProblem& problem)
      : p_(problem),
        model_(problem),
        unit_(granularity(problem)),
        row_bytes_(sm90::panels(problem.vocab) * kPanel * 2),
        rows_in_grad_weight_(problem.need_grad_weight ? problem.hidden / kTileM * kTileM : 0) {}

  struct Candidate {
    int64_t first_rows, chunk_rows;  // the last chunk may have fewer
  };

  int64_t rows_in_grad_weight() const { return rows_in_grad_weight_; }
  // Rows of exponentials that fit the budget, in whole tiles.
  int64_t fitting() const { return p_.memory_budget / row_bytes_ / kTileM * kTileM; }
  bool fits_one_chunk() const { return beside_grad_weight(p_.rows) * row_bytes_ <= p_.memory_budget; }
  // Rows of the first chunk that do not fit in the memory of the weight gradient.
  int64_t beside_grad_weight(int64_t first_rows) const {
    return std::max<int64_t>(first_rows - rows_in_grad_weight_, 0);
  }
  CostModel::SplitK split_k(int64_t rows, bool is_first) const {
    const int64_t exponentials = (is_first ? beside_grad_weight(rows) : rows) * row_bytes_;
    // Any 64-bit budget is allowed; without the limit the sum below could overflow.
    const int64_t budget = std::min(p_.memory_budget, int64_t{1} << 62);
    return model_.split_k(rows, budget + budget / kExcessShare - exponentials);
  }

  // Searches the cheapest first chunk and further chunks of up to `max_rows` rows: equal chunks, or full
  // chunks and a rest. A few dozen candidates for each size suffice to reach whole waves, and the search
  // takes microseconds.
  Candidate cheapest(int64_t max_rows) const {
    const auto step = [&](int64_t size) { return round_up(std::max<int64_t>(size / 64, 1), unit_); };
    double min_cost = 1e300;
    Candidate best{max_rows, max_rows};
    for (int64_t rows = max_rows; rows >= std::max(max_rows / 2, unit_); rows -= step(max_rows)) {
      const int64_t room = std::min(rows_in_grad_weight_ + rows, p_.rows);
      for (int64_t first = room / unit_ * unit_; first >= std::max(room / 2, unit_); first -= step(room)) {
        const double of_first = cost(first, true);
        const int64_t left = p_.rows - first, chunks = ceil_div(left, rows);
        const auto consider = [&](int64_t size) {
          if (!has_room_for_rows(first, size)) return;
          double total = of_first;
          if (chunks > 0) {
            const int64_t rest = left - (chunks - 1) * size;
            const double of_rest = cost(rest, false), of_one = rest == size ? of_rest : cost(size, false);
            total += static_cast<double>(chunks) * model_.pass() + static_cast<double>(chunks - 1) * of_one +
                     of_rest;
          }
          if (total < min_cost - 1e-9) min_cost = total, best = {first, size};
        };
        const int64_t equal = chunks > 0 ? round_up(ceil_div(left, chunks), unit_) : 0;
        consider(equal);
        if (chunks > 1 && equal != rows) consider(rows);
      }
    }
    return best;
  }

 private:
  double cost(int64_t rows, bool is_first) const {
    return rows > 0 ? model_.chunk(rows, model_.logits(rows), split_k(rows, is_first)) : 0.0;
  }
  // The gathered rows of the first chunk use the memory of later input gradients, or their own memory.
  bool has_room_for_rows(int64_t first, int64_t chunk_rows) const {
    const bool own_rows = rows_in_grad_weight_ > 0 && (!p_.need_grad_input || 2 * first > p_.rows);
    if (!own_rows || first <= unit_) return true;
    const int64_t exponentials = std::max(beside_grad_weight(first), chunk_rows) * row_bytes_;
    return exponentials + 2 * first * p_.hidden <= p_.memory_budget;
  }

  const LinearCeProblem& p_;
  const CostModel model_;
  const int64_t unit_, row_bytes_, rows_in_grad_weight_;
};

std::optional<LinearCePlan> cut_rows(const LinearCeProblem& p) {
  if (!supported(p)) return std::nullopt;
  const ChunkSearch search(p);
  LinearCePlan plan{};
  plan.panel_offset = p.need_grad_weight && p.hidden >= kTileM ? kPanelOffset : 0;
  const auto chunk = [&](int64_t first, int64_t rows) {
    return PlannedChunk{first, rows, search.split_k(rows, first == 0).k_splits};
  };

  // One chunk needs no accumulation.
  if (search.fits_one_chunk()) {
    plan.rows_in_grad_weight = std::min(search.rows_in_grad_weight(), p.rows);
    plan.workspace_panel_bytes = round_up(search.beside_grad_weight(p.rows), kTileM) * kPanel * 2;
    plan.chunks = {chunk(0, p.rows)};
    return plan;
  }

  const int64_t unit = granularity(p), fitting = search.fitting();
  if (p.group_rows > 1 && fitting < unit) return std::nullopt;
  const ChunkSearch::Candidate best = search.cheapest(std::max(fitting / unit * unit, unit));
  if (p.need_grad_weight && !p.exact_accumulation && best.chunk_rows < kMinRowsPerPass) return std::nullopt;
  plan.rows_in_grad_weight = std::min(search.rows_in_grad_weight(), best.first_rows);
  plan.scale_bytes = scale_bytes(p, kPanel);
  const auto panel_bytes = [](int64_t rows) { return round_up(rows, kTileM) * kPanel * 2; };
  // The block scales of the first chunk overwrite exponentials that were read before, if the exponentials are
  // stored panel_offset panels further; otherwise the scales need their own memory.
  const int64_t first_scale_bytes = plan.rows_in_grad_weight > 0 ? 0 : plan.scale_bytes;
  plan.workspace_panel_bytes =
      std::max(plan.scale_bytes + panel_bytes(best.chunk_rows),
               first_scale_bytes + panel_bytes(best.first_rows - plan.rows_in_grad_weight));
  plan.chunks = {chunk(0, best.first_rows)};
  for (int64_t first = best.first_rows; first < p.rows; first += best.chunk_rows) {
    plan.chunks.push_back(chunk(first, std::min(best.chunk_rows, p.rows - first)));
  }
  return plan;
}

std::string text_of(const LinearCeProblem& p, const LinearCePlan& plan) {
  std::string text = "plan of the wgmma engine for " + std::to_string(p.rows) + " rows x " +
                     std::to_string(p.hidden) + " hidden x " + std::to_string(p.vocab) +
                     " classes: chunks of";
  for (const PlannedChunk& chunk : plan.chunks) {
    text += " " + std::to_string(chunk.rows);
    if (chunk.k_splits > 1) text += " (split-K " + std::to_string(chunk.k_splits) + ")";
  }
  const int64_t panels = sm90::panels(p.vocab) + plan.panel_offset;
  return text + " rows, of which " + std::to_string(plan.rows_in_grad_weight) +
         " in the memory of the weight gradient, " + std::to_string(panels * plan.workspace_panel_bytes) +
         " bytes of panel workspace";
}

}  // namespace

std::optional<LinearCePlan> plan_chunks_sm90(const LinearCeProblem& p) {
  const std::optional<LinearCePlan> plan = cut_rows(p);
  if (plan && logs_plans()) log_plan(text_of(p, *plan));
  return plan;
}

bool takes_sm90(const LinearCeProblem& p) {
  return supported(p);
}

std::optional<LinearCePlan> plan_one_chunk_sm90(const LinearCeProblem& p) {
  if (!supported(p)) return std::nullopt;
  LinearCePlan plan{};
  plan.workspace_panel_bytes = round_up(p.rows, kTileM) * kPanel * 2;
  plan.chunks = {{0, p.rows, CostModel(p).split_k(p.rows, p.memory_budget / kExcessShare).k_splits}};
  if (logs_plans()) log_plan(text_of(p, plan));
  return plan;
}

std::vector<int64_t> LinearCePlan::encode() const {
  std::vector<int64_t> numbers{rows_in_grad_weight, workspace_panel_bytes, scale_bytes, panel_offset};
  for (const PlannedChunk& chunk : chunks) {
    numbers.insert(numbers.end(), {chunk.first, chunk.rows, chunk.k_splits});
  }
  return numbers;
}

LinearCePlan LinearCePlan::decode(const std::vector<int64_t>& numbers) {
  LinearCePlan plan{{}, numbers.at(0), numbers.at(1), numbers.at(2), numbers.at(3)};
  for (size_t i = 4; i < numbers.size(); i += 3) {
    plan.chunks.push_back({numbers.at(i), numbers.at(i + 1), numbers.at(i + 2)});
  }
  return plan;
}

// --- linear_backward ---------------------------------------------------------------------------------------

namespace {

class LinearBackwardPlanner {
 public:
  LinearBackwardPlanner(const LinearCeProblem& problem, int64_t aux_rows)
      : p_(problem),
        aux_rows_(aux_rows),
        model_(problem),
        row_bytes_(problem.vocab * 2),
        // The per-row and per-class buffers are subtracted from the budget.
        budget_(problem.memory_budget - 8 * std::max(problem.vocab, problem.rows)),
        unit_(granularity(problem)),
        max_rows_(round_up(problem.rows, unit_)) {}

  std::optional<LinearBackwardPlan> equal_chunks() {
    for (int64_t size = unit_; size <= max_rows_; size += unit_) {
      const int64_t rows = std::min(size, p_.rows), left = bytes_left(rows);
      if (left < 0) break;
      const int64_t k_splits = split_k(rows).k_splits;
      const int64_t slice = slice_rows(rows, left);
      if (slice == 0) break;
      consider(cost_of_all(p_.rows, rows, slice), {rows, k_splits, rows, slice, k_splits, scales(rows)});
    }
    return best_;
  }

  // Tries a longer first chunk with auxiliary logits in the memory of the weight gradient.
  std::optional<LinearBackwardPlan> longer_first_chunk() {
    const LinearBackwardPlan even = *best_;
    const int64_t slice = p_.hidden / aux_rows_ / kTileM * kTileM;
    if (slice < kMinRows) return best_;
    for (int64_t size = round_up(even.chunk_rows + 1, unit_); size <= max_rows_; size += unit_) {
      const int64_t first = std::min(size, p_.rows);
      if (bytes_left(first) < 0) break;
      const int64_t k_splits = split_k(first).k_splits;
      const double others = cost_of_all(p_.rows - first, even.chunk_rows, even.slice_rows);
      consider(cost(first, std::min(first, slice)) + others + (first < p_.rows ? model_.pass() : 0.0),
               {first, k_splits, even.chunk_rows, even.slice_rows, even.k_splits, scales(first)});
    }
    return best_;
  }

 private:
  // One chunk needs no accumulation.
  int64_t scales(int64_t first_rows) const { return first_rows < p_.rows ? scale_bytes(p_, p_.vocab) : 0; }
  int64_t bytes_left(int64_t rows) const { return budget_ - scales(rows) - rows * row_bytes_; }
  // Its sums reuse the memory of the auxiliary logits.
  CostModel::SplitK split_k(int64_t rows) const { return model_.split_k(rows, bytes_left(rows)); }

  // Rows of equal slices of a chunk; 0 if the remaining memory is too small for a slice.
  int64_t slice_rows(int64_t rows, int64_t left) const {
    if (aux_rows_ == 0) return rows;
    const int64_t slice = std::min(left / (aux_rows_ * row_bytes_) / kTileM * kTileM, rows);
    if (slice < std::min(kMinRows, rows)) return 0;
    return std::min(round_up(ceil_div(rows, ceil_div(rows, slice)), kTileM), rows);
  }

  double cost(int64_t rows, int64_t slice) const {
    const int64_t gemms = aux_rows_ / kRowsPerFloatLogits * ceil_div(rows, slice);
    const double logits = aux_rows_ == 0 ? model_.logits(rows) : gemms * (kSliceRows + model_.logits(slice));
    return model_.chunk(rows, logits, split_k(rows));
  }
  // The cost of rows in equal chunks; the last chunk may be shorter.
  double cost_of_all(int64_t rows, int64_t chunk_rows, int64_t slice) const {
    const int64_t chunks = ceil_div(rows, chunk_rows);
    if (chunks == 0) return 0.0;
    const double chunk = cost(chunk_rows, slice);
    const double last = static_cast<double>(rows - (chunks - 1) * chunk_rows) / chunk_rows;
    return (chunks - 1) * (chunk + model_.pass()) + last * chunk;
  }

  void consider(double cost, const LinearBackwardPlan& plan) {
    if (cost < min_cost_ - 1e-9) min_cost_ = cost, best_ = plan;
  }

  const LinearCeProblem& p_;
  const int64_t aux_rows_;
  const CostModel model_;
  const int64_t row_bytes_, budget_, unit_, max_rows_;
  double min_cost_ = 1e300;
  std::optional<LinearBackwardPlan> best_;
};

}  // namespace

std::optional<LinearBackwardPlan> plan_linear_backward_sm90(const LinearCeProblem& p, int64_t aux_rows,
                                                            bool aux_in_grad_weight) {
  if (!supported(p) || sm90::has_partial_tiles(p.hidden, p.vocab)) return std::nullopt;
  LinearBackwardPlanner planner(p, aux_rows);
  const std::optional<LinearBackwardPlan> equal = planner.equal_chunks();
  const bool longer = aux_in_grad_weight && aux_rows > 0 && p.need_grad_weight;
  const std::optional<LinearBackwardPlan> plan = equal && longer ? planner.longer_first_chunk() : equal;
  if (plan && logs_plans()) {
    log_plan("plan of linear_backward for " + std::to_string(p.rows) + " rows x " + std::to_string(p.hidden) +
             " hidden x " + std::to_string(p.vocab) + " classes: a chunk of " +
             std::to_string(plan->first_rows) + " rows, others of " + std::to_string(plan->chunk_rows) +
             ", in slices of " + std::to_string(plan->slice_rows));
  }
  return plan;
}

}  // namespace liger
