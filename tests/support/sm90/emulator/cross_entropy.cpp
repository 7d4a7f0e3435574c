// SPDX-License-Identifier: BSD-3-Clause

// Rows of cross entropy whose kernel finds the denominator itself, on the emulated machine: the bits of the
// kernels before, on and after the rows.
#include "cross_entropy/cross_entropy.cuh"
#include "cross_entropy/rows.cuh"

namespace liger::ce {
namespace {

constexpr int64_t kIgnored = -100;
int failures = 0;
std::mt19937 random_bits{3};

struct Case {
  int64_t rows;
  int vocab, threads;
  bool mean, gradient;
  int ignored;  // of 4 rows
};

template <typename T>
struct Results {
  std::vector<float> loss;
  std::vector<T> gradient;
  float denominator = NAN, sum = NAN;
  explicit Results(const Case& c)
      : loss(static_cast<size_t>(c.rows)), gradient(static_cast<size_t>(c.rows * c.vocab)) {}
};

template <typename T, bool kExtras>
void test(const Case& c) {
  std::normal_distribution<float> normal;
  std::vector<T> logits(static_cast<size_t>(c.rows * c.vocab));
  for (T& value : logits) value = from_float<T>(normal(random_bits));
  std::vector<int64_t> targets(static_cast<size_t>(c.rows));
  for (int64_t& target : targets)
    target = static_cast<int>(random_bits() % 4) < c.ignored ? kIgnored : random_bits() % c.vocab;
  if (c.rows > 4) targets[3] = c.vocab;  // out of range, so not counted

  const auto run = [&](bool in_rows) {
    Results<T> results(c);
    Problem p{};
    p.logits = logits.data();
    p.row_stride = p.gradient_stride = p.vocab = c.vocab;
    p.gradient = c.gradient ? results.gradient.data() : nullptr;
    p.rows = c.rows;
    p.targets = {targets.data(), false, kIgnored};
    p.denominator = &results.denominator;
    p.loss = results.loss.data();
    if (kExtras) p.extras = kSmoothing, p.label_smoothing = 0.1f;
    if (in_rows) {
      p.new_denominator = &results.denominator, p.mean = c.mean;
    } else {
      Preparation before{};
      before.targets = p.targets, before.rows = c.rows, before.vocab = c.vocab, before.mean = c.mean;
      before.denominator = &results.denominator;
      on_machine(prepare<false>, 1, kReduceThreads, 0, nullptr)(before);
    }
    on_machine(rows_streamed<T, kExtras>, static_cast<unsigned>(c.rows), c.threads, 0, nullptr)(p);
    Reduction after{};
    after.targets = p.targets, after.rows = c.rows, after.denominator = p.denominator;
    after.row_loss = p.loss, after.loss = &results.sum;
    on_machine(reduce_rows, 1, kReduceThreads, 0, nullptr)(after);
    return results;
  };
  const auto two = run(true), three = run(false);
  const auto same = [](const auto& a, const auto& b) {
    return std::memcmp(a.data(), b.data(), a.size() * sizeof(a[0])) == 0;
  };
  const bool right = std::memcmp(&two.denominator, &three.denominator, 4) == 0 &&
                     std::memcmp(&two.sum, &three.sum, 4) == 0 && same(two.loss, three.loss) &&
                     same(two.gradient, three.gradient);
  if (!right)
    std::printf("%d x %d, %d threads, mean %d: divided by %g, expected %g\n", static_cast<int>(c.rows),
                c.vocab, c.threads, c.mean, two.denominator, three.denominator);
  failures += !right;
}

}  // namespace
}  // namespace liger::ce

int main() {
  using T = __nv_bfloat16;
  using liger::ce::test;
  test<T, false>({8, 256, 32, true, true, 1});
  test<T, true>({8, 256, 32, true, true, 1});
  test<float, false>({256, 12, 32, true, true, 2});
  test<T, false>({70, 129, 64, true, false, 1});
  test<T, false>({4, 40, 32, true, true, 4});
  test<T, true>({300, 16, 32, false, true, 1});
  test<float, false>({1, 7, 32, true, true, 0});
  std::printf("%d wrong\n", liger::ce::failures);
  return liger::ce::failures > 0;
}
