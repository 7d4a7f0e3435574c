// SPDX-License-Identifier: BSD-3-Clause
#include "lm_head/planner.h"

#include <algorithm>
#include <cstdlib>
#include <stdexcept>

#include "device/integers.h"
#include "host/log.h"

namespace liger {
namespace {

constexpr int64_t kDefaultBudget = int64_t{512} << 20;

// The prefetched GEMM takes at least 0.1 ms on the fastest GPUs: many times the time that the host needs to
// read a number and launch the next kernels. With fewer rows the GEMM would be bound by the bytes of the
// weight.
constexpr int64_t kPrefetchRows = 512;
constexpr double kPrefetchFlops = 8e10;
// Compacting costs four passes over the hidden states of valid rows, 8 H bytes per row at 4 TB/s; a skipped
// row saves 6 H V FLOPs at 700 TFLOP/s. Compacting therefore pays if skipped rows x V >= kRowCost x rows.
constexpr int64_t kRowCost = 256;

// Equal chunks of at most `max_rows` rows: the GEMMs of a short last chunk would run at a fraction of the
// speed.
int64_t equal_chunks(int64_t rows, int64_t max_rows) {
  const int64_t equal = ceil_div(rows, ceil_div(rows, max_rows));
  const int64_t whole_tiles = round_up(equal, kTileRows);
  return whole_tiles <= max_rows ? whole_tiles : equal;
}

int64_t prefetch_rows(const ChunkProblem& p, const ChunkPlan& plan, int64_t first_chunk) {
  const double flops_per_row =
      std::max(2.0 * static_cast<double>(p.hidden) * static_cast<double>(p.vocab), 1.0);
  const double wanted = std::min(kPrefetchFlops / flops_per_row, static_cast<double>(p.rows));
  const int64_t rows = std::max(kPrefetchRows, round_up(static_cast<int64_t>(wanted), kTileRows));
  if (plan.chunks == 1 && 2 * rows > p.rows) return 0;
  return std::min(rows, first_chunk);
}

// Number of rows of the chunk that starts at this row, if its logits follow the rows of grad_input.
int64_t rows_that_fit(const ChunkProblem& p, const ChunkLayout& layout, int64_t first) {
  const int64_t left = p.rows - first;
  const int64_t fit = (layout.elements - first * p.hidden) / (p.hidden + layout.stride);
  if (fit >= left) return left;
  // A tile that is less than half full costs more than it saves.
  const int64_t whole = fit / kTileRows * kTileRows;
  return whole > 0 && fit - whole < kTileRows / 2 ? whole : fit;
}

}  // namespace

int64_t logits_row_bytes(int64_t vocab, int64_t element_size) {
  return round_up(vocab * element_size, 16);
}

void check_chunk_problem(const ChunkProblem& p) {
  if (p.rows < 0 || p.hidden < 0 || p.vocab < 0 || p.element_size <= 0) {
    throw std::runtime_error(
        "plan_chunks: rows, hidden and vocab must not be negative, got rows=" + std::to_string(p.rows) +
        " hidden=" + std::to_string(p.hidden) + " vocab=" + std::to_string(p.vocab));
  }
  if (p.memory_budget <= 0) {
    throw std::runtime_error("memory_budget: expected a positive number of bytes, got " +
                             std::to_string(p.memory_budget));
  }
}

namespace {

ChunkPlan cut_rows(const ChunkProblem& p) {
  if (p.rows == 0 || p.vocab == 0) return {0, 0, 0, 0};

  const int64_t row_bytes = logits_row_bytes(p.vocab, p.element_size);
  // A float32 sum over chunks needs an accumulator in addition to a gradient of 2-byte elements.
  const bool needs_accumulator = p.need_grad_weight && p.exact_accumulation && p.element_size < 4;
  const int64_t accumulator = needs_accumulator ? 4 * p.vocab * p.hidden : 0;

  int64_t chunk = std::max<int64_t>(p.memory_budget / row_bytes, 1);
  if (chunk >= p.rows ||
      (needs_accumulator && p.rows * row_bytes <= std::max(p.memory_budget, accumulator))) {
    // One chunk needs no accumulator. If its logits are not larger than the accumulator, one chunk is also
    // the smaller plan.
    return {p.rows, 1, p.rows * row_bytes, 0};
  }
  if (needs_accumulator) {
    // The final gradient is not written before the last chunk, so its memory can hold the logits until then.
    // If that memory has room for chunks of full speed, a larger budget gains nothing.
    const int64_t rows_in_grad_weight = p.vocab * p.hidden * p.element_size / row_bytes;
    chunk =
        rows_in_grad_weight >= kFullSpeedRows ? rows_in_grad_weight : std::max(chunk, rows_in_grad_weight);
  }
  chunk = equal_chunks(p.rows, chunk);
  return {chunk, ceil_div(p.rows, chunk), chunk * row_bytes, accumulator};
}

}  // namespace

ChunkPlan plan_chunks(const ChunkProblem& p) {
  check_chunk_problem(p);
  const ChunkPlan plan = cut_rows(p);
  if (logs_plans()) {
    log_plan("plan of the generic engine for " + std::to_string(p.rows) + " rows x " +
             std::to_string(p.hidden) + " hidden x " + std::to_string(p.vocab) +
             " classes: " + std::to_string(plan.chunks) + " chunks of " + std::to_string(plan.chunk_rows) +
             " rows, " + std::to_string(plan.logits_bytes) + " bytes of logits, " +
             std::to_string(plan.accumulator_bytes) + " bytes of float32 accumulator");
  }
  return plan;
}

ChunkLayout lay_out_chunks(const ChunkProblem& p, bool need_grad_input, int64_t valid_rows,
                           int64_t leading_rows) {
  ChunkLayout layout{};
  layout.plan = plan_chunks(p);
  const ChunkPlan& plan = layout.plan;
  if (plan.chunks == 0) return layout;

  layout.stride = logits_row_bytes(p.vocab, p.element_size) / p.element_size;
  const int64_t logits = plan.chunk_rows * layout.stride;
  if (plan.accumulator_bytes > 0 && logits <= p.vocab * p.hidden) {
    layout.logits_in = LogitsIn::kGradWeight;
    layout.elements = p.vocab * p.hidden;
  } else if (need_grad_input && plan.chunks > 1 && plan.chunk_rows < kFullSpeedRows &&
             p.hidden * p.element_size % 16 == 0) {
    layout.logits_in = LogitsIn::kGradInput;
    layout.elements = p.rows * p.hidden + logits;
  } else {
    layout.logits_in = LogitsIn::kOwnMemory;
    layout.elements = logits;
  }

  const bool growing = layout.logits_in == LogitsIn::kGradInput;
  layout.prefetch_rows = prefetch_rows(p, plan, growing ? rows_that_fit(p, layout, 0) : plan.chunk_rows);
  // The prefetched rows are compacted: without compaction they are useful only if no row before them is
  // ignored.
  const bool pays =
      (p.rows - valid_rows) * p.vocab >= kRowCost * p.rows || leading_rows < layout.prefetch_rows;
  layout.rows = pays ? valid_rows : p.rows;

  const int64_t equal = layout.rows > 0 ? equal_chunks(layout.rows, plan.chunk_rows) : 0;
  for (int64_t first = 0; first < layout.rows;) {
    const int64_t fitting = growing ? rows_that_fit(p, layout, first) : equal;
    const int64_t rows = std::min(fitting, layout.rows - first);
    layout.chunks.push_back({first, rows, growing ? (first + fitting) * p.hidden : 0});
    first += rows;
  }
  return layout;
}

int64_t default_memory_budget() {
  const char* text = std::getenv("LIGER_MEMORY_BUDGET");
  if (text == nullptr || *text == '\0') return kDefaultBudget;
  char* end = nullptr;
  const long long number = std::strtoll(text, &end, 10);
  int64_t unit = 1;
  switch (*end) {
    case 'K':
    case 'k':
      unit = int64_t{1} << 10;
      ++end;
      break;
    case 'M':
    case 'm':
      unit = int64_t{1} << 20;
      ++end;
      break;
    case 'G':
    case 'g':
      unit = int64_t{1} << 30;
      ++end;
      break;
    default:
      break;
  }
  if (end == text || *end != '\0' || number <= 0 || number > (int64_t{1} << 62) / unit) {
    throw std::runtime_error(
        std::string("LIGER_MEMORY_BUDGET: expected a positive number of bytes, with an ") +
        "optional suffix K, M or G, got '" + text + "'");
  }
  return number * unit;
}

bool wgmma_engine_allowed() {
  const char* const text = std::getenv("LIGER_WGMMA");
  const std::string value = text == nullptr ? "" : text;
  if (value.empty() || value == "1") return true;
  if (value == "0") return false;
  throw std::runtime_error("LIGER_WGMMA: expected 0 or 1, got '" + value + "'");
}

}  // namespace liger
