// SPDX-License-Identifier: BSD-3-Clause

// Runs the backwards of layer_norm and rms_norm on the emulated machine, and compares every result with sums
// in float64. The gradients of a single block have the bits of its partial sums after the second launch.
#include "norm/layer_norm_backward.cuh"
#include "norm/rms_norm_backward.cuh"

namespace liger {

thread_local unsigned char shared[1 << 18];

cudaError_t allow_shared_memory(const void*, Carveout) {
  return cudaSuccess;
}

namespace {

constexpr int kSms = 3, kSharedLimit = 227 * 1024;
int failures = 0;
std::mt19937 random_bits{7};

template <typename T>
struct Values {
  std::vector<T> data;
  explicit Values(size_t count) : data(count) {
    std::normal_distribution<float> normal;
    for (T& value : data) value = from_float<T>(normal(random_bits));
  }
  double operator[](int64_t i) const { return to_float(data[static_cast<size_t>(i)]); }
  bool operator==(const Values& other) const {
    return std::memcmp(data.data(), other.data.data(), data.size() * sizeof(T)) == 0;
  }
};

struct Case {
  int64_t rows, hidden;
  int padding;  // elements between rows of x
  bool has_weight, need_x, need_weight, need_bias;
};

void check(bool right, const char* what, const Case& c) {
  if (right || ++failures > 20) return;
  std::printf("%s: %d x %d, padding %d, weight %d, needs %d %d %d\n", what, static_cast<int>(c.rows),
              static_cast<int>(c.hidden), c.padding, c.has_weight, c.need_x, c.need_weight, c.need_bias);
}
template <typename T>
void check_near(const Values<T>& found, int64_t i, double expected, double scale, const char* what,
                const Case& c) {
  const double rounding = sizeof(T) == 2 ? 1.0 / 256 : 0;
  check(std::abs(found[i] - expected) <= 1e-5 * scale + rounding * std::abs(expected), what, c);
}

// What both norms have in common: T of x, W of the parameters.
template <typename T, typename W, bool kIsLayer>
struct Test {
  static constexpr int kParameters = kIsLayer ? 2 : 1;
  static constexpr bool kRounds = !kIsLayer && std::is_same_v<T, W>;  // casting mode "llama"
  using Params = std::conditional_t<kIsLayer, LayerNormBackward, RmsNormBackward>;
  const Case c;
  const int64_t stride = c.hidden + c.padding;
  const bool vectorised = c.hidden % kVec<T> == 0 && stride % kVec<T> == 0;
  const Values<T> x{static_cast<size_t>(c.rows * stride)}, grad_y{static_cast<size_t>(c.rows * c.hidden)};
  const Values<W> weight{static_cast<size_t>(c.hidden)};
  std::vector<float> mean = std::vector<float>(static_cast<size_t>(c.rows)), rstd = mean;
  Values<T> grad_x = grad_y;
  Values<W> grads[2] = {weight, weight};

  explicit Test(const Case& c) : c(c) {
    for (float& value : mean) value = kIsLayer ? static_cast<float>(random_bits() % 100) / 50 - 1 : 0;
    for (float& value : rstd) value = 0.5f + static_cast<float>(random_bits() % 100) / 100;
  }

  // partial: the sums go to a workspace even if there is one block.
  void run(bool partial) {
    Params p{};
    p.grad_y = grad_y.data.data();
    p.x = x.data.data();
    p.weight = c.has_weight ? weight.data.data() : nullptr;
    if constexpr (kIsLayer) p.mean = mean.data();
    p.rstd = rstd.data();
    p.grad_x = c.need_x ? grad_x.data.data() : nullptr;
    p.grads.data[0] = c.need_weight ? grads[0].data.data() : nullptr;
    if constexpr (kIsLayer) p.grads.data[1] = c.need_bias ? grads[1].data.data() : nullptr;
    p.grads.is_float = std::is_same_v<W, float>;
    p.grad_y_rows.stride = p.grad_x_rows.stride = c.hidden;
    p.x_rows.stride = stride;
    p.rows = c.rows, p.hidden = c.hidden;
    p.float_weight = c.has_weight && std::is_same_v<W, float>;
    if constexpr (!kIsLayer) p.round_scaled = kRounds;
    int max_threads = kMaxRowThreads;
    if constexpr (kIsLayer)
      max_threads = has_fast_path(p) ? kLayerNormThreads<T, 4, true> : kLayerNormThreads<T, 4, false>;
    const BackwardPlan plan =
        plan_norm_backward<T>(c.rows, c.hidden, vectorised, 2, max_threads, kSms, kSharedLimit);
    std::vector<float> workspace;
    const auto floats = [&](int64_t count) {
      workspace.assign(static_cast<size_t>(count), NAN);
      return workspace.data();
    };
    const auto launch = [&](const auto& sums) {
      p.grads = sums;
      if constexpr (kIsLayer) {
        launch_layer_norm_backward<T>(p, plan, vectorised, nullptr);
      } else {
        launch_rms_norm_backward<T, Extra::kNone>(p, plan, vectorised, nullptr);
      }
    };
    const ParameterGrads<kParameters> out = p.grads;
    launches = 0;
    launches_backwards = partial;
    if (partial && plan.partials == 1) {
      ParameterGrads<kParameters> sums{{}, kParameters * c.hidden, true};
      for (int k = 0; k < kParameters; ++k)
        if (out.data[k]) sums.data[k] = floats(kParameters * c.hidden) + k * c.hidden;
      launch(sums);
      sum_partials<T>(sums, 1, out, c.hidden, false, nullptr);
      return;
    }
    // As in host.cuh: launch overwrites the gradients it was called with.
    launch_with_sums<T>(p.grads, c.hidden, plan.partials, false, nullptr, launch, floats);
    const bool needs = c.need_weight || (kIsLayer && c.need_bias);
    const int kernels = plan.rows.width == 0 ? c.need_x + needs : 1;
    check(launches == kernels + (needs && plan.partials > 1), "launches", c);
  }

  void compare() {
    std::vector<double> of_weight(static_cast<size_t>(c.hidden)), of_bias = of_weight, size = of_weight;
    for (int64_t row = 0; row < c.rows; ++row) {
      double sum = 0, dot = 0;
      const auto at = [&](int64_t i) { return (x[row * stride + i] - mean[row]) * rstd[row]; };
      for (int64_t i = 0; i < c.hidden; ++i) {
        const double g = grad_y[row * c.hidden + i], w = c.has_weight ? weight[i] : 1.0;
        sum += g * w, dot += g * w * at(i);
        const double scaled =
            kRounds ? round_to<T>(static_cast<float>(x[row * stride + i]) * rstd[row]) : at(i);
        of_weight[i] += g * scaled, of_bias[i] += g, size[i] += std::abs(g) * (1 + std::abs(scaled));
      }
      if (!c.need_x) continue;
      for (int64_t i = 0; i < c.hidden; ++i) {
        const double g = grad_y[row * c.hidden + i], w = c.has_weight ? weight[i] : 1.0;
        const double expected =
            rstd[row] * (g * w - (kIsLayer ? sum : 0) / c.hidden - at(i) * dot / c.hidden);
        check_near(grad_x, row * c.hidden + i, expected, 10, "grad_x", c);
      }
    }
    for (int64_t i = 0; i < c.hidden; ++i) {
      if (c.need_weight) check_near(grads[0], i, of_weight[i], size[i], "grad_weight", c);
      if (kIsLayer && c.need_bias) check_near(grads[1], i, of_bias[i], size[i], "grad_bias", c);
    }
  }
};

template <typename T, typename W, bool kIsLayer>
void test_as(const Case& c) {
  Test<T, W, kIsLayer> test(c);
  test.run(false);
  test.compare();
  const auto grad_x = test.grad_x;
  const auto grad_weight = test.grads[0], grad_bias = test.grads[1];
  if (!c.need_weight && !c.need_bias) return;
  test.run(true);
  check(test.grad_x == grad_x && test.grads[0] == grad_weight && test.grads[1] == grad_bias, "bits", c);
}

template <typename T>
void test(Case c) {
  test_as<T, T, true>(c);
  test_as<T, float, true>(c);
  c.need_weight = c.need_weight && c.has_weight;
  c.need_bias = false;
  test_as<T, T, false>(c);
  test_as<T, float, false>(c);
}

// Shapes of every kernel: rows of one vector per thread, two, four, and of single elements.
template <typename T>
void test_all() {
  constexpr int64_t n = kVec<T>;
  test<T>({8, 32 * n, 0, true, true, true, true});
  test<T>({1, 3 * n, 0, true, true, false, true});
  test<T>({7, 32 * n, 3 * n, false, true, false, true});
  test<T>({5, 129, 0, true, true, true, true});
  test<T>({3, 64, 1, true, false, true, false});
  test<T>({2, 512 * n, 0, true, true, true, true});
  test<T>({1, 1024 * n, 0, true, true, true, false});
  test<T>({1, 352 * n, 0, true, true, true, true});
  test<T>({70, 32 * n, 0, true, true, true, true});
  test<T>({9, 129, 0, true, true, false, false});
}

}  // namespace
}  // namespace liger

int main() {
  liger::test_all<__nv_bfloat16>();
  liger::test_all<float>();
  // Rows that do not fit in a block.
  liger::test<float>({1, 8400, 0, true, true, true, true});
  liger::test<float>({2, 8400, 0, true, false, true, true});
  std::printf("%d wrong\n", liger::failures);
  return liger::failures > 0;
}
