// SPDX-License-Identifier: BSD-3-Clause

// Every kernel of csrc/experts/sm90 on the emulated machine, vs. sums in float64.
#include "machine.h"

namespace liger::experts {
// Sized for the ring and its alignment.
extern thread_local unsigned char shared_memory[];
}  // namespace liger::experts

#include "experts/sm90/epilogues.cuh"

namespace liger::experts {

thread_local unsigned char
    shared_memory[kGroupedSharedBytes<GradProductEpilogue<__nv_bfloat16, true, false, true, true>>];

namespace {

using T = __nv_bfloat16;
#ifdef LIGER_MANY_EXPERTS
constexpr int kHidden = 24, kIntermediate = 16, kTokens = 50, kSentinels = 9;
#else
constexpr int kHidden = 136, kIntermediate = 104, kTokens = 50, kSentinels = 9;
#endif
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
int failures = 0;

std::mt19937 random_bits{7};
struct Matrix {
  int64_t rows, columns, count;
  std::vector<T> data;
  Matrix(int64_t rows, int64_t columns, int64_t count = 1)
      : rows(rows), columns(columns), count(count), data(static_cast<size_t>(rows * columns * count)) {
    std::normal_distribution<float> normal;
    for (T& value : data) value.bits = static_cast<uint16_t>(lm_head::rounded(normal(random_bits)));
  }
  double at(int64_t row, int64_t column, int64_t matrix = 0) const {
    return lm_head::low_of<T>(data[static_cast<size_t>((matrix * rows + row) * columns + column)].bits);
  }
  void fill(int64_t first, float value) {
    for (size_t i = static_cast<size_t>(first * columns); i < data.size(); ++i)
      data[i].bits = static_cast<uint16_t>(lm_head::rounded(value));
  }
  void make_positive() {
    for (T& value : data) value.bits &= 0x7fff;
  }
  CUtensorMap map(int box_rows) const {
    return {reinterpret_cast<const uint16_t*>(data.data()), columns, rows, count, box_rows};
  }
};

// rows[indices]
Matrix gathered(const Matrix& rows, const std::vector<int>& indices) {
  Matrix result(static_cast<int64_t>(indices.size()), rows.columns);
  for (size_t i = 0; i < indices.size(); ++i)
    std::copy_n(rows.data.begin() + indices[i] * rows.columns, rows.columns,
                result.data.begin() + static_cast<int64_t>(i) * rows.columns);
  return result;
}

struct Routing {
  std::vector<int> ends;
  int slots = 0;
  std::vector<int> tokens;
  explicit Routing(const std::vector<int>& counts) {
    for (const int count : counts) ends.push_back(slots += count);
    for (int i = 0; i < slots + kSentinels + 1; ++i)
      tokens.push_back(static_cast<int>(random_bits() % kTokens));
  }
  int rows() const { return static_cast<int>(tokens.size()); }
  int experts() const { return static_cast<int>(ends.size()); }
  int begin(int e) const { return e > 0 ? ends[static_cast<size_t>(e - 1)] : 0; }
  int end(int e) const { return ends[static_cast<size_t>(e)]; }
  Groups groups(int columns, int width, int depth, int step = kColumns, int half = kHalfColumns) const {
    return {
        ends.data(), experts(), ceil_div(columns, width), ceil_div(depth, kTileK), ceil_div(kHidden, kRows),
        step,        half};
  }
};

void check(const char* name, double found, double expected, double scale) {
  if (std::abs(found - expected) <= scale * 0.02 + std::abs(expected) * 0.01 || found == expected) return;
  if (std::isnan(found) && std::isnan(expected)) return;
  if (++failures < 20) std::printf("%s: %g, expected %g\n", name, found, expected);
}

double activated(double gate, double up, const Gate& form) {
  gate = std::min<double>(gate, form.limit), up = std::clamp<double>(up, -form.limit, form.limit);
  return gate / (1 + std::exp(-gate * (form.linear + form.cubic * gate * gate))) * (up + form.offset);
}

template <class Epilogue>
void run_kernel(int clusters, const GroupedMaps& maps, const Epilogue& epilogue) {
  run(clusters, [&] { grouped_gemm_kernel(maps, epilogue); });
}

template <bool kInterleaved, bool kIsSilu, bool kGathers>
void test_gate_up(const Routing& routing, int clusters, const Gate& gate, bool keep) {
  const Matrix x(kTokens, kHidden), bias(routing.experts(), 2 * kIntermediate);
  const Matrix weight(kInterleaved ? kHidden : 2 * kIntermediate, kInterleaved ? 2 * kIntermediate : kHidden,
                      routing.experts());
  Matrix gate_up(routing.rows(), 2 * kIntermediate), product(routing.rows(), kIntermediate);
  const Matrix rows = gathered(x, routing.tokens);
  const GateUpEpilogue<T, kInterleaved, kInterleaved, kIsSilu, kGathers> epilogue{
      routing.groups(kIntermediate, kHalfColumns, kHidden, kInterleaved ? kColumns : kHalfColumns,
                     kInterleaved ? kHalfColumns : kIntermediate),
      {x.data.data(), kHidden, {routing.tokens.data(), false}},
      gate,
      bias.data.data(),
      keep ? gate_up.data.data() : nullptr,
      product.data.data(),
      kIntermediate};
  run_kernel(clusters, {rows.map(kBox), weight.map(kInterleaved ? kHalfK : kHalfColumns)}, epilogue);
  for (int e = 0; e < routing.experts(); ++e) {
    for (int row = routing.begin(e); row < routing.end(e); ++row) {
      std::vector<double> sums(2 * kIntermediate);
      for (int c = 0; c < 2 * kIntermediate; ++c) {
        sums[c] = bias.at(e, c);
        for (int k = 0; k < kHidden; ++k)
          sums[c] += x.at(routing.tokens[row], k) * (kInterleaved ? weight.at(k, c, e) : weight.at(c, k, e));
        if (keep) check("gate and up", gate_up.at(row, c), sums[c], 1);
      }
      for (int c = 0; c < kIntermediate; ++c)
        check("product", product.at(row, c),
              kInterleaved ? activated(sums[2 * c], sums[2 * c + 1], gate)
                           : activated(sums[c], sums[kIntermediate + c], gate),
              1);
    }
  }
}

template <bool kBMn>
void test_rows(const Routing& routing, int clusters, bool weighs) {
  constexpr int kDepth = kIntermediate;
  const Matrix rows(routing.rows(), kDepth), bias(routing.experts(), kHidden);
  const Matrix weight(kBMn ? kDepth : kHidden, kBMn ? kHidden : kDepth, routing.experts());
  Matrix out(routing.rows(), kHidden);
  std::vector<float> weights;
  for (int i = 0; i < routing.rows(); ++i) weights.push_back(static_cast<float>(random_bits() % 100) / 50);
  const RowsEpilogue<T, kBMn> epilogue{routing.groups(kHidden, kColumns, kDepth),
                                       weighs ? bias.data.data() : nullptr, weighs ? weights.data() : nullptr,
                                       out.data.data(), kHidden};
  run_kernel(clusters, {rows.map(kBox), weight.map(kBMn ? kHalfK : kHalfColumns)}, epilogue);
  for (int e = 0; e < routing.experts(); ++e)
    for (int row = routing.begin(e); row < routing.end(e); ++row)
      for (int c = 0; c < kHidden; ++c) {
        double sum = weighs ? bias.at(e, c) : 0;
        for (int k = 0; k < kDepth; ++k)
          sum += rows.at(row, k) * (kBMn ? weight.at(k, c, e) : weight.at(c, k, e));
        check("rows", out.at(row, c), weighs ? sum * weights[row] : sum, 1);
      }
}

// infinite: so are gradients of the product of every other token. All other factors are positive: sums are
// infinite, not NaN.
template <bool kInterleaved, bool kIsSilu, bool kGathers>
void test_grad_product(const Routing& routing, int clusters, const Gate& gate, bool infinite = false) {
  constexpr int kWide = 2 * kIntermediate + 16;  // two tiles
  constexpr bool kBMn = !kInterleaved;
  Matrix grad_y(kTokens, kHidden), weight(kBMn ? kHidden : kWide, kBMn ? kWide : kHidden, routing.experts());
  Matrix before(routing.rows(), 2 * kWide);
  if (infinite) {
    weight.make_positive(), before.make_positive();
    for (int token = 0; token < kTokens; token += 2) grad_y.data[token * kHidden + 5].bits = 0x7f80;
  }
  Matrix gate_up = before, product(routing.rows(), kWide);
  std::vector<float> weights, sums(static_cast<size_t>(2 * routing.rows()));
  for (int i = 0; i < routing.rows(); ++i) weights.push_back(static_cast<float>(random_bits() % 100) / 50);
  const Matrix rows = gathered(grad_y, routing.tokens);
  const GradProductEpilogue<T, kBMn, kInterleaved, kIsSilu, kGathers> epilogue{
      routing.groups(kWide, kColumns, kHidden),
      {grad_y.data.data(), kHidden, {routing.tokens.data(), false}},
      gate,
      weights.data(),
      gate_up.data.data(),
      product.data.data(),
      sums.data(),
      routing.rows(),
      kWide};
  run_kernel(clusters, {rows.map(kBox), weight.map(kBMn ? kHalfK : kHalfColumns)}, epilogue);
  for (int e = 0; e < routing.experts(); ++e)
    for (int row = routing.begin(e); row < routing.end(e); ++row) {
      double total = 0, size = 0;
      for (int c = 0; c < kWide; ++c) {
        double grad = 0;
        for (int k = 0; k < kHidden; ++k)
          grad += grad_y.at(routing.tokens[row], k) * (kBMn ? weight.at(k, c, e) : weight.at(c, k, e));
        const int at_gate = kInterleaved ? 2 * c : c, at_up = kInterleaved ? 2 * c + 1 : kWide + c;
        const double g = before.at(row, at_gate), u = before.at(row, at_up), step = 1e-6;
        const double value = activated(g, u, gate), w = weights[row];
        total += value * grad, size += std::abs(value * grad);
        check("weighted product", product.at(row, c), w * value, 1);
        const double of_gate = (activated(g + step, u, gate) - activated(g - step, u, gate)) / (2 * step);
        const double of_up = (activated(g, u + step, gate) - activated(g, u - step, gate)) / (2 * step);
        check("gradient of gate", gate_up.at(row, at_gate), w * grad * of_gate, 10);
        check("gradient of up", gate_up.at(row, at_up), w * grad * of_up, 10);
      }
      check("sums", sums[row] + sums[routing.rows() + row], total, 1e-3 * size);
    }
}

template <bool kTransposed, bool kGathers, int kSharing>
void test_grad_matrix(const Routing& routing, int clusters) {
  constexpr int kWide = 2 * kIntermediate;
  const Matrix a(kTokens, kHidden);
  Matrix b(routing.rows(), kWide),
      rows = gathered(a, routing.tokens),
      out(kTransposed ? kWide : kHidden, kTransposed ? kHidden : kWide, routing.experts());
  out.fill(0, kNan);
  b.fill(routing.slots, kNan), rows.fill(routing.slots, kNan);  // rows of sentinels
  const Routing& r = routing;
  const GradMatrixEpilogue<T, kTransposed, kGathers, kSharing> epilogue{
      r.groups(kWide, kColumns, 0),
      {kGathers ? a.data.data() : rows.data.data(), kHidden, {r.tokens.data(), false}},
      b.data.data(),
      out.data.data(),
      kWide};
  run_kernel(clusters, {rows.map(kTileK), b.map(kHalfK)}, epilogue);
  for (int e = 0; e < r.experts(); ++e)
    for (int m = 0; m < kHidden; ++m)
      for (int n = 0; n < kWide; ++n) {
        double sum = 0;
        for (int row = r.begin(e); row < r.end(e); ++row) sum += a.at(r.tokens[row], m) * b.at(row, n);
        check("gradient of a matrix", kTransposed ? out.at(n, m, e) : out.at(m, n, e), sum, 1);
      }
}

template <bool kGathers>
void test_both(const Routing& routing, int clusters) {
  const float none = std::numeric_limits<float>::infinity();
  const Gate silu{1, 0, 0, none}, gpt_oss{1.702f, 0, 1, 1.503f}, gelu{1.5957691f, 0.0713548f, 0, none};
  test_gate_up<false, true, kGathers>(routing, clusters, silu, true);
  test_gate_up<false, false, kGathers>(routing, clusters, gelu, false);
  test_gate_up<true, false, kGathers>(routing, clusters, gpt_oss, true);
  test_grad_product<false, true, kGathers>(routing, clusters, silu);
  test_grad_product<false, false, kGathers>(routing, clusters, gelu);
  test_grad_product<true, false, kGathers>(routing, clusters, gpt_oss);
  test_grad_product<false, true, kGathers>(routing, clusters, silu, true);
  test_grad_product<true, false, kGathers>(routing, clusters, gpt_oss, true);
}

void test_all(const std::vector<int>& counts, int clusters) {
  const Routing routing(counts);
  test_both<true>(routing, clusters);
  test_both<false>(routing, clusters);
  test_rows<false>(routing, clusters, true);
  test_rows<true>(routing, clusters, false);
  test_grad_matrix<false, true, 2>(routing, clusters);
  test_grad_matrix<true, true, 2>(routing, clusters);
  test_grad_matrix<false, true, 4>(routing, clusters);
  test_grad_matrix<true, true, 4>(routing, clusters);
  test_grad_matrix<false, false, 1>(routing, clusters);
  test_grad_matrix<true, false, 1>(routing, clusters);
}

}  // namespace
}  // namespace liger::experts

int main() {
  using liger::experts::test_all;
#ifdef LIGER_MANY_EXPERTS
  std::vector<int> counts;
  for (int e = 0; e < 1023; ++e) counts.push_back(e % 4 == 2 ? 1 + e % 3 : 0);
  test_all(counts, 3);
#else
  test_all({0, 129, 1, 0, 300, 64, 193}, 2);
  test_all({1, 1, 1, 1, 1}, 1);
  test_all({0, 0, 530}, 1);
  test_all({0, 0}, 1);
#endif
  std::printf("%d wrong\n", liger::experts::failures);
  return liger::experts::failures > 0;
}
