// Times and compares the kernels for the logits GEMM of the sm_90a engine: gemm.cuh, with its epilogue after the mainloop,
// gemm_overlapped.cuh, with pieces of 16 or 8 columns during the next one, and gemm_pingpong.cuh, with a tile per
// warpgroup; also with a softcap, a bias, entropy and argmax, or sums of squares. Without torch; from the root of the repository, for a machine that has only the driver:
//
//   nvcc -std=c++20 -O3 -gencode arch=compute_90a,code=sm_90a --expt-relaxed-constexpr -Icsrc -cudart static
//     benchmarks/kernels/logits_gemm.cu -o logits_gemm && ./logits_gemm logits_gemm.json
//
// Variants take turns; the first one of each kind is that of gemm.cuh, whose time is 1. Exits with 1 if results differ by a
// single bit.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <string>
#include <vector>

#include "gemm_program.cuh"
#include "linear_ce/sm90/exponentials_pieces.cuh"
#include "linear_ce/sm90/exponentials_pingpong.cuh"

namespace {

constexpr int kRounds = 11;

CUtensorMap matrix_map(const Bf16* memory, int64_t rows, int64_t columns, int box_rows) {
  return map_of(memory, columns, rows, 1, columns, rows * columns, box_rows, CU_TENSOR_MAP_SWIZZLE_128B);
}

// Uniform in [-scale, scale).
__global__ void fill(Bf16* out, int64_t count, float scale, uint32_t seed) {
  const int64_t stride = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += stride) {
    uint32_t h = static_cast<uint32_t>(i) * 0x9e3779b9u + seed;
    h = (h ^ h >> 16) * 0x85ebca6bu;
    h = (h ^ h >> 13) * 0xc2b2ae35u;
    out[i] = __float2bfloat16((static_cast<float>((h ^ h >> 16) >> 8) * 0x1p-23f - 1.0f) * scale);
  }
}
// Uniform in [-scale, scale), then zeros.
__global__ void fill_bias(float* out, int count, int padded, float scale) {
  for (int i = threadIdx.x; i < padded; i += blockDim.x) {
    const uint32_t h = (static_cast<uint32_t>(i) + 77u) * 0x9e3779b9u;
    out[i] = i < count ? (static_cast<float>((h ^ h >> 16) >> 8) * 0x1p-23f - 1.0f) * scale : 0.0f;
  }
}
// One block per row: the logit of one class.
__global__ void references(const Bf16* x, const Bf16* w, int hidden, int vocab, LogitTransform transform,
                           float* out) {
  __shared__ float scratch[32];
  const int64_t row = blockIdx.x, column = (row * 7919) % vocab;
  float sum = 0.0f;
  for (int i = threadIdx.x; i < hidden; i += blockDim.x)
    sum += __bfloat162float(x[row * hidden + i]) * __bfloat162float(w[column * hidden + i]);
  sum = block_reduce<Sum>(sum, scratch);
  if (transform.bias != nullptr && isfinite(transform.bias[column])) sum += transform.bias[column];
  if (threadIdx.x == 0) out[row] = transform.cap(sum);
}
// In float64, of each row (a block): the sum of its exponentials, and that of what is stored, times the derivatives.
__global__ void exact_sums(const Bf16* x, const Bf16* w, int hidden, int vocab, LogitTransform transform,
                           const float* reference, double* sums, double* stored) {
  __shared__ double total[2];
  if (threadIdx.x < 2) total[threadIdx.x] = 0.0;
  __syncthreads();
  const int64_t row = blockIdx.x;
  double sum = 0.0, product = 0.0;
  for (int64_t v = threadIdx.x; v < vocab; v += blockDim.x) {
    double z = 0.0;
    for (int i = 0; i < hidden; ++i)
      z += double{__bfloat162float(x[row * hidden + i])} * double{__bfloat162float(w[v * hidden + i])};
    if (transform.bias != nullptr) z += transform.bias[v];
    const double t = transform.softcap == 0.0f ? 0.0 : tanh(z / transform.softcap);
    if (transform.softcap != 0.0f) z = transform.softcap * t;
    const double e = exp(z - reference[row]);
    sum += e, product += e * (1.0 - t * t);
  }
  atomicAdd(&total[0], sum), atomicAdd(&total[1], product);
  __syncthreads();
  if (threadIdx.x == 0) sums[row] = total[0], stored[row] = total[1];
}
__global__ void stored_sums(Panels panels, int vocab, double* out) {
  __shared__ double total;
  if (threadIdx.x == 0) total = 0.0;
  __syncthreads();
  double sum = 0.0;
  for (int v = threadIdx.x; v < vocab; v += blockDim.x)
    sum += __bfloat162float(*panels.at(static_cast<int>(blockIdx.x), v));
  atomicAdd(&total, sum);
  __syncthreads();
  if (threadIdx.x == 0) out[blockIdx.x] = total;
}
// Pairs of elements that differ in the rows [0, rows) of two sets of panels.
__global__ void count_differences(Panels a, Panels b, int rows, int panels, unsigned long long* count) {
  unsigned long long found = 0;
  const int64_t words = int64_t{panels} * rows * (sm90::kPanel / 2), stride = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < words; i += stride) {
    const int word = static_cast<int>(i % (sm90::kPanel / 2)),
              row = static_cast<int>(i / (sm90::kPanel / 2) % rows);
    const int panel = static_cast<int>(i / (sm90::kPanel / 2) / rows);
    const auto at = [&](const Panels& p) {
      return reinterpret_cast<const uint32_t*>(p.row_at(row, panel * sm90::kPanel))[word];
    };
    found += at(a) != at(b);
  }
  if (found != 0) atomicAdd(count, found);
}

// What one of the two kernels writes.
struct Results {
  Panels panels;
  int64_t elements[2];  // of each buffer
  float* tile_sums;     // (rows, columns)
  int columns;
  RowMetrics metrics;
  int* overflow;
};

// What is computed beside exponentials and their sums.
struct Kind {
  const char* name;
  bool bias, softcap, metrics, squares;
};
struct Problem {
  int rows, count, hidden, vocab, rows_in_first;  // rows of the chunk, of which `count` are valid
  int panels() const { return sm90::panels(vocab); }
  int padded() const { return round_up(rows, sm90::kCluster * sm90::kTileM); }
};

Results results_of(const Problem& p, int tile_columns) {
  Results r{};
  r.columns = ceil_div(p.vocab, tile_columns);
  const int rows[2] = {p.rows_in_first, std::max(p.padded() - p.rows_in_first, sm90::kTileM)};
  for (int i = 0; i < 2; ++i) {
    r.panels.stride[i] = int64_t{rows[i]} * sm90::kPanel;
    r.elements[i] = r.panels.stride[i] * p.panels();
    r.panels.memory[i] = allocate<Bf16>(r.elements[i]);
  }
  r.panels.rows_in_first = p.rows_in_first;
  r.tile_sums = allocate<float>(int64_t{p.rows} * r.columns);
  r.metrics = {allocate<float>(2 * int64_t{p.rows} * r.columns), allocate<unsigned long long>(p.rows)};
  r.overflow = allocate<int>(p.padded() / sm90::kTileM);
  return r;
}
void clear(const Problem& p, const Results& r) {
  // NaN, so that what is not written differs.
  CHECK(cudaMemset(r.panels.memory[0], 0xff, r.elements[0] * 2));
  CHECK(cudaMemset(r.panels.memory[1], 0xff, r.elements[1] * 2));
  CHECK(cudaMemset(r.tile_sums, 0xff, int64_t{p.rows} * r.columns * 4));
  CHECK(cudaMemset(r.metrics.entropy_sums, 0xff, 2 * int64_t{p.rows} * r.columns * 4));
  CHECK(cudaMemset(r.metrics.best_keys, 0, int64_t{p.rows} * 8));
  CHECK(cudaMemset(r.overflow, 0, p.padded() / sm90::kTileM * 4));
}
void free_results(const Results& r) {
  for (void* memory : {static_cast<void*>(r.panels.memory[0]), static_cast<void*>(r.panels.memory[1]),
                       static_cast<void*>(r.tile_sums), static_cast<void*>(r.metrics.entropy_sums),
                       static_cast<void*>(r.metrics.best_keys), static_cast<void*>(r.overflow)}) {
    CHECK(cudaFree(memory));
  }
}

struct Inputs {
  Bf16 *x, *w;
  float* reference;
  int* count;
  LogitTransform transform;
};
Inputs inputs_of(const Problem& p, const Kind& kind, float softcap, bool masked) {
  const int padded = round_up(p.vocab, sm90::kTileN);
  Inputs in{allocate<Bf16>(int64_t{p.rows} * p.hidden), allocate<Bf16>(int64_t{p.vocab} * p.hidden),
            allocate<float>(p.padded()), allocate<int>(1)};
  if (kind.bias) {
    float* const bias = allocate<float>(padded);
    fill_bias<<<1, 1024>>>(bias, p.vocab, padded, 2.0f);
    const float low = -std::numeric_limits<float>::infinity();
    if (masked) CHECK(cudaMemcpy(bias + p.vocab / 3, &low, sizeof(low), cudaMemcpyHostToDevice));
    in.transform.bias = bias;
  }
  if (kind.softcap) in.transform.softcap = softcap;
  CHECK(cudaMemset(in.reference, 0, p.padded() * 4));
  fill<<<1024, 256>>>(in.x, int64_t{p.rows} * p.hidden, 1.0f, 1);
  // Logits have a standard deviation of 2.
  fill<<<1024, 256>>>(in.w, int64_t{p.vocab} * p.hidden, 6.0f / std::sqrt(static_cast<float>(p.hidden)), 2);
  references<<<p.rows, 128>>>(in.x, in.w, p.hidden, p.vocab, in.transform, in.reference);
  CHECK(cudaMemcpy(in.count, &p.count, sizeof(int), cudaMemcpyHostToDevice));
  CHECK(cudaDeviceSynchronize());
  return in;
}
void free_inputs(const Inputs& in) {
  for (void* memory : {static_cast<void*>(in.x), static_cast<void*>(in.w), static_cast<void*>(in.reference),
                       static_cast<void*>(in.count)}) {
    CHECK(cudaFree(memory));
  }
  if (in.transform.bias != nullptr) CHECK(cudaFree(const_cast<float*>(in.transform.bias)));
}

template <class Epilogue>
void run_kernel(const Problem& p, const Inputs& in, const Results& r, Phase phase) {
  const CUtensorMap x = matrix_map(in.x, p.rows, p.hidden, sm90::kBox);
  Epilogue e{};
  e.chunk = {in.count, 0, p.rows};
  e.vocab = p.vocab, e.hidden = p.hidden;
  e.factor = kLog2e;
  e.reference = in.reference;
  e.tile_sums = r.tile_sums;
  e.out = r.panels;
  e.write = true;
  e.overflow = r.overflow;
  e.phase = phase;
  e.metrics = r.metrics;
  e.transform = in.transform;
  if constexpr (requires { typename Epilogue::Pending; } || requires { Epilogue::kHalves; }) {
    const auto panels = [&](int i, int rows) {
      return map_of(r.panels.memory[i], sm90::kPanel, rows, p.panels(), sm90::kPanel, r.panels.stride[i],
                    sm90::kResultBoxRows, CU_TENSOR_MAP_SWIZZLE_NONE);
    };
    const int in_first = std::min(p.rows, p.rows_in_first);
    const CUtensorMap first = panels(0, in_first);
    const sm90::OverlappedMaps maps{{{x, x}, matrix_map(in.w, p.vocab, p.hidden, sm90::kOverlappedBoxRows)},
                                    {first, in_first < p.rows ? panels(1, p.rows - in_first) : first}};
    if constexpr (requires { Epilogue::kHalves; }) {
      launch(sm90::gemm_kernel_pingpong<Epilogue>, sm90::kPingpongSharedBytes<Epilogue>, maps, e);
    } else {
      launch(sm90::gemm_kernel_overlapped<Epilogue>, sm90::kOverlappedSharedBytes<Epilogue>, maps, e);
    }
  } else {
    launch(sm90::gemm_kernel<Epilogue>, sm90::kSharedBytes,
           sm90::Maps{{x, x}, matrix_map(in.w, p.vocab, p.hidden, sm90::kBox)}, e);
  }
}

struct Variant {
  const char* name;
  int tile_columns;
  bool partial;  // takes a partial last panel
  void (*run)(const Problem&, const Inputs&, const Results&, Phase);
};
// The kernel of gemm.cuh.
template <sm90::LogitsWork kWork, bool kPartialTiles>
Variant wide(const char* name) {
  using Epilogue = ExpEpilogue<Bf16, kWork.metrics, kPartialTiles, kWork.transform(), kWork.squares>;
  return {name, sm90::kTileN, kPartialTiles, run_kernel<Epilogue>};
}
template <sm90::LogitsWork kWork, bool kPartialTiles, int kPieceColumns>
Variant overlapped(const char* name) {
  using Epilogue = OverlappedExpEpilogue<kWork, kPartialTiles, kPieceColumns>;
  return {name, sm90::kOverlappedColumns, kPartialTiles, run_kernel<Epilogue>};
}
template <sm90::LogitsWork kWork, bool kPartialTiles, int kPieceColumns>
Variant pieces(const char* name) {
  using Epilogue = PiecesExpEpilogue<kWork, kPartialTiles, kPieceColumns>;
  return {name, sm90::kPingpongColumns, kPartialTiles, run_kernel<Epilogue>};
}
template <sm90::LogitsWork kWork, bool kPartialTiles>
Variant pingpong(const char* name) {
  using Epilogue = PingpongExpEpilogue<kWork, kPartialTiles>;
  return {name, sm90::kPingpongColumns, kPartialTiles, run_kernel<Epilogue>};
}

// Of each valid row: the sum or the maximum over its tiles.
std::vector<double> over_tiles(const Problem& p, const float* values, int columns, bool maximum) {
  std::vector<float> host(int64_t{p.rows} * columns);
  CHECK(cudaMemcpy(host.data(), values, host.size() * 4, cudaMemcpyDeviceToHost));
  std::vector<double> result(p.count);
  for (int row = 0; row < p.count; ++row) {
    double total = maximum ? -std::numeric_limits<double>::infinity() : 0.0;
    for (int i = 0; i < columns; ++i) {
      const double v = host[int64_t{row} * columns + i];
      if (std::isnan(v)) return {};
      total = maximum ? std::max(total, v) : total + v;
    }
    result[row] = total;
  }
  return result;
}
// The largest relative difference; NaN with NaN in one of them. scale: of sums whose terms have both signs, else no
// elements.
double difference(const std::vector<double>& a, const std::vector<double>& b,
                  const std::vector<double>& scale = {}) {
  if (a.empty() || b.empty()) return std::numeric_limits<double>::infinity();
  double most = 0.0;
  for (size_t i = 0; i < a.size(); ++i) {
    const double d =
        std::abs(a[i] - b[i]) / std::max({std::abs(a[i]), scale.empty() ? 0.0 : scale[i], 1e-30});
    most = d > most || std::isnan(d) ? d : most;
  }
  return most;
}

// Compares what both have written; prints and returns false if it differs. Exponentials of the same arithmetic have the
// same bits: each is a sum over the same k16 steps. Sums have other groups of columns.
bool same(const Problem& p, const Kind& kind, const Inputs& in, const Results& a, const Results& b,
          const Variant& variant, Phase phase, const char* what) {
  CHECK(cudaDeviceSynchronize());
  auto* const count = allocate<unsigned long long>(1);
  CHECK(cudaMemset(count, 0, sizeof(*count)));
  const int rows = phase == Phase::kRecompute ? std::min(p.rows, sm90::kTileM) : p.rows;
  const bool maximum = phase == Phase::kMaxima;
  if (!maximum) count_differences<<<1024, 256>>>(a.panels, b.panels, rows, p.panels(), count);
  unsigned long long differ = 0;
  CHECK(cudaMemcpy(&differ, count, sizeof(differ), cudaMemcpyDeviceToHost));
  CHECK(cudaFree(count));
  double sums = difference(over_tiles(p, a.tile_sums, a.columns, maximum),
                           over_tiles(p, b.tile_sums, b.columns, maximum));
  const auto include = [&](double d) {
    if (!(d <= sums)) sums = d;  // NaN too
  };
  if (kind.metrics && !maximum) {
    include(difference(over_tiles(p, a.metrics.entropy_sums, a.columns, false),
                       over_tiles(p, b.metrics.entropy_sums, b.columns, false),
                       over_tiles(p, a.tile_sums, a.columns, false)));
    if (kind.squares) {
      const auto squares = [&](const Results& r) {
        return over_tiles(p, r.metrics.entropy_sums + int64_t{p.rows} * r.columns, r.columns, false);
      };
      include(difference(squares(a), squares(b)));
    }
    std::vector<unsigned long long> keys[2] = {std::vector<unsigned long long>(p.rows),
                                               std::vector<unsigned long long>(p.rows)};
    for (int i = 0; i < 2; ++i)
      CHECK(cudaMemcpy(keys[i].data(), (i ? b : a).metrics.best_keys, p.rows * 8, cudaMemcpyDeviceToHost));
    if (!std::equal(keys[0].begin(), keys[0].begin() + p.count, keys[1].begin())) differ += 1;
  }
  std::vector<int> flags[2] = {std::vector<int>(p.padded() / sm90::kTileM),
                               std::vector<int>(p.padded() / sm90::kTileM)};
  for (int i = 0; i < 2; ++i)
    CHECK(cudaMemcpy(flags[i].data(), (i ? b : a).overflow, flags[i].size() * 4, cudaMemcpyDeviceToHost));
  const bool good = differ == 0 && sums < (maximum ? 1e-30 : 2e-5) && flags[0] == flags[1];
  if (!good) {
    std::printf(
        "  %s, %s: %s differ: rows %d (%d) hidden %d vocab %d softcap %g: %llu words, sums by %.2e, "
        "overflow %s\n",
        kind.name, variant.name, what, p.rows, p.count, p.hidden, p.vocab, in.transform.softcap, differ, sums,
        flags[0] == flags[1] ? "equal" : "differs");
  }
  return good;
}

// Compares all variants of a kind with the first one.
bool compare(const Problem& p, const Kind& kind, const std::vector<Variant>& variants, float softcap) {
  const Inputs in = inputs_of(p, kind, softcap, !kind.metrics);
  const Results a = results_of(p, sm90::kTileN), b = results_of(p, sm90::kOverlappedColumns),
                wide = results_of(p, sm90::kTileN);
  const bool partial = sm90::has_partial_panel(p.vocab);
  const auto takes = [&](const Variant& v) { return v.partial || !partial; };
  std::vector<float> reference(p.padded());
  CHECK(cudaMemcpy(reference.data(), in.reference, reference.size() * 4, cudaMemcpyDeviceToHost));
  bool good = true;
  const Variant& today = *std::find_if(variants.begin(), variants.end(), takes);
  for (const Variant& variant : variants) {
    if (&variant == &today || !takes(variant)) continue;
    const Results& other = variant.tile_columns == sm90::kTileN ? wide : b;
    const auto both = [&](Phase phase) { today.run(p, in, a, phase), variant.run(p, in, other, phase); };
    clear(p, a), clear(p, other);
    both(Phase::kAll);
    good &= same(p, kind, in, a, other, variant, Phase::kAll, "results");
    // A row whose reference is far below its logits, in the first tile of rows.
    const float low = -100.0f;
    CHECK(cudaMemcpy(in.reference + std::min(5, p.count - 1), &low, 4, cudaMemcpyHostToDevice));
    clear(p, a), clear(p, other);
    both(Phase::kAll);
    CHECK(cudaDeviceSynchronize());
    int flags[2] = {};
    CHECK(cudaMemcpy(&flags[0], a.overflow, 4, cudaMemcpyDeviceToHost));
    CHECK(cudaMemcpy(&flags[1], other.overflow, 4, cudaMemcpyDeviceToHost));
    if (!flags[0] || !flags[1])
      std::printf("  %s, %s: no overflow: %d %d\n", kind.name, variant.name, flags[0], flags[1]),
          good = false;
    // Maxima of all tiles; then exponentials of the first tile of rows alone.
    for (const Results& r : {a, other}) CHECK(cudaMemset(r.overflow, 1, p.padded() / sm90::kTileM * 4));
    both(Phase::kMaxima);
    good &= same(p, kind, in, a, other, variant, Phase::kMaxima, "maxima");
    CHECK(cudaMemcpy(in.reference, reference.data(), reference.size() * 4, cudaMemcpyHostToDevice));
    clear(p, a), clear(p, other);
    for (const Results& r : {a, other}) {
      CHECK(cudaMemset(r.tile_sums, 0, int64_t{p.rows} * r.columns * 4));
      CHECK(cudaMemset(r.metrics.entropy_sums, 0, 2 * int64_t{p.rows} * r.columns * 4));
      CHECK(cudaMemset(r.overflow, 1, 4));
    }
    both(Phase::kRecompute);
    good &= same(p, kind, in, a, other, variant, Phase::kRecompute, "recomputed tiles");
  }
  free_results(a), free_results(b), free_results(wide), free_inputs(in);
  return good;
}

// Errors relative to float64, over rows: of the sums, and of the sums of what is stored.
void print_errors(const Kind& kind, const std::vector<Variant>& variants, float softcap, std::FILE* json) {
  const Problem p{256, 256, 1536, 2048, 256};
  const Inputs in = inputs_of(p, kind, softcap, false);
  double* const sums = allocate<double>(p.rows);
  double* const stored = allocate<double>(p.rows);
  exact_sums<<<p.rows, 256>>>(in.x, in.w, p.hidden, p.vocab, in.transform, in.reference, sums, stored);
  const auto host = [&](const double* values) {
    std::vector<double> result(p.rows);
    CHECK(cudaMemcpy(result.data(), values, p.rows * sizeof(double), cudaMemcpyDeviceToHost));
    return result;
  };
  const std::vector<double> exact = host(sums), exact_stored = host(stored);
  for (const Variant& variant : variants) {
    const Results r = results_of(p, variant.tile_columns);
    clear(p, r);
    variant.run(p, in, r, Phase::kAll);
    stored_sums<<<p.rows, 256>>>(r.panels, p.vocab, stored);
    const std::vector<double> found[2] = {over_tiles(p, r.tile_sums, r.columns, false), host(stored)};
    double rms[2] = {}, largest[2] = {};
    for (int i = 0; i < 2; ++i) {
      const std::vector<double>& right = i ? exact_stored : exact;
      for (int row = 0; row < p.rows; ++row) {
        const double error = std::abs(found[i].at(row) / right[row] - 1.0);
        rms[i] += error * error / p.rows;
        largest[i] = std::max(largest[i], error);
      }
      rms[i] = std::sqrt(rms[i]);
    }
    std::printf("%-18s softcap %4g %-34s sums %.2e (%.2e)  stored %.2e (%.2e)\n", kind.name,
                in.transform.softcap, variant.name, rms[0], largest[0], rms[1], largest[1]);
    std::fprintf(
        json,
        "  {\"kind\": \"%s\", \"softcap\": %g, \"variant\": \"%s\", \"sums_rms\": %.3e, \"sums_max\": %.3e, "
        "\"stored_rms\": %.3e, \"stored_max\": %.3e},\n",
        kind.name, in.transform.softcap, variant.name, rms[0], largest[0], rms[1], largest[1]);
    free_results(r);
  }
  CHECK(cudaFree(sums));
  CHECK(cudaFree(stored));
  free_inputs(in);
}

void time_kind(const Problem& p, const Kind& kind, const std::vector<Variant>& variants, std::FILE* json) {
  const Inputs in = inputs_of(p, kind, 30.0f, false);
  const Results results = results_of(p, sm90::kOverlappedColumns);  // more tiles than with kTileN
  clear(p, results);
  cudaEvent_t from, to;
  CHECK(cudaEventCreate(&from));
  CHECK(cudaEventCreate(&to));
  const int count = static_cast<int>(variants.size());
  std::vector<std::vector<float>> times(count);
  for (int round = -2; round < kRounds; ++round) {
    for (int i = 0; i < count; ++i) {
      // Another one is the first in each round.
      const int v = (round % 2 ? i + round + count : count - 1 - i + round + count) % count;
      CHECK(cudaEventRecord(from));
      variants[v].run(p, in, results, Phase::kAll);
      CHECK(cudaEventRecord(to));
      CHECK(cudaEventSynchronize(to));
      float ms = 0.0f;
      CHECK(cudaEventElapsedTime(&ms, from, to));
      if (round >= 0) times[v].push_back(ms);
    }
  }
  const double flop = 2.0 * p.rows * p.hidden * p.vocab;
  for (std::vector<float>& t : times) std::sort(t.begin(), t.end());
  for (int v = 0; v < count; ++v) {
    const float median = times[v][kRounds / 2], today = times[0][kRounds / 2];
    std::printf("%-18s %5d %7d  %-34s %8.3f ms %5.0f TFLOP/s  %6.3f  (%.3f of the fastest)\n", kind.name,
                p.hidden, p.vocab, variants[v].name, median, flop / median * 1e-9, median / today,
                times[v][0] / times[0][0]);
    std::fprintf(json,
                 "  {\"kind\": \"%s\", \"rows\": %d, \"hidden\": %d, \"vocab\": %d, \"variant\": \"%s\", "
                 "\"median_ms\": %.4f, \"least_ms\": %.4f, \"ratio\": %.4f},\n",
                 kind.name, p.rows, p.hidden, p.vocab, variants[v].name, median, times[v][0], median / today);
  }
  std::fflush(stdout), std::fflush(json);
  CHECK(cudaEventDestroy(from));
  CHECK(cudaEventDestroy(to));
  free_results(results), free_inputs(in);
}

using sm90::LogitsWork;
constexpr LogitsWork kPlain{}, kSoftcap{.softcap = true}, kBias{.bias = true},
    kBoth{.bias = true, .softcap = true}, kMetrics{.metrics = true},
    kSquares{.metrics = true, .squares = true};

struct Group {
  Kind kind;
  std::vector<Variant> variants;
  std::vector<std::pair<int, int>> shapes;
};
// In each group the first variant, and the first one that takes partial panels, are those of gemm.cuh.
std::vector<Group> all_groups() {
  const char* const before = "gemm.cuh";
  return {
      {{"plain", false, false, false, false},
       {wide<kPlain, false>(before), wide<kPlain, true>("gemm.cuh, partial panels"),
        overlapped<kPlain, false, 16>("overlapped"), pieces<kPlain, false, 16>("pieces of 16"),
        pingpong<kPlain, false>("ping-pong"), pingpong<kPlain, true>("ping-pong, partial panels")},
       {{640, 262144},
        {896, 151936},
        {1152, 262144},
        {1536, 151936},
        {2048, 128256},
        {2560, 151936},
        {4096, 151936}}},
      {{"softcap", false, true, false, false},
       {wide<kSoftcap, true>(before), overlapped<kSoftcap, true, 8>("overlapped"),
        pieces<kSoftcap, true, 16>("pieces of 16"), pingpong<kSoftcap, true>("ping-pong")},
       {{2304, 256000}, {3584, 256000}, {1536, 151936}}},
      {{"bias", true, false, false, false},
       {wide<kBias, true>(before), overlapped<kBias, true, 8>("overlapped"),
        pieces<kBias, true, 16>("pieces of 16"), pingpong<kBias, true>("ping-pong")},
       {{2048, 128256}, {4096, 151936}}},
      {{"bias and softcap", true, true, false, false},
       {wide<kBoth, true>(before), pingpong<kBoth, true>("ping-pong")},
       {{2048, 128256}, {4096, 151936}}},
      {{"entropy", false, false, true, false},
       {wide<kMetrics, false>(before), wide<kMetrics, true>("gemm.cuh, partial panels"),
        overlapped<kMetrics, false, 8>("overlapped"), pieces<kMetrics, false, 16>("pieces of 16"),
        pingpong<kMetrics, false>("ping-pong"), pingpong<kMetrics, true>("ping-pong, partial panels")},
       {{1152, 262144}, {2048, 128256}, {4096, 151936}}},
      {{"squares", false, false, true, true},
       {wide<kSquares, false>(before), wide<kSquares, true>("gemm.cuh, partial panels"),
        overlapped<kSquares, false, 8>("overlapped"), pieces<kSquares, false, 8>("pieces of 8"),
        pingpong<kSquares, false>("ping-pong"), pingpong<kSquares, true>("ping-pong, partial panels")},
       {{2048, 128256}, {4096, 151936}}},
  };
}
bool compare_all(const Group& group) {
  bool good = true;
  int cases = 0;
  for (const int hidden : {64, 256, 1024, 1536, 1600}) {
    for (const int tiles : {1, 2, 21, 150}) {
      for (const int more : {0, 8, 64, 136}) {
        if (hidden > 1024 && tiles == 2) continue;
        const float softcap = cases % 2 ? 30.0f : 2.0f;
        const Problem p{700, 650, hidden, sm90::kOverlappedColumns * tiles + more, 256};
        good &= compare(p, group.kind, group.variants, softcap);
        ++cases;
      }
    }
  }
  good &= compare({128, 3, 1536, 128, 128}, group.kind, group.variants, 30.0f) &
          compare({256, 256, 1536, 37, 256}, group.kind, group.variants, 2.0f);
  std::printf("%s: %d sizes %s\n", group.kind.name, cases + 2, good ? "equal" : "DIFFER");
  return good;
}
}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) {
    std::fprintf(stderr, "usage: %s RESULT.json [KIND...]\n", argv[0]);
    return 2;
  }
  std::FILE* const json = std::fopen(argv[1], "w");
  if (json == nullptr) {
    std::perror(argv[1]);
    return 2;
  }
  cudaDeviceProp device{};
  CHECK(cudaGetDeviceProperties(&device, 0));
  std::fprintf(json, "{\"device\": \"%s\", \"kinds\": [\n", device.name);
  bool good = true;
  for (const Group& group : all_groups()) {
    const auto is_name = [&](const char* word) { return std::string(word) == group.kind.name; };
    if (argc > 2 && std::none_of(argv + 2, argv + argc, is_name)) continue;
    const bool equal = compare_all(group);
    good &= equal;
    std::fprintf(json, " {\"kind\": \"%s\", \"equal\": %s, \"errors\": [\n", group.kind.name,
                 equal ? "true" : "false");
    if (group.kind.softcap)
      for (const float softcap : {30.0f, 5.0f}) print_errors(group.kind, group.variants, softcap, json);
    std::fprintf(json, "  {}], \"times\": [\n");
    for (const auto& [hidden, vocab] : group.shapes)
      time_kind({8192, 8192, hidden, vocab, 8192}, group.kind, group.variants, json);
    std::fprintf(json, "  {}]},\n");
    std::fflush(stdout), std::fflush(json);
  }
  std::fprintf(json, " {}]}\n");
  std::fclose(json);
  return good ? 0 : 1;
}
