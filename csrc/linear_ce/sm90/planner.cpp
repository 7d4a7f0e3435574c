#include "linear_ce/sm90/planner.h"

#include <algorithm>

#include "device/integers.h"

namespace liger {
namespace {

constexpr int64_t kTileM = 128, kTileN = 256, kTileK = 64, kPanel = 128;
// With fewer rows the generic engine is faster: in the batch, and in a chunk where it may sum in bf16 (its
// float32 sum needs far more memory).
constexpr int64_t kFewestRows = 256, kFewestRowsPerPass = 1024;
// What a chunk costs beyond its products, as rows whose products take as long (measured, docs/performance):
// launches, and one more pass over the sum, which the products do not hide entirely.
constexpr double kLaunchRows = 4, kPassRows = 60;
// Of each product of a part of a chunk: its launches, and what they lose beside the waves (estimated).
constexpr double kPartRows = 12;
// Float32 logits of a row take so many rows of the gradient's 16 bits.
constexpr int64_t kLinesPerLogits = 2;

// Panels that are being read while the first sums are written. A pair is enough to keep blocks from waiting
// for tiles that begin later; two hide that blocks are not equally fast.
constexpr int64_t kSlack = 4;

// The share of the device's time that the product of the input gradient uses, with the best number of parts.
struct Fill {
  int64_t parts;
  double share;
};
Fill fill(const Sm90Problem& p, int64_t rows) {
  Fill best{1, 0.0};
  const int64_t tiles = ceil_div(rows, 2 * kTileM) * (p.hidden / kTileN);
  // Every part has something to sum: a block of kTileK classes at least.
  const int64_t most = std::min<int64_t>(8, p.vocab / kTileK);
  for (int64_t parts = 1; parts <= most; ++parts) {
    // Parts are summed in float32: a little more memory than a small chunk has anyway, not a lot.
    if (parts > 1 && 4 * parts * rows * p.hidden > p.memory_budget / 8) break;
    const int64_t units = tiles * parts;
    const double used = static_cast<double>(rows) / round_up(rows, 2 * kTileM);
    const double share = used * units / round_up(units, p.clusters) - 0.01 * (parts - 1);
    if (share > best.share + 1e-9) best = {parts, share};
  }
  return best;
}

// Rows whose product would take as long as that of the exponentials of these, if all clusters were always
// busy.
double exponential_rows(const Sm90Problem& p, int64_t rows) {
  const int64_t pairs = ceil_div(rows, 2 * kTileM), columns = ceil_div(p.vocab, kTileN);
  const double waves = static_cast<double>(ceil_div(pairs * columns, p.clusters));
  return waves * p.clusters * 2 * kTileM / columns;
}

int64_t partial_bytes(const Sm90Problem& p, int64_t rows, int64_t parts) {
  return parts > 1 ? 4 * parts * rows * p.hidden : 0;
}

bool sizes_fit(const Sm90Problem& p) {
  return p.rows >= kFewestRows && p.hidden > 0 && p.vocab > 0 && p.hidden % kTileN == 0 &&
         p.vocab % kPanel == 0;
}

}  // namespace

std::optional<Sm90Plan> plan_sm90(const Sm90Problem& p) {
  if (!sizes_fit(p)) return std::nullopt;
  const int64_t panels = p.vocab / kPanel;
  const int64_t host = p.need_grad_weight ? p.hidden : 0, slack = host > 0 ? kSlack : 0;
  // Exponentials, their sums, and the one-hot parts of rows and classes. What is observed are as many sums
  // again, and a key.
  const int64_t beside_exponentials = 4 * ceil_div(p.vocab, kTileN) + 8;
  const int64_t row_bytes = (panels + slack) * kPanel * 2 + (p.observed ? 2 : 1) * beside_exponentials;
  const int64_t budget = p.memory_budget - (p.need_grad_weight ? 8 * p.vocab : 0);
  Sm90Plan plan{};
  plan.slack = slack;

  const auto chunk = [&](int64_t first, int64_t rows) {
    return Sm90Chunk{first, rows, p.need_grad_input ? fill(p, rows).parts : 1};
  };
  // Chunks end between groups, and whole tiles need memory.
  const int64_t unit = p.group_rows == 1 ? kTileM : p.group_rows;
  // All rows at once need no sum over chunks.
  const int64_t beside = std::max<int64_t>(p.rows - host, 0);
  if (beside == 0 || beside * row_bytes <= budget) {
    plan.hosted_rows = std::min(host, p.rows);
    plan.panel_bytes = round_up(beside, kTileM) * kPanel * 2;
    plan.chunks = {chunk(0, p.rows)};
    return plan;
  }

  // A byte for every kTileN sums of a row.
  const int64_t units_bytes = p.need_grad_weight ? kPanel * p.hidden / kTileN : 0;
  const int64_t available = budget - units_bytes * (panels + slack);
  const int64_t fitting = std::max<int64_t>(available, 0) / row_bytes / kTileM * kTileM;
  if (p.group_rows > 1 && fitting < unit) return std::nullopt;
  const int64_t most = std::max(fitting / unit * unit, unit);
  const double pass = !p.need_grad_weight ? 0 : kPassRows;
  const auto cost = [&](int64_t rows) {
    const double input = p.need_grad_input ? rows / fill(p, rows).share : 0.0;
    const double weight = p.need_grad_weight ? rows : 0.0;
    return kLaunchRows + (exponential_rows(p, rows) + weight + input) / 3;
  };

  // A few dozen candidates each: enough to meet whole waves, and the search stays in microseconds.
  const auto step = [&](int64_t span) { return round_up(std::max<int64_t>(span / 64, 1), unit); };
  double best = 1e300;
  int64_t best_first = most, best_rows = most;
  for (int64_t rows = most; rows >= std::max(most / 2, unit); rows -= step(most)) {
    const int64_t parts = p.need_grad_input ? fill(p, rows).parts : 1;
    if (rows > unit && rows * row_bytes + partial_bytes(p, rows, parts) > available) continue;
    const int64_t room = std::min(host + rows, p.rows);
    for (int64_t first = room / unit * unit; first >= std::max(room / 2, unit); first -= step(room)) {
      // The first chunk's input rows lie where later input gradients will, or need memory of their own.
      const bool own_rows = host > 0 && (!p.need_grad_input || 2 * first > p.rows);
      const int64_t beside = std::max(first > host ? first - host : 0, rows);
      if (own_rows && first > unit && beside * row_bytes + 2 * first * p.hidden > available) continue;
      const int64_t chunks = ceil_div(p.rows - first, rows);
      const int64_t equal = chunks > 0 ? round_up(ceil_div(p.rows - first, chunks), unit) : 0;
      const double total = cost(first) + chunks * (pass + (chunks > 0 ? cost(equal) : 0));
      if (total < best - 1e-9) best = total, best_first = first, best_rows = equal;
    }
  }
  if (p.need_grad_weight && !p.exact_accumulation && best_rows < kFewestRowsPerPass) return std::nullopt;
  plan.hosted_rows = std::min(host, best_first);
  plan.units_bytes = units_bytes;
  plan.panel_bytes = std::max(units_bytes + round_up(best_rows, kTileM) * kPanel * 2,
                              round_up(best_first - plan.hosted_rows, kTileM) * kPanel * 2);
  plan.chunks = {chunk(0, best_first)};
  for (int64_t first = best_first; first < p.rows; first += best_rows) {
    plan.chunks.push_back(chunk(first, std::min(best_rows, p.rows - first)));
  }
  return plan;
}

std::optional<Sm90HeadPlan> plan_head_sm90(const Sm90Problem& p, int64_t beside, bool hosted) {
  if (!sizes_fit(p)) return std::nullopt;
  const int64_t row_bytes = p.vocab * 2, units_bytes = p.need_grad_weight ? p.vocab * p.hidden / kTileN : 0;
  // Constants of rows and classes.
  const int64_t budget = p.memory_budget - 8 * std::max(p.vocab, p.rows);
  const double pass = p.need_grad_weight ? kPassRows : 0.0;
  const auto filled = [&](int64_t rows) { return p.need_grad_input ? fill(p, rows) : Fill{1, 1.0}; };
  const auto cost = [&](int64_t rows, int64_t part_rows) {
    const double of_input = p.need_grad_input ? static_cast<double>(rows) / filled(rows).share : 0.0;
    const double of_weight = p.need_grad_weight ? static_cast<double>(rows) : 0.0;
    const int64_t products = beside / kLinesPerLogits * ceil_div(rows, part_rows);
    const double logits =
        beside == 0 ? exponential_rows(p, rows) : products * (kPartRows + exponential_rows(p, part_rows));
    return kLaunchRows + (of_input + of_weight + logits) / 3;
  };
  // Of so many rows in chunks; the last one is as long as what is left.
  const auto cost_of_all = [&](int64_t rows, int64_t chunk_rows, int64_t part_rows) {
    const int64_t chunks = ceil_div(rows, chunk_rows);
    if (chunks == 0) return 0.0;
    const double of_chunk = cost(chunk_rows, part_rows);
    const double last = static_cast<double>(rows - (chunks - 1) * chunk_rows) / chunk_rows;
    return (chunks - 1) * (of_chunk + pass) + last * of_chunk;
  };
  std::optional<Sm90HeadPlan> best;
  double least = 1e300;
  const auto consider = [&](double total, const Sm90HeadPlan& plan) {
    if (total < least - 1e-9) least = total, best = plan;
  };

  // Chunks end between groups.
  const int64_t unit = p.group_rows == 1 ? kTileM : p.group_rows, most = round_up(p.rows, unit);
  for (int64_t rows = unit; rows <= most; rows += unit) {
    const int64_t chunk_rows = std::min(rows, p.rows);
    const int64_t parts = filled(chunk_rows).parts, units = chunk_rows < p.rows ? units_bytes : 0;
    // Parts of the input gradient are summed where the other logits were.
    const int64_t left = budget - units - chunk_rows * row_bytes;
    if (left < 0) break;
    if (left < partial_bytes(p, chunk_rows, parts)) continue;
    int64_t part_rows = chunk_rows;
    if (beside > 0) {
      part_rows = std::min(left / (beside * row_bytes) / kTileM * kTileM, chunk_rows);
      if (part_rows < std::min(kFewestRows, chunk_rows)) break;
      // Parts of one size.
      const int64_t count = ceil_div(chunk_rows, part_rows);
      part_rows = std::min(round_up(ceil_div(chunk_rows, count), kTileM), chunk_rows);
    }
    consider(cost_of_all(p.rows, chunk_rows, part_rows),
             {chunk_rows, parts, chunk_rows, part_rows, parts, units});
  }
  if (!best || !hosted || beside == 0 || !p.need_grad_weight) return best;

  // All rows at once need no sum over chunks.
  const Sm90HeadPlan even = *best;
  const int64_t lent = p.hidden / beside / kTileM * kTileM;
  if (lent < kFewestRows) return best;
  for (int64_t rows = round_up(even.chunk_rows + 1, unit); rows <= most; rows += unit) {
    const int64_t first = std::min(rows, p.rows);
    const int64_t parts = filled(first).parts, units = first < p.rows ? units_bytes : 0;
    const int64_t left = budget - units - first * row_bytes;
    if (left < 0) break;
    if (left < partial_bytes(p, first, parts)) continue;
    const double others = cost_of_all(p.rows - first, even.chunk_rows, even.part_rows);
    consider(cost(first, std::min(first, lent)) + others + (first < p.rows ? pass : 0.0),
             {first, parts, even.chunk_rows, even.part_rows, even.parts, units});
  }
  return best;
}

}  // namespace liger
