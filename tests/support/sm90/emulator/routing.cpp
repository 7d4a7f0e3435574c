// SPDX-License-Identifier: BSD-3-Clause

// The sort of csrc/experts/routing.cuh on the emulated machine, vs. std::stable_sort.
#include "machine.h"

#include "experts/routing.cuh"

namespace liger::experts {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
int failures = 0;
std::mt19937 random_bits{7};

template <typename T>
void check(const char* name, size_t at, T found, T expected) {
  if (found == expected || (found != found && expected != expected)) return;
  if (++failures < 20) std::printf("%s[%zu]: %g, expected %g\n", name, at, double(found), double(expected));
}

template <typename Index>
void test(int tokens, int choices, int experts, int chunk, const std::function<long long()>& draw,
          bool weighs) {
  const size_t count = size_t(tokens) * choices;
  std::vector<Index> indices(count);
  std::vector<float> weights(count);
  for (size_t i = 0; i < count; ++i)
    indices[i] = static_cast<Index>(draw()), weights[i] = static_cast<float>(i + 1);
  const int chunks = static_cast<int>((count + chunk - 1) / chunk);
  std::vector<int> counts(size_t(chunks) * (experts + 1)), ends(experts);
  std::vector<long long> order(count), row_tokens(count + 1, -1), row_experts(count + 1, -1), inverse(count);
  std::vector<float> row_weights(count + 1, -1);
  const Slots slots{indices.data(), sizeof(Index) == 8, static_cast<int>(count), choices, experts, chunk};
  const SortedSlots out{ends.data(),        order.data(),   row_tokens.data(),
                        row_experts.data(), inverse.data(), weighs ? row_weights.data() : nullptr};
  const auto launch = [&](const std::function<void()>& kernel) {
    run({chunks, 1}, kRouteThreads, /*backwards=*/false, kernel);
  };
  launch([&] { count_slots(slots, counts.data()); });
  launch([&] { sort_slots<float>(slots, weights.data(), counts.data(), chunks, out); });

  const auto expert_of = [&](size_t slot) { return std::clamp<long long>(indices[slot], 0, experts); };
  std::vector<size_t> sorted(count);
  for (size_t i = 0; i < count; ++i) sorted[i] = i;
  std::stable_sort(sorted.begin(), sorted.end(),
                   [&](size_t a, size_t b) { return expert_of(a) < expert_of(b); });
  std::vector<int> expected_ends(experts);
  for (size_t row = 0; row < count; ++row) {
    const size_t slot = sorted[row];
    const long long expert = expert_of(slot);
    for (long long e = expert; e < experts; ++e) ++expected_ends[e];
    check<long long>("order", row, order[row], slot);
    check<long long>("tokens", row, row_tokens[row], slot / choices);
    check<long long>("experts", row, row_experts[row], std::min<long long>(expert, experts - 1));
    check<long long>("inverse", slot, inverse[slot], expert < experts ? row : count);
    if (weighs) check("weights", row, row_weights[row], indices[slot] < 0 ? kNan : weights[slot]);
  }
  for (int e = 0; e < experts; ++e) check("ends", e, ends[e], expected_ends[e]);
  check<long long>("tokens", count, row_tokens[count], 0);
  check<long long>("experts", count, row_experts[count], 0);
  check<float>("weights", count, row_weights[count], weighs ? 0 : -1);
}

long long drawn(long long below) {
  return static_cast<long long>(random_bits() % below);
}

}  // namespace
}  // namespace liger::experts

int main() {
  using liger::experts::drawn, liger::experts::test;
  test<long long>(1, 1, 1, 256, [] { return 0; }, true);
  test<long long>(700, 3, 5, 512, [] { return drawn(10) - 1; }, true);
  test<int>(257, 2, 31, 256, [] { return drawn(31); }, false);
  test<long long>(1000, 2, 1024, 256, [] { return drawn(1200); }, true);
  test<int>(300, 4, 255, 512, [] { return 77; }, true);
  test<long long>(200, 3, 300, 256, [] { return 1ll << 40; }, true);
  test<long long>(90, 8, 128, 256, [] { return drawn(2) * 127; }, false);
  std::printf("%d wrong\n", liger::experts::failures);
  return liger::experts::failures > 0;
}
