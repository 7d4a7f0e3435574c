// Times the logits GEMM of the sm_90a engine with its epilogue behind the mainloop of the next tile (gemm_overlapped.cuh)
// and without (gemm.cuh), in turns, and compares their results. Without torch; from the root of the repository:
//
//   nvcc -std=c++20 -O3 -gencode arch=compute_90a,code=sm_90a --expt-relaxed-constexpr -DLIGER_EXPERIMENTAL=1 -Icsrc
//     benchmarks/kernels/logits_gemm.cu -o /tmp/logits_gemm && /tmp/logits_gemm
//
// Variants: -DLIGER_OVERLAPPED_PIECES=1..4 (16 columns each, per k-block), -DLIGER_OVERLAPPED_STAGES=4 or 5, -DMETRICS=1,
// -DSOFTCAP=30.0f. A time ratio below 1 means that the overlapped kernel is faster. Exits with 1 if results differ.
#include <cudaTypedefs.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <vector>

#include "linear_ce/sm90/exponentials_overlapped.cuh"

#ifndef METRICS
#define METRICS 0
#endif
#ifndef SOFTCAP
#define SOFTCAP 0.0f
#endif

namespace {

using namespace liger;
using namespace liger::linear_ce;
using Bf16 = __nv_bfloat16;

constexpr bool kTransform = SOFTCAP != 0.0f;
constexpr int kRounds = 15;

void check(cudaError_t status, int line) {
  if (status == cudaSuccess) return;
  std::fprintf(stderr, "line %d: %s\n", line, cudaGetErrorString(status));
  std::exit(1);
}
#define CHECK(call) check(call, __LINE__)

template <typename T>
T* allocate(int64_t count) {
  void* memory = nullptr;
  CHECK(cudaMalloc(&memory, count * sizeof(T)));
  return static_cast<T*>(memory);
}

CUtensorMap map_of(const Bf16* memory, int64_t columns, int64_t rows, int64_t panels, int64_t row_stride,
                   int64_t panel_stride, int box_rows, CUtensorMapSwizzle swizzle) {
  static const auto encode = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult result{};
    CHECK(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault,
                                           &result));
    return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(function);
  }();
  const cuuint64_t sizes[3] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows),
                               static_cast<cuuint64_t>(panels)};
  const cuuint64_t strides[2] = {static_cast<cuuint64_t>(row_stride) * 2,
                                 static_cast<cuuint64_t>(panel_stride) * 2};
  const cuuint32_t box[3] = {sm90::kBox, static_cast<cuuint32_t>(box_rows), 1}, steps[3] = {1, 1, 1};
  CUtensorMap map;
  const CUresult status = encode(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3, const_cast<Bf16*>(memory), sizes,
                                 strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle,
                                 CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (status != CUDA_SUCCESS) {
    std::fprintf(stderr, "cuTensorMapEncodeTiled failed with %d\n", static_cast<int>(status));
    std::exit(1);
  }
  return map;
}
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
// One block per row: the logit of one class.
__global__ void references(const Bf16* x, const Bf16* w, int hidden, int vocab, float* out) {
  __shared__ float scratch[32];
  const int64_t row = blockIdx.x, column = (row * 7919) % vocab;
  float sum = 0.0f;
  for (int i = threadIdx.x; i < hidden; i += blockDim.x)
    sum += __bfloat162float(x[row * hidden + i]) * __bfloat162float(w[column * hidden + i]);
  sum = block_reduce<Sum>(sum, scratch);
  if (threadIdx.x == 0) out[row] = SOFTCAP != 0.0f ? SOFTCAP * tanhf(sum / SOFTCAP) : sum;
}
// Words that differ in the rows [0, rows) of two sets of panels.
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
  float* tile_sums;     // (rows, columns), with metrics twice
  int columns;
  RowMetrics metrics;
  int* overflow;
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
  r.metrics = {allocate<float>(int64_t{p.rows} * r.columns), allocate<unsigned long long>(p.rows)};
  r.overflow = allocate<int>(p.padded() / sm90::kTileM);
  return r;
}
void clear(const Problem& p, const Results& r) {
  // NaN, so that what is not written differs.
  CHECK(cudaMemset(r.panels.memory[0], 0xff, r.elements[0] * 2));
  CHECK(cudaMemset(r.panels.memory[1], 0xff, r.elements[1] * 2));
  CHECK(cudaMemset(r.tile_sums, 0xff, int64_t{p.rows} * r.columns * 4));
  CHECK(cudaMemset(r.metrics.entropy_sums, 0xff, int64_t{p.rows} * r.columns * 4));
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
};
Inputs inputs_of(const Problem& p) {
  const Inputs in{allocate<Bf16>(int64_t{p.rows} * p.hidden), allocate<Bf16>(int64_t{p.vocab} * p.hidden),
                  allocate<float>(p.padded()), allocate<int>(1)};
  CHECK(cudaMemset(in.reference, 0, p.padded() * 4));
  fill<<<1024, 256>>>(in.x, int64_t{p.rows} * p.hidden, 1.0f, 1);
  // Logits have a standard deviation of 2.
  fill<<<1024, 256>>>(in.w, int64_t{p.vocab} * p.hidden, 6.0f / std::sqrt(static_cast<float>(p.hidden)), 2);
  references<<<p.rows, 128>>>(in.x, in.w, p.hidden, p.vocab, in.reference);
  CHECK(cudaMemcpy(in.count, &p.count, sizeof(int), cudaMemcpyHostToDevice));
  CHECK(cudaDeviceSynchronize());
  return in;
}
void free_inputs(const Inputs& in) {
  for (void* memory : {static_cast<void*>(in.x), static_cast<void*>(in.w), static_cast<void*>(in.reference),
                       static_cast<void*>(in.count)}) {
    CHECK(cudaFree(memory));
  }
}

template <typename Maps, class Epilogue>
void launch(void (*kernel)(Maps, Epilogue), int shared_bytes, const Maps& maps, const Epilogue& epilogue) {
  static const int clusters = [&] {
    CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes));
    return 0;
  }();
  (void)clusters;
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = sm90::kCluster;
  attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
  cudaLaunchConfig_t config{};
  config.blockDim = dim3(sm90::kThreads);
  config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
  config.attrs = &attribute;
  config.numAttrs = 1;
  static const int resident = [&] {
    int sms = 0, active = 0;
    CHECK(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 0));
    config.gridDim = dim3(static_cast<unsigned>(sms));
    CHECK(cudaOccupancyMaxActiveClusters(&active, kernel, &config));
    return active;
  }();
  config.gridDim = dim3(static_cast<unsigned>(resident * sm90::kCluster));
  CHECK(cudaLaunchKernelEx(&config, kernel, maps, epilogue));
}

template <bool kPartialTiles>
struct Kernels {
  using Before = ExpEpilogue<Bf16, METRICS, kPartialTiles, kTransform>;
  using Overlapped = OverlappedExpEpilogue<METRICS, kPartialTiles, kTransform>;

  const Problem& p;
  const Inputs& in;

  Before epilogue(const Results& r, Phase phase) const {
    Before e{};
    set(e, r, phase);
    return e;
  }
  template <class Epilogue>
  void set(Epilogue& e, const Results& r, Phase phase) const {
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
    e.transform.softcap = SOFTCAP;
  }
  void before(const Results& r, Phase phase) const {
    const CUtensorMap x = matrix_map(in.x, p.rows, p.hidden, sm90::kBox);
    Before e{};
    set(e, r, phase);
    launch(sm90::gemm_kernel<Before>, sm90::kSharedBytes,
           sm90::Maps{{x, x}, matrix_map(in.w, p.vocab, p.hidden, sm90::kBox)}, e);
  }
  void overlapped(const Results& r, Phase phase) const {
    const CUtensorMap x = matrix_map(in.x, p.rows, p.hidden, sm90::kBox);
    const auto panels = [&](int i, int rows) {
      return map_of(r.panels.memory[i], sm90::kPanel, rows, p.panels(), sm90::kPanel, r.panels.stride[i],
                    sm90::kResultBoxRows, CU_TENSOR_MAP_SWIZZLE_NONE);
    };
    const int in_first = std::min(p.rows, p.rows_in_first);
    const CUtensorMap first = panels(0, in_first);
    Overlapped e{};
    set(e, r, phase);
    launch(sm90::gemm_kernel_overlapped<Overlapped>, sm90::kOverlappedSharedBytes,
           sm90::OverlappedMaps{{{x, x}, matrix_map(in.w, p.vocab, p.hidden, sm90::kOverlappedBoxRows)},
                                {first, in_first < p.rows ? panels(1, p.rows - in_first) : first}},
           e);
  }
};

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

// Compares what both have written; prints and returns false if it differs. Exponentials must have the same bits: each
// is a sum over the same k16 steps. Sums have other groups of columns.
bool same(const Problem& p, const Results& a, const Results& b, Phase phase, const char* what) {
  CHECK(cudaDeviceSynchronize());
  auto* const count = allocate<unsigned long long>(1);
  CHECK(cudaMemset(count, 0, sizeof(*count)));
  const int rows = phase == Phase::kRecompute ? std::min(p.rows, sm90::kTileM) : p.rows;
  if (phase != Phase::kMaxima) count_differences<<<1024, 256>>>(a.panels, b.panels, rows, p.panels(), count);
  unsigned long long differ = 0;
  CHECK(cudaMemcpy(&differ, count, sizeof(differ), cudaMemcpyDeviceToHost));
  CHECK(cudaFree(count));
  const bool maximum = phase == Phase::kMaxima;
  double sums = difference(over_tiles(p, a.tile_sums, a.columns, maximum),
                           over_tiles(p, b.tile_sums, b.columns, maximum));
  if (METRICS && !maximum) {
    const double entropies = difference(over_tiles(p, a.metrics.entropy_sums, a.columns, false),
                                        over_tiles(p, b.metrics.entropy_sums, b.columns, false),
                                        over_tiles(p, a.tile_sums, a.columns, false));
    if (!(entropies <= sums)) sums = entropies;  // NaN too
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
  const bool good = differ == 0 && sums < (maximum ? 1e-30 : 1e-5) && flags[0] == flags[1];
  if (!good) {
    std::printf("  %s differ: rows %d (%d) hidden %d vocab %d: %llu words, sums by %.2e, overflow %s\n", what,
                p.rows, p.count, p.hidden, p.vocab, differ, sums, flags[0] == flags[1] ? "equal" : "differs");
  }
  return good;
}

template <bool kPartialTiles>
bool run(const Problem& p, bool timed) {
  const Inputs in = inputs_of(p);
  const Results a = results_of(p, sm90::kTileN), b = results_of(p, sm90::kOverlappedColumns);
  const Kernels<kPartialTiles> kernels{p, in};
  clear(p, a), clear(p, b);
  kernels.before(a, Phase::kAll), kernels.overlapped(b, Phase::kAll);
  bool good = same(p, a, b, Phase::kAll, "results");
  if (timed && good) {
    cudaEvent_t from, to;
    CHECK(cudaEventCreate(&from));
    CHECK(cudaEventCreate(&to));
    std::vector<float> times[2];
    for (int i = -2; i < kRounds; ++i) {
      for (int which = 0; which < 2; ++which) {
        const int kernel = which ^ (i & 1);  // the order alternates, too
        CHECK(cudaEventRecord(from));
        kernel == 0 ? kernels.before(a, Phase::kAll) : kernels.overlapped(b, Phase::kAll);
        CHECK(cudaEventRecord(to));
        CHECK(cudaEventSynchronize(to));
        float ms = 0.0f;
        CHECK(cudaEventElapsedTime(&ms, from, to));
        if (i >= 0) times[kernel].push_back(ms);
      }
    }
    float median[2];
    for (int i = 0; i < 2; ++i) {
      std::sort(times[i].begin(), times[i].end());
      median[i] = times[i][kRounds / 2];
    }
    const double flop = 2.0 * p.rows * p.hidden * p.vocab;
    std::printf("%6d %7d | %8.3f ms %6.0f TFLOP/s | %8.3f ms %6.0f TFLOP/s | %6.3f  (%.3f of the fastest)\n",
                p.hidden, p.vocab, median[0], flop / median[0] * 1e-9, median[1], flop / median[1] * 1e-9,
                median[1] / median[0], times[1][0] / times[0][0]);
    good = same(p, a, b, Phase::kAll, "results after the timing");
    CHECK(cudaEventDestroy(from));
    CHECK(cudaEventDestroy(to));
  }
  if (!timed) {
    // A row whose reference is far below its logits, in the first tile of rows.
    const float low = -100.0f;
    CHECK(cudaMemcpy(in.reference + std::min(5, p.count - 1), &low, 4, cudaMemcpyHostToDevice));
    clear(p, a), clear(p, b);
    kernels.before(a, Phase::kAll), kernels.overlapped(b, Phase::kAll);
    CHECK(cudaDeviceSynchronize());
    int flags[2] = {};
    CHECK(cudaMemcpy(&flags[0], a.overflow, 4, cudaMemcpyDeviceToHost));
    CHECK(cudaMemcpy(&flags[1], b.overflow, 4, cudaMemcpyDeviceToHost));
    if (!flags[0] || !flags[1]) std::printf("  no overflow: %d %d\n", flags[0], flags[1]), good = false;
    // Maxima of all tiles; then exponentials of the first tile of rows alone.
    for (const Results& r : {a, b}) CHECK(cudaMemset(r.overflow, 1, p.padded() / sm90::kTileM * 4));
    kernels.before(a, Phase::kMaxima), kernels.overlapped(b, Phase::kMaxima);
    good &= same(p, a, b, Phase::kMaxima, "maxima");
    CHECK(cudaMemset(in.reference, 0, p.padded() * 4));
    clear(p, a), clear(p, b);
    for (const Results& r : {a, b}) {
      CHECK(cudaMemset(r.tile_sums, 0, int64_t{p.rows} * r.columns * 4));
      CHECK(cudaMemset(r.metrics.entropy_sums, 0, int64_t{p.rows} * r.columns * 4));
      CHECK(cudaMemset(r.overflow, 1, 4));
    }
    kernels.before(a, Phase::kRecompute), kernels.overlapped(b, Phase::kRecompute);
    good &= same(p, a, b, Phase::kRecompute, "recomputed tiles");
  }
  free_results(a), free_results(b), free_inputs(in);
  return good;
}

bool run(const Problem& p, bool timed) {
  // As in Chunk::exponentials().
  return sm90::has_partial_tiles(p.hidden, p.vocab) || kTransform ? run<true>(p, timed)
                                                                  : run<false>(p, timed);
}

}  // namespace

int main() {
  bool good = true;
  std::printf("pieces per k-block %d, stages %d, metrics %d, softcap %g\n",
              OverlappedExpEpilogue<METRICS, true, kTransform>::kPiecesPerKBlock, sm90::kOverlappedStages,
              METRICS, SOFTCAP);
  int cases = 0;
  for (const int hidden : {64, 128, 192, 256, 320, 384, 640, 1024}) {
    for (const int tiles : {1, 2, 20, 21, 300}) {
      for (const int more : {0, 8, 64, 128, 136}) {
        good &= run({700, 650, hidden, sm90::kOverlappedColumns * tiles + more, 256}, false);
        ++cases;
      }
    }
  }
  good &= run({128, 3, 256, 128, 128}, false) & run({256, 256, 256, 37, 256}, false);
  std::printf("%d sizes compared: %s\n", cases + 2, good ? "equal" : "DIFFERENT");
  std::printf("hidden   vocab |      before             |      overlapped         |  ratio\n");
  constexpr int kSizes[][2] = {{640, 262144},  {896, 151936},  {1152, 262144}, {2048, 128256},
                               {2560, 151936}, {2880, 201088}, {4096, 128256}};
  for (const auto& [hidden, vocab] : kSizes) good &= run({4096, 4096, hidden, vocab, 4096}, true);
  return good ? 0 : 1;
}
