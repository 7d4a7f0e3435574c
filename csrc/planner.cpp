#include "planner.h"

#include <algorithm>
#include <cstdlib>
#include <stdexcept>

namespace liger {
namespace {

constexpr int64_t kDefaultBudget = int64_t{512} << 20;

int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

}  // namespace

int64_t logits_row_bytes(int64_t vocab, int64_t element_size) {
  return ceil_div(vocab * element_size, 16) * 16;
}

ChunkPlan plan_chunks(const ChunkProblem& p) {
  if (p.rows < 0 || p.hidden < 0 || p.vocab < 0 || p.element_size <= 0) {
    throw std::invalid_argument(
        "plan_chunks: rows, hidden and vocab must not be negative, got rows=" + std::to_string(p.rows) +
        " hidden=" + std::to_string(p.hidden) + " vocab=" + std::to_string(p.vocab));
  }
  if (p.memory_budget <= 0) {
    throw std::invalid_argument("memory_budget: expected a positive number of bytes, got " +
                                std::to_string(p.memory_budget));
  }
  if (p.rows == 0 || p.vocab == 0) return {0, 0, 0, 0};

  const int64_t row_bytes = logits_row_bytes(p.vocab, p.element_size);
  // Summing over chunks in float32 needs an accumulator beside a gradient of 2-byte elements.
  const bool needs_accumulator = p.need_grad_weight && p.exact_accumulation && p.element_size < 4;
  const int64_t accumulator = needs_accumulator ? 4 * p.vocab * p.hidden : 0;

  int64_t chunk = std::max<int64_t>(p.memory_budget / row_bytes, 1);
  if (chunk >= p.rows ||
      (needs_accumulator && p.rows * row_bytes <= std::max(p.memory_budget, accumulator))) {
    // One chunk needs no accumulator; where its logits are no larger than that, it is also the smaller plan.
    return {p.rows, 1, p.rows * row_bytes, 0};
  }
  if (needs_accumulator) {
    // The final gradient is not written before the last chunk: until then its memory can hold the logits.
    // Where that is room for chunks of full speed, a budget above it would buy nothing.
    const int64_t hosted = p.vocab * p.hidden * p.element_size / row_bytes;
    chunk = hosted >= kFullSpeedRows ? hosted : std::max(chunk, hosted);
  }
  const int64_t chunks = ceil_div(p.rows, chunk);
  // Equal chunks: a short last one would run its GEMMs at a fraction of the speed.
  int64_t equal = ceil_div(p.rows, chunks);
  const int64_t rounded = ceil_div(equal, kTileRows) * kTileRows;
  if (rounded <= chunk) equal = rounded;
  return {equal, ceil_div(p.rows, equal), equal * row_bytes, accumulator};
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
    throw std::invalid_argument(
        std::string("LIGER_MEMORY_BUDGET: expected a positive number of bytes, with an ") +
        "optional suffix K, M or G, got '" + text + "'");
  }
  return number * unit;
}

}  // namespace liger
