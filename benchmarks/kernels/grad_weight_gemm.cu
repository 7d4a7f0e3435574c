// Times the weight gradient's GEMM of the sm_90a engine with a tile per warpgroup (grad_weight_pingpong.cuh) and with one
// of both (grad_weight.cuh), in turns, and compares the sums over chunks of both with float64. Without torch; from the root
// of the repository:
//
//   nvcc -std=c++20 -O3 -gencode arch=compute_90a,code=sm_90a --expt-relaxed-constexpr -Icsrc
//     benchmarks/kernels/grad_weight_gemm.cu -o /tmp/grad_weight_gemm && /tmp/grad_weight_gemm
//
// A time ratio below 1 means that the ping-pong kernel is faster. Exits with 1 if an error is larger than it should be.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "device/reduce.cuh"
#include "gemm_program.cuh"
#include "linear_ce/sm90/grad_weight_pingpong.cuh"

namespace {

constexpr int kRounds = 11;

struct Problem {
  int rows, count, hidden, vocab, chunks;  // rows of a chunk, of which `count` are valid
  bool in_place;  // the exponentials of the first chunk are in the memory of the gradient
  int panels() const { return sm90::panels(vocab); }
  static constexpr int kPanelOffset = 3;
  int64_t elements() const { return int64_t{panels() + kPanelOffset} * sm90::kPanel * hidden; }
};

// Uniform in [-scale, scale), or in [0, scale).
__device__ float uniform(int64_t i, uint32_t seed, bool positive) {
  uint32_t h = static_cast<uint32_t>(i) * 0x9e3779b9u + seed;
  h = (h ^ h >> 16) * 0x85ebca6bu;
  h = (h ^ h >> 13) * 0xc2b2ae35u;
  const float f = static_cast<float>((h ^ h >> 16) >> 8);
  return positive ? f * 0x1p-24f : f * 0x1p-23f - 1.0f;
}
// Exponentials of panels, whose classes differ by up to 2^20; rows of the input, zero from `count` on.
__global__ void fill_exponentials(Panels out, int rows, int64_t count, uint32_t seed) {
  const int64_t stride = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += stride) {
    const int column = static_cast<int>(i % sm90::kPanel);
    const int row = static_cast<int>(i / sm90::kPanel % rows),
              panel = static_cast<int>(i / sm90::kPanel / rows);
    const int64_t c = int64_t{panel} * sm90::kPanel + column;
    *out.at(row, static_cast<int>(c)) =
        __float2bfloat16(uniform(i, seed, true) * ldexpf(1.0f, -static_cast<int>(c * 7 % 21)));
  }
}
__global__ void fill_input(Bf16* out, int rows, int count, int hidden, uint32_t seed) {
  const int64_t stride = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < int64_t{rows} * hidden; i += stride)
    out[i] = __float2bfloat16(i / hidden < count ? uniform(i, seed, false) : 0.0f);
}
__global__ void fill_one_hots(OneHot* out, int vocab, int count) {
  const int c = blockIdx.x * blockDim.x + threadIdx.x;
  if (c < vocab) out[c] = c % 37 == 5 && count > 0 ? OneHot{0.25f, c % count} : OneHot{0.0f, -1};
}
// One block per sampled class: adds the product of a chunk to float64 sums.
__global__ void add_reference(Panels e, const Bf16* x, const OneHot* one_hot, int count, int hidden,
                              int vocab, int samples, double* sums) {
  const int c = static_cast<int>(int64_t{blockIdx.x} * (vocab - 1) / max(samples - 1, 1));
  for (int i = threadIdx.x; i < hidden; i += blockDim.x) {
    double sum = 0.0;
    for (int r = 0; r < count; ++r)
      sum += double{__bfloat162float(*e.at(r, c))} * __bfloat162float(x[int64_t{r} * hidden + i]);
    if (one_hot[c].index >= 0)
      sum -= double{one_hot[c].amount} * __bfloat162float(x[int64_t{one_hot[c].index} * hidden + i]);
    sums[int64_t{blockIdx.x} * hidden + i] += sum;
  }
}

// The buffers of one of the two kernels.
struct Gradient {
  Bf16* out;
  unsigned char* exponents;
  int64_t exponent_stride;
};
struct Inputs {
  Bf16 *exponentials, *x;
  OneHot* one_hot;
  int *count, *panel_read_counts;
};

template <bool kPartialTiles, int kColumns>
struct Kernels {
  using Before = GradWeightEpilogue<Bf16, kPartialTiles, kColumns>;
  // Its tiles have 192 columns, so it may have partial ones where the other one has none.
  using Pingpong = PingpongGradWeightEpilogue<Bf16, true>;
  using PingpongWhole = PingpongGradWeightEpilogue<Bf16, false>;

  const Problem& p;
  const Inputs& in;

  Panels panels(const Gradient& g, bool first) const {
    Panels e{};
    const bool placed = first && p.in_place;
    e.memory[0] = e.memory[1] =
        placed ? g.out + int64_t{Problem::kPanelOffset} * sm90::kPanel * p.hidden : in.exponentials;
    e.stride[0] = e.stride[1] = int64_t{sm90::kPanel} * (placed ? p.hidden : p.rows);
    e.rows_in_first = round_up(p.rows, sm90::kTileM);
    return e;
  }
  sm90::Maps maps(const Gradient& g, bool first, int box_rows) const {
    const Panels e = panels(g, first);
    const CUtensorMap a = map_of(e.memory[0], sm90::kPanel, p.rows, p.panels(), sm90::kPanel, e.stride[0],
                                 sm90::kBox, CU_TENSOR_MAP_SWIZZLE_NONE);
    return {{a, a},
            map_of(in.x, p.hidden, p.rows, 1, p.hidden, int64_t{p.rows} * p.hidden, box_rows,
                   CU_TENSOR_MAP_SWIZZLE_128B)};
  }
  template <class Epilogue>
  Epilogue epilogue(const Gradient& g, bool first, bool last) const {
    Epilogue e{};
    e.chunk = {in.count, 0, p.rows};
    e.vocab = p.vocab, e.hidden = p.hidden;
    e.rows_in_first = panels(g, first).rows_in_first;
    e.one_hot = in.one_hot;
    e.input = in.x, e.input_stride = p.hidden;
    e.out = g.out;
    e.scale_exponents = g.exponents, e.scale_stride = g.exponent_stride;
    e.first = first, e.last = last;
    e.panel_read_counts = first && p.in_place ? in.panel_read_counts : nullptr;
    e.panel_offset = Problem::kPanelOffset;
    const bool grouped = e.panel_read_counts == nullptr && int64_t{p.rows} * p.hidden * 2 > 24 << 20;
    e.group = grouped ? kGroupM : ceil_div(p.hidden, Epilogue::kColumns);
    const int rest = p.hidden % Epilogue::kColumns / 8;
    e.last_vectors = FastDivide(rest > 0 ? rest : 1);
    return e;
  }
  void clear_counts() const { CHECK(cudaMemsetAsync(in.panel_read_counts, 0, p.panels() * sizeof(int))); }
  void before(const Gradient& g, bool first, bool last) const {
    if (first && p.in_place) clear_counts();
    launch(sm90::gemm_kernel<Before>, sm90::kSharedBytes, maps(g, first, sm90::kBox),
           epilogue<Before>(g, first, last));
  }
  void pingpong(const Gradient& g, bool first, bool last) const {
    if (first && p.in_place) clear_counts();
    const sm90::Maps operands = maps(g, first, sm90::HalfDepthStage::kDepth);
    if (p.hidden % sm90::kPingpongColumns == 0 && p.vocab % sm90::kPanel == 0) {
      launch(sm90::gemm_kernel_pingpong<PingpongWhole>, sm90::kPingpongSharedBytes<PingpongWhole>, operands,
             epilogue<PingpongWhole>(g, first, last));
    } else {
      launch(sm90::gemm_kernel_pingpong<Pingpong>, sm90::kPingpongSharedBytes<Pingpong>, operands,
             epilogue<Pingpong>(g, first, last));
    }
  }
};

struct Error {
  double norm, largest;  // relative to the norm of all sampled classes; of one class to its own
};
Error error_of(const Problem& p, const std::vector<double>& exact, const Bf16* out, int samples) {
  double square = 0.0, total = 0.0, largest = 0.0;
  std::vector<Bf16> row(p.hidden);
  for (int s = 0; s < samples; ++s) {
    const int64_t c = int64_t{s} * (p.vocab - 1) / std::max(samples - 1, 1);
    CHECK(cudaMemcpy(row.data(), out + c * p.hidden, p.hidden * sizeof(Bf16), cudaMemcpyDeviceToHost));
    double of_row = 0.0, norm = 0.0;
    for (int i = 0; i < p.hidden; ++i) {
      const double wanted = exact[int64_t{s} * p.hidden + i], d = double{__bfloat162float(row[i])} - wanted;
      of_row += d * d, norm += wanted * wanted;
    }
    square += of_row, total += norm;
    const double relative = norm > 0.0 ? std::sqrt(of_row / norm) : (of_row > 0.0 ? 1.0 : 0.0);
    if (!(relative <= largest)) largest = relative;  // NaN too
  }
  return {total > 0.0 ? std::sqrt(square / total) : std::sqrt(square), largest};
}

template <bool kPartialTiles, int kColumns>
bool run(const Problem& p, bool timed) {
  const int samples = std::min(p.vocab, 150);
  Inputs in{allocate<Bf16>(int64_t{p.panels()} * sm90::kPanel * p.rows),
            allocate<Bf16>(int64_t{p.rows} * p.hidden), allocate<OneHot>(p.vocab), allocate<int>(1),
            allocate<int>(p.panels())};
  CHECK(cudaMemcpy(in.count, &p.count, sizeof(int), cudaMemcpyHostToDevice));
  fill_one_hots<<<ceil_div(p.vocab, 256), 256>>>(in.one_hot, p.vocab, p.count);
  const int tile_rows = p.panels() + 1;
  const int64_t before_stride = int64_t{ceil_div(p.hidden, kColumns)} * sm90::kTileM;
  const int64_t pingpong_stride = int64_t{ceil_div(p.hidden, sm90::kPingpongColumns)} * sm90::kTileM;
  Gradient a{allocate<Bf16>(p.elements()), allocate<unsigned char>(before_stride * tile_rows), before_stride};
  Gradient b{allocate<Bf16>(p.elements()), allocate<unsigned char>(pingpong_stride * tile_rows),
             pingpong_stride};
  double* sums = allocate<double>(int64_t{samples} * p.hidden);
  CHECK(cudaMemset(sums, 0, int64_t{samples} * p.hidden * sizeof(double)));
  const Kernels<kPartialTiles, kColumns> kernels{p, in};
  const int64_t elements = int64_t{p.panels()} * sm90::kPanel * p.rows;
  for (int chunk = 0; chunk < p.chunks; ++chunk) {
    fill_exponentials<<<2048, 256>>>(kernels.panels(a, false), p.rows, elements, 2 * chunk + 1);
    fill_input<<<1024, 256>>>(in.x, p.rows, p.count, p.hidden, 2 * chunk + 2);
    add_reference<<<samples, 256>>>(kernels.panels(a, false), in.x, in.one_hot, p.count, p.hidden, p.vocab,
                                    samples, sums);
    if (chunk == 0 && p.in_place) {
      for (const Gradient& g : {a, b}) {
        const Panels to = kernels.panels(g, true);
        CHECK(cudaMemcpy2DAsync(to.memory[0], to.stride[0] * 2, in.exponentials,
                                size_t(p.rows) * sm90::kPanel * 2, size_t(p.rows) * sm90::kPanel * 2,
                                p.panels(), cudaMemcpyDeviceToDevice));
      }
    }
    kernels.before(a, chunk == 0, chunk == p.chunks - 1);
    kernels.pingpong(b, chunk == 0, chunk == p.chunks - 1);
    CHECK(cudaDeviceSynchronize());
  }
  std::vector<double> exact(int64_t{samples} * p.hidden);
  CHECK(cudaMemcpy(exact.data(), sums, exact.size() * sizeof(double), cudaMemcpyDeviceToHost));
  const Error before = error_of(p, exact, a.out, samples), pingpong = error_of(p, exact, b.out, samples);
  // One rounding to bfloat16 is 1.66e-3, and every chunk but the last one adds one to 11 bits. Classes with one-hot terms
  // may cancel.
  const bool good = pingpong.norm < 2.2e-3 && pingpong.largest <= std::max(2.5e-3, 1.2 * before.largest);
  if (!good || timed) {
    std::printf("%6d %7d rows %5d (%5d) chunks %2d%s | error %.2e (largest %.2e), before %.2e (%.2e)%s\n",
                p.hidden, p.vocab, p.rows, p.count, p.chunks, p.in_place ? " in place" : "", pingpong.norm,
                pingpong.largest, before.norm, before.largest, good ? "" : "  WRONG");
  }
  if (timed) {
    const struct {
      const char* name;
      bool first, last;
    } kinds[] = {
        {"first", true, false}, {"middle", false, false}, {"last", false, true}, {"only", true, true}};
    double total[2] = {};
    for (const auto& kind : kinds) {
      cudaEvent_t from, to;
      CHECK(cudaEventCreate(&from));
      CHECK(cudaEventCreate(&to));
      std::vector<float> times[2];
      for (int i = -2; i < kRounds; ++i) {
        for (int which = 0; which < 2; ++which) {
          const int kernel = which ^ (i & 1);  // the order alternates, too
          CHECK(cudaEventRecord(from));
          kernel == 0 ? kernels.before(a, kind.first, kind.last) : kernels.pingpong(b, kind.first, kind.last);
          CHECK(cudaEventRecord(to));
          CHECK(cudaEventSynchronize(to));
          float ms = 0.0f;
          CHECK(cudaEventElapsedTime(&ms, from, to));
          if (i >= 0) times[kernel].push_back(ms);
        }
      }
      CHECK(cudaEventDestroy(from));
      CHECK(cudaEventDestroy(to));
      for (auto& t : times) std::sort(t.begin(), t.end());
      const float median[2] = {times[0][kRounds / 2], times[1][kRounds / 2]};
      const double flop = 2.0 * p.rows * p.hidden * p.vocab;
      std::printf("    %-6s | %8.3f ms %5.0f TFLOP/s | %8.3f ms %5.0f TFLOP/s | %.3f\n", kind.name, median[0],
                  flop / median[0] * 1e-9, median[1], flop / median[1] * 1e-9, median[1] / median[0]);
      const int times_used = !std::strcmp(kind.name, "middle") ? p.chunks - 2
                             : !std::strcmp(kind.name, "only") ? 0
                                                               : 1;
      for (int i = 0; i < 2; ++i) total[i] += times_used * median[i];
    }
    std::printf("    all of %d | %8.3f ms | %8.3f ms | %.3f\n", p.chunks, total[0], total[1],
                total[1] / total[0]);
  }
  for (void* memory :
       {static_cast<void*>(in.exponentials), static_cast<void*>(in.x), static_cast<void*>(in.one_hot),
        static_cast<void*>(in.count), static_cast<void*>(in.panel_read_counts), static_cast<void*>(a.out),
        static_cast<void*>(a.exponents), static_cast<void*>(b.out), static_cast<void*>(b.exponents),
        static_cast<void*>(sums)}) {
    CHECK(cudaFree(memory));
  }
  return good;
}

bool run(const Problem& p, bool timed) {
  const int columns = sm90::tile_columns(p.hidden);
  const bool partial = p.hidden % columns != 0 || sm90::has_partial_panel(p.vocab);
  if (!partial && columns == 256) return run<false, 256>(p, timed);
  return columns == 192   ? run<true, 192>(p, timed)
         : columns == 224 ? run<true, 224>(p, timed)
         : columns == 240 ? run<true, 240>(p, timed)
                          : run<true, 256>(p, timed);
}

}  // namespace

int main() {
  bool good = true;
  int cases = 0;
  for (const int hidden : {64, 192, 208, 384, 640, 1152, 2048}) {
    for (const int vocab : {128, 384, 1000, 9000, 30000}) {
      for (const int rows : {700, 1024}) {
        for (const int chunks : {1, 2, 5}) {
          for (const int count : {rows, rows - 101, 1, 0}) {
            if (count != rows && vocab > 9000) continue;
            const bool in_place = rows <= hidden && cases % 2 == 0;
            good &= run({rows, count, hidden, vocab, chunks, in_place}, false);
            ++cases;
          }
        }
      }
    }
  }
  std::printf("%d cases: %s\n\n%s\n", cases, good ? "correct" : "WRONG",
              "hidden, classes | before | ping-pong | ratio");
  for (const Problem& p :
       {Problem{1024, 1024, 1152, 262144, 8, false}, Problem{1024, 1024, 640, 262144, 8, false},
        Problem{1792, 1792, 896, 151936, 5, false}, Problem{2048, 2048, 2048, 128256, 4, false},
        Problem{1664, 1664, 2560, 151936, 5, false}, Problem{1280, 1280, 2880, 201088, 7, false},
        Problem{2048, 2048, 3072, 32064, 4, false}, Problem{1664, 1664, 4096, 151936, 5, false}})
    good &= run(p, true);
  return good ? 0 : 1;
}
