#include "linear_ce/sm90/chunk.h"

#include <algorithm>
#include <climits>
#include <mutex>
#include <unordered_map>

#include "host/capture.h"
#include "host/shared_memory.h"
#include "host/tensor_map.h"
#include "linear_ce/sm90/grad_weight.cuh"
#include "linear_ce/sm90/rows.cuh"

namespace liger::flce90 {
namespace {

constexpr const char* kOp = "fused_linear_ce";

// Input rows of a chunk that stay in the L2 cache (50 MB, of which one half of the device is near the other
// far) while exponentials pass by.
constexpr int64_t kInputBytesInL2 = 24 << 20;

// Boxes of kBox x kBox elements of a matrix, or of panels of one, as the products want them in shared memory.
CUtensorMap map_of(const Bf16* memory, int64_t columns, int64_t rows, int64_t panels, int64_t row_stride,
                   int64_t panel_stride, CUtensorMapSwizzle swizzle) {
  return tensor_map(kOp, memory, {columns, rows, panels}, {row_stride, panel_stride},
                    {sm90::kBox, sm90::kBox, 1}, swizzle);
}

CUtensorMap matrix_map(const Bf16* memory, int64_t rows, int64_t columns, int64_t stride) {
  return map_of(memory, columns, rows, 1, stride, std::max(rows, int64_t{1}) * stride,
                CU_TENSOR_MAP_SWIZZLE_128B);
}

// The config points to the attributes.
template <class Job>
cudaLaunchConfig_t launch_config(int blocks, cudaStream_t stream, cudaLaunchAttribute (&attributes)[2],
                                 bool all_resident = false) {
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(sm90::kThreads);
  config.dynamicSmemBytes = sm90::kSharedBytes;
  config.stream = stream;
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim.x = sm90::kCluster;
  attributes[0].val.clusterDim.y = attributes[0].val.clusterDim.z = 1;
  attributes[1].id = cudaLaunchAttributeCooperative;
  attributes[1].val.cooperative = 1;
  config.attrs = attributes;
  config.numAttrs = all_resident ? 2 : 1;
  return config;
}

// How many clusters the device runs at a time.
template <class Job>
int resident_clusters(int device) {
  static std::mutex mutex;
  static std::unordered_map<int, int> known;
  const std::lock_guard lock(mutex);
  int& clusters = known[device];
  if (clusters == 0) {
    check_cuda(allow_shared_memory(reinterpret_cast<const void*>(sm90::product<Job>), Carveout::kByDriver),
               kOp);
    const RelaxedCapture relaxed;
    cudaLaunchAttribute attributes[2]{};
    const cudaLaunchConfig_t config =
        launch_config<Job>(device_attributes(device).sm_count, nullptr, attributes);
    check_cuda(cudaOccupancyMaxActiveClusters(&clusters, sm90::product<Job>, &config), kOp);
    require(clusters > 0, kOp, ": this device runs no clusters of ", sm90::kCluster, " blocks with ",
            sm90::kSharedBytes, " bytes of shared memory");
  }
  return clusters;
}

// all_resident: blocks wait for each other. Then no other kernel may hold a part of the device for which this
// one would wait while the other waits for its part.
template <class Job>
void launch_product(const sm90::Maps& maps, const Job& job, int device, cudaStream_t stream,
                    bool all_resident = false) {
  cudaLaunchAttribute attributes[2]{};
  const cudaLaunchConfig_t config =
      launch_config<Job>(resident_clusters<Job>(device) * sm90::kCluster, stream, attributes, all_resident);
  check_cuda(cudaLaunchKernelEx(&config, sm90::product<Job>, maps, job), kOp);
}

// Per-row results of rows whose target is ignored.
__global__ void __launch_bounds__(compact::kRowThreads)
    write_ignored_rows(const ce::Problem problem, const int32_t* position) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * compact::kRowThreads + threadIdx.x;
  if (row < problem.rows && position[row] < 0) ce::write_ignored(problem, row);
}

int64_t padded(const Sm90Chunk& chunk) {
  return round_up(chunk.rows, int64_t{sm90::kCluster} * sm90::kTileM);
}
int64_t sums_per_row(const Batch& batch) {
  return ceil_div(batch.vocab(), sm90::kTileN);
}
const Bf16* elements(const Tensor& matrix) {
  return static_cast<const Bf16*>(matrix.const_data_ptr());
}
CUtensorMap matrix_map(const Tensor& matrix) {
  return matrix_map(elements(matrix), matrix.size(0), matrix.size(1), matrix.stride(0));
}

// Every row counts, and as it is.
__global__ void __launch_bounds__(kRowThreads) count_all_rows(int rows, int* count, float* scale) {
  const int row = blockIdx.x * kRowThreads + threadIdx.x;
  if (row == 0) *count = rows;
  if (row < rows) scale[row] = 1.0f;
}

// Whether the engine has code for the device; sets how many pairs of blocks that runs at a time.
bool runs_on(Sm90Problem& problem, int device) {
  if (!device_attributes(device).code.sm90a || problem.rows > INT_MAX / 2 || !has_tensor_maps()) return false;
  problem.clusters = resident_clusters<GradInput>(device);
  return true;
}

}  // namespace

int64_t places_bytes(const Batch& batch, const Sm90Chunk& chunk, bool apart) {
  return Workspace::bytes_for({apart ? chunk.rows * batch.hidden() * 2 : 0, padded(chunk) * 4,
                               padded(chunk) * 4, chunk.rows * sums_per_row(batch) * 4,
                               padded(chunk) / sm90::kTileM * 4, chunk.rows * int64_t{sizeof(OneHot)},
                               chunk.parts > 1 ? chunk.parts * chunk.rows * batch.hidden() * 4 : 0,
                               batch.observed ? chunk.rows * sums_per_row(batch) * 4 : 0,
                               batch.observed ? chunk.rows * int64_t{sizeof(*Observed::best)} : 0});
}

Places take_places(const Batch& batch, const Sm90Chunk& chunk, Bf16* rows, Workspace& workspace) {
  Places p{};
  p.input = rows != nullptr ? rows : workspace.allocate<Bf16>(chunk.rows * batch.hidden());
  p.target_logit = workspace.allocate<float>(padded(chunk));
  p.scale = workspace.allocate<float>(padded(chunk));
  p.parts = workspace.allocate<float>(chunk.rows * sums_per_row(batch));
  p.repair = workspace.allocate<int>(padded(chunk) / sm90::kTileM);
  p.one_hot = workspace.allocate<OneHot>(chunk.rows);
  p.partial =
      chunk.parts > 1 ? workspace.allocate<float>(chunk.parts * chunk.rows * batch.hidden()) : nullptr;
  if (batch.observed) {
    p.observed.spread = workspace.allocate<float>(chunk.rows * sums_per_row(batch));
    p.observed.best = workspace.allocate<unsigned long long>(chunk.rows);
  }
  return p;
}

int64_t extra_bytes(const Batch& batch, const Sm90Plan& plan) {
  return batch.need_gradient() ? (batch.vocab() / sm90::kPanel + plan.slack) * plan.panel_bytes : 0;
}

Tensor dense(const Tensor& tensor) {
  const bool usable = tensor.stride(1) == 1 && tensor.stride(0) >= tensor.size(1) &&
                      tensor.stride(0) % 8 == 0 && is_aligned16(tensor.const_data_ptr());
  if (usable) return tensor;
  const Tensor copy = torch::stable::contiguous(tensor);
  return is_aligned16(copy.const_data_ptr()) ? copy : torch::stable::clone(copy);
}

void list_rows(Batch& batch, int32_t* memory) {
  const int64_t rows = batch.rows();
  batch.list = {memory, memory + rows, memory + 2 * rows};
  compact::launch_list_rows(batch.problem.targets, rows, batch.list, nullptr, batch.stream);
  check_launch(kOp);
  write_ignored_rows<<<compact::blocks_of(rows), compact::kRowThreads, 0, batch.stream>>>(
      batch.problem, batch.list.position);
  check_launch(kOp);
}

void spread_rows(const Batch& batch, const int32_t* position, int64_t rows, Bf16* grad_input) {
  compact::launch_expand_rows<Bf16>(grad_input, batch.hidden(), position, rows, batch.hidden(), batch.stream);
  check_launch(kOp);
}

std::optional<Sm90Plan> plan_on_device(Sm90Problem problem, int device) {
  if (!runs_on(problem, device)) return std::nullopt;
  return plan_sm90(problem);
}

std::optional<Sm90HeadPlan> plan_head_on_device(Sm90Problem problem, int64_t beside, bool hosted,
                                                int device) {
  if (!runs_on(problem, device)) return std::nullopt;
  return plan_head_sm90(problem, beside, hosted);
}

Chunk::Chunk(const Batch& batch, const Sm90Plan& plan, size_t index, const Sm90Chunk& chunk,
             const Places& places, const WeightSum& sum, Bf16* grad_input)
    : batch_(batch),
      plan_(plan),
      chunk_(chunk),
      at_(places),
      sum_(sum),
      grad_input_(grad_input),
      is_first_(index == 0),
      is_last_(index + 1 == plan.chunks.size()),
      hosted_(is_first_ && plan.hosted_rows > 0),
      apart_(rows_apart(batch, plan, index)),
      panels_{} {
  const int64_t behind = hosted_ ? plan.slack : 0;  // panels
  Bf16* const in_extra =
      reinterpret_cast<Bf16*>(sum.extra + behind * plan.panel_bytes + (is_first_ ? 0 : plan.units_bytes));
  const int64_t extra_stride = plan.panel_bytes / 2;
  panels_.memory[0] = hosted_ ? sum.gradient + behind * sm90::kPanel * batch.hidden() : in_extra;
  panels_.stride[0] = hosted_ ? sm90::kPanel * batch.hidden() : extra_stride;
  panels_.memory[1] = in_extra;
  panels_.stride[1] = extra_stride;
  panels_.rows_in_first = static_cast<int>(round_up(hosted_ ? plan.hosted_rows : chunk.rows, sm90::kTileM));
}

ChunkRows Chunk::rows() const {
  return {batch_.list.count, static_cast<int>(chunk_.first), static_cast<int>(chunk_.rows)};
}

sm90::Maps Chunk::maps_of(const CUtensorMap& b) const {
  const int64_t in_first = std::min<int64_t>(chunk_.rows, panels_.rows_in_first);
  const auto map = [&](int place, int64_t rows) {
    // No swizzle: the panels have it already.
    return map_of(panels_.memory[place], sm90::kPanel, rows, batch_.vocab() / sm90::kPanel, sm90::kPanel,
                  panels_.stride[place], CU_TENSOR_MAP_SWIZZLE_NONE);
  };
  const CUtensorMap first = map(0, in_first);
  return {{first, in_first < chunk_.rows ? map(1, chunk_.rows - in_first) : first}, b};
}

Owners Chunk::owners() const {
  return {batch_.need_grad_weight ? reinterpret_cast<unsigned long long*>(sum_.owners) : nullptr};
}

void Chunk::exponentials() const {
  const int hidden = static_cast<int>(batch_.hidden()), vocab = static_cast<int>(batch_.vocab());
  const Gather gather_rows{rows(),
                           batch_.list.index + chunk_.first,
                           batch_.problem.targets,
                           static_cast<const Bf16*>(batch_.input.const_data_ptr()),
                           static_cast<const Bf16*>(batch_.weight.const_data_ptr()),
                           batch_.input.stride(0),
                           batch_.weight.stride(0),
                           vocab,
                           hidden,
                           batch_.inverse_temperature,
                           at_.input,
                           at_.target_logit,
                           at_.repair,
                           owners()};
  if (batch_.need_grad_weight) {
    check_cuda(cudaMemsetAsync(sum_.owners, 0xff, batch_.vocab() * sizeof(OneHot), batch_.stream), kOp);
  }
  gather<<<static_cast<unsigned>(padded(chunk_)), kRowThreads, 0, batch_.stream>>>(gather_rows);
  check_launch(kOp);
  batch_.observed ? multiply_logits<true>() : multiply_logits<false>();
}

template <bool kObserve>
void Chunk::multiply_logits() const {
  const int hidden = static_cast<int>(batch_.hidden()), vocab = static_cast<int>(batch_.vocab());
  if constexpr (kObserve) {
    check_cuda(cudaMemsetAsync(at_.observed.best, 0, chunk_.rows * sizeof(*at_.observed.best), batch_.stream),
               kOp);
  }
  const CUtensorMap input = matrix_map(at_.input, chunk_.rows, hidden, hidden);
  const sm90::Maps maps{{input, input}, matrix_map(batch_.weight)};
  Exponentials<kObserve> job{rows(),           vocab,       hidden,      kLog2e * batch_.inverse_temperature,
                             at_.target_logit, at_.parts,   panels_,     batch_.need_gradient(),
                             at_.repair,       Phase::kAll, at_.observed};
  launch_product(maps, job, batch_.device, batch_.stream);
  job.phase = Phase::kMaxima;
  launch_product(maps, job, batch_.device, batch_.stream);
  const Repair repair{
      rows(),   at_.repair, at_.parts, static_cast<int>(sums_per_row(batch_)), batch_.inverse_temperature,
      at_.scale};
  raise_reference<<<static_cast<unsigned>(chunk_.rows), kRowThreads, 0, batch_.stream>>>(repair);
  check_launch(kOp);
  job.phase = Phase::kRepair;
  job.reference = at_.scale;
  launch_product(maps, job, batch_.device, batch_.stream);
}

void Chunk::apply_rule(bool gradient) const {
  const Rule rule{batch_.problem,
                  rows(),
                  batch_.list.index + chunk_.first,
                  at_.target_logit,
                  at_.parts,
                  static_cast<int>(sums_per_row(batch_)),
                  at_.repair,
                  panels_,
                  gradient && batch_.need_gradient(),
                  batch_.need_grad_weight ? at_.input : nullptr,
                  static_cast<int>(batch_.hidden()),
                  at_.scale,
                  owners(),
                  at_.one_hot,
                  at_.observed};
  const bool observe = batch_.problem.entropy != nullptr || batch_.problem.predicted != nullptr;
  const auto kernel = observe ? flce90::apply_rule<true> : flce90::apply_rule<false>;
  kernel<<<static_cast<unsigned>(chunk_.rows), kRowThreads, 0, batch_.stream>>>(rule);
  check_launch(kOp);
}

void Chunk::multiply() const {
  if (apart_) multiply_input();
  multiply_weight();
  if (!apart_) multiply_input();
}

void Chunk::multiply_input() const {
  if (!batch_.need_grad_input) return;
  const GradInput job{rows(),
                      static_cast<int>(batch_.vocab()),
                      static_cast<int>(batch_.hidden()),
                      panels_.rows_in_first,
                      static_cast<int>(chunk_.parts),
                      at_.scale,
                      at_.one_hot,
                      static_cast<const Bf16*>(batch_.weight.const_data_ptr()),
                      batch_.weight.stride(0),
                      grad_input_,
                      at_.partial};
  launch_product(maps_of(matrix_map(batch_.weight)), job, batch_.device, batch_.stream);
  if (chunk_.parts > 1) {
    add_parts<<<static_cast<unsigned>(chunk_.rows), kRowThreads, 0, batch_.stream>>>(job);
    check_launch(kOp);
  }
}

void Chunk::multiply_weight() const {
  if (!batch_.need_grad_weight) return;
  const int64_t hidden = batch_.hidden();
  if (hosted_) {
    const size_t counters = batch_.vocab() / sm90::kPanel * sizeof(int);
    check_cuda(cudaMemsetAsync(sum_.readers, 0, counters, batch_.stream), kOp);
  }
  const bool in_bands = !hosted_ && chunk_.rows * hidden * 2 > kInputBytesInL2;
  const GradWeight job{rows(),
                       static_cast<int>(batch_.vocab()),
                       static_cast<int>(hidden),
                       panels_.rows_in_first,
                       sum_.owners,
                       static_cast<const Bf16*>(batch_.input.const_data_ptr()),
                       batch_.input.stride(0),
                       sum_.gradient,
                       sum_.extra,
                       plan_.panel_bytes,
                       is_first_,
                       is_last_,
                       hosted_ ? sum_.readers : nullptr,
                       static_cast<int>(plan_.slack),
                       in_bands ? kBand : static_cast<int>(hidden / sm90::kTileN)};
  launch_product(maps_of(matrix_map(at_.input, chunk_.rows, hidden, hidden)), job, batch_.device,
                 batch_.stream, hosted_);
}

int64_t gradient_rows_bytes(int64_t rows, int64_t hidden, int64_t vocab, int64_t parts) {
  return Workspace::bytes_for({int64_t{sizeof(int)}, rows * int64_t{sizeof(float)},
                               std::max(rows, vocab) * int64_t{sizeof(OneHot)},
                               parts > 1 ? parts * rows * hidden * int64_t{sizeof(float)} : 0});
}

void multiply_rows(const GradientRows& chunk, Bf16* grad_weight, unsigned char* units, Bf16* grad_input,
                   const Tensor& workspace) {
  const int64_t rows = chunk.gradient.size(0), vocab = chunk.gradient.size(1), hidden = chunk.input.size(1);
  Workspace memory(workspace, 0);
  int* const count = memory.allocate<int>(1);
  float* const scale = memory.allocate<float>(rows);
  // Of neither rows nor classes: a place is -1.
  OneHot* const none = memory.allocate<OneHot>(std::max(rows, vocab));
  float* const partial = chunk.parts > 1 ? memory.allocate<float>(chunk.parts * rows * hidden) : nullptr;
  check_cuda(cudaMemsetAsync(none, 0xff, std::max(rows, vocab) * sizeof(OneHot), chunk.stream), kOp);
  const unsigned blocks = static_cast<unsigned>(ceil_div(rows, int64_t{kRowThreads}));
  count_all_rows<<<blocks, kRowThreads, 0, chunk.stream>>>(static_cast<int>(rows), count, scale);
  check_launch(kOp);

  const CUtensorMap gradient = matrix_map(chunk.gradient);
  const ChunkRows all{count, 0, static_cast<int>(rows)};
  if (grad_weight != nullptr) {
    const OfMatrix<GradWeight> job{
        {all, static_cast<int>(vocab), static_cast<int>(hidden), 0, none, elements(chunk.input),
         chunk.input.stride(0), grad_weight, units, sm90::kPanel * hidden / sm90::kTileN, chunk.first,
         chunk.last, nullptr, 0,
         rows * hidden * 2 > kInputBytesInL2 ? kBand : static_cast<int>(hidden / sm90::kTileN)}};
    launch_product({{gradient, gradient}, matrix_map(chunk.input)}, job, chunk.device, chunk.stream);
  }
  if (grad_input != nullptr) {
    const OfMatrix<GradInput> job{{all, static_cast<int>(vocab), static_cast<int>(hidden), 0,
                                   static_cast<int>(chunk.parts), scale, none, elements(chunk.weight),
                                   chunk.weight.stride(0), grad_input, partial}};
    launch_product({{gradient, gradient}, matrix_map(chunk.weight)}, job, chunk.device, chunk.stream);
    if (chunk.parts > 1) {
      add_parts<<<static_cast<unsigned>(rows), kRowThreads, 0, chunk.stream>>>(job);
      check_launch(kOp);
    }
  }
}

}  // namespace liger::flce90
