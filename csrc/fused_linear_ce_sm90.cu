#include "fused_linear_ce_sm90.h"

#include <algorithm>
#include <climits>
#include <mutex>
#include <unordered_map>

#include "common/scratch.h"
#include "common/tensor_map.h"
#include "kernels/compact.cuh"
#include "kernels/fused_linear_ce_sm90_rows.cuh"
#include "kernels/fused_linear_ce_sm90_weight.cuh"

namespace liger {
namespace {

constexpr const char* kOp = "fused_linear_ce";

using Bf16 = __nv_bfloat16;

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
    check_cuda(cudaFuncSetAttribute(sm90::product<Job>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    sm90::kSharedBytes),
               kOp);
    cudaLaunchAttribute attributes[2]{};
    const cudaLaunchConfig_t config =
        launch_config<Job>(device_attributes(device).multiprocessors, nullptr, attributes);
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

class Engine {
 public:
  explicit Engine(const FusedLinearCe& call)
      : call_(call),
        rows_(call.input.size(0)),
        hidden_(call.input.size(1)),
        vocab_(call.weight.size(0)),
        columns_(ceil_div(vocab_, sm90::kTileN)),
        input_(dense(call.input)),
        weight_(dense(call.weight)),
        write_gradient_(call.need_grad_input || call.need_grad_weight),
        owners_(bytes(call.need_grad_weight ? vocab_ * int64_t{sizeof(flce90::OneHot)} : 0)) {}

  FusedLinearCeGradients run(const Sm90Plan& plan) {
    list_rows();
    grad_input_ = matrix_or_none(call_.need_grad_input, rows_, hidden_);
    const int64_t panels = vocab_ / sm90::kPanel + plan.slack;
    const Tensor weight_memory = matrix_or_none(call_.need_grad_weight, panels * sm90::kPanel, hidden_);
    grad_weight_ = call_.need_grad_weight ? narrow_rows(weight_memory, vocab_) : weight_memory;
    const Tensor extra = bytes(write_gradient_ ? panels * plan.panel_bytes : 0);
    Tensor readers = empty({plan.hosted_rows > 0 ? vocab_ / sm90::kPanel : 0}, ScalarType::Int, input_);
    if (plan.hosted_rows > 0) {
      check_cuda(cudaMemsetAsync(readers.mutable_data_ptr(), 0, readers.numel() * 4, call_.stream), kOp);
    }

    std::optional<Tensor> own;  // scratch of chunks for which neither gradient has room
    for (size_t i = 0; i < plan.chunks.size(); ++i) {
      const bool is_first = i == 0, is_last = i + 1 == plan.chunks.size();
      const Sm90Chunk& chunk = plan.chunks[i];
      // The input rows of a chunk lie where their gradient will, if they are needed for nothing later: the
      // exponentials of the first chunk are gone after the weight gradient, so there the input gradient comes
      // first.
      const bool rows_apart = !call_.need_grad_input || plan.hosted_rows * is_first > 0;
      const int64_t need = scratch_size(chunk, rows_apart);
      const int64_t unwritten = (rows_ - chunk.first - chunk.rows) * hidden_ * 2;
      const int64_t slack = plan.slack * sm90::kPanel * hidden_ * 2;
      std::optional<Scratch> scratch;
      if (is_first && call_.need_grad_input && need <= unwritten) {
        scratch.emplace(grad_input_, (chunk.first + chunk.rows) * hidden_ * 2);
      } else if (!is_first && need <= slack) {
        scratch.emplace(weight_memory, vocab_ * hidden_ * 2);
      } else {
        if (!own || own->numel() < need) {
          own.reset();
          own.emplace(bytes(need));
        }
        scratch.emplace(*own, 0);
      }
      const Places places = place(chunk, rows_apart, *scratch);

      flce90::Panels exponentials_at{};
      unsigned char* const units = static_cast<unsigned char*>(extra.mutable_data_ptr());
      const bool hosted = is_first && plan.hosted_rows > 0;
      const int64_t behind = hosted ? plan.slack : 0;  // panels
      Bf16* const in_extra =
          reinterpret_cast<Bf16*>(units + behind * plan.panel_bytes + (is_first ? 0 : plan.units_bytes));
      if (hosted) {
        exponentials_at.memory[0] =
            static_cast<Bf16*>(weight_memory.mutable_data_ptr()) + behind * sm90::kPanel * hidden_;
        exponentials_at.stride[0] = sm90::kPanel * hidden_;
      } else {
        exponentials_at.memory[0] = in_extra;
        exponentials_at.stride[0] = plan.panel_bytes / 2;
      }
      exponentials_at.memory[1] = in_extra;
      exponentials_at.stride[1] = plan.panel_bytes / 2;
      exponentials_at.rows_in_first =
          static_cast<int>(round_up(hosted ? plan.hosted_rows : chunk.rows, sm90::kTileM));

      exponentials(chunk, places, exponentials_at);
      if (rows_apart) {
        multiply_input(chunk, places, exponentials_at);
        multiply_weight(chunk, places, exponentials_at, units, plan, readers, is_first, is_last);
      } else {
        multiply_weight(chunk, places, exponentials_at, units, plan, readers, is_first, is_last);
        multiply_input(chunk, places, exponentials_at);
      }
    }
    if (call_.need_grad_input) {
      compact::launch_expand_rows<Bf16>(static_cast<Bf16*>(grad_input_.mutable_data_ptr()), hidden_,
                                        list_.position, rows_, hidden_, call_.stream);
      check_launch(kOp);
    }
    return {grad_input_, grad_weight_};
  }

 private:
  // Pointers of one chunk.
  struct Places {
    Bf16* input;
    float* target_logit;
    float* scale;
    float* parts;
    int* repair;
    flce90::OneHot* one_hot;
    float* partial;
  };

  Tensor dense(const Tensor& tensor) const {
    const bool usable = tensor.stride(1) == 1 && tensor.stride(0) >= tensor.size(1) &&
                        tensor.stride(0) % 8 == 0 && is_aligned16(tensor.const_data_ptr());
    if (usable) return tensor;
    const Tensor copy = torch::stable::contiguous(tensor);
    return is_aligned16(copy.const_data_ptr()) ? copy : torch::stable::clone(copy);
  }
  Tensor matrix_or_none(bool needed, int64_t rows, int64_t columns) const {
    return needed ? empty({rows, columns}, ScalarType::BFloat16, input_)
                  : no_tensor(ScalarType::BFloat16, input_);
  }
  static Tensor narrow_rows(Tensor matrix, int64_t rows) { return torch::stable::narrow(matrix, 0, 0, rows); }
  Tensor bytes(int64_t count) const { return empty({count}, ScalarType::Byte, input_); }
  const Bf16* weight() const { return static_cast<const Bf16*>(weight_.const_data_ptr()); }
  Bf16* grad_input_at(int64_t row) const {
    return static_cast<Bf16*>(grad_input_.mutable_data_ptr()) + row * hidden_;
  }
  static int64_t padded(const Sm90Chunk& chunk) {
    constexpr int64_t kPair = sm90::kCluster * sm90::kTileM;
    return round_up(chunk.rows, kPair);
  }

  void list_rows() {
    lists_ = empty({2 * rows_ + 1}, ScalarType::Int, input_);
    int32_t* const lists = static_cast<int32_t*>(lists_.mutable_data_ptr());
    list_ = {lists, lists + rows_, lists + 2 * rows_};
    compact::launch_list_rows(call_.options.problem.targets, rows_, list_, nullptr, call_.stream);
    check_launch(kOp);
    problem_ = call_.options.problem;
    problem_.rows = rows_;
    problem_.denominator = static_cast<const float*>(call_.used_denominator.const_data_ptr());
    call_.results.attach(problem_, 0);
    write_ignored_rows<<<compact::blocks_of(rows_), compact::kRowThreads, 0, call_.stream>>>(problem_,
                                                                                             list_.position);
    check_launch(kOp);
  }

  int64_t scratch_size(const Sm90Chunk& chunk, bool rows_apart) const {
    return Scratch::bytes_for({rows_apart ? chunk.rows * hidden_ * 2 : 0, padded(chunk) * 4,
                               padded(chunk) * 4, chunk.rows * columns_ * 4, padded(chunk) / sm90::kTileM * 4,
                               chunk.rows * int64_t{sizeof(flce90::OneHot)},
                               chunk.parts > 1 ? chunk.parts * chunk.rows * hidden_ * 4 : 0});
  }
  Places place(const Sm90Chunk& chunk, bool rows_apart, Scratch& scratch) const {
    Places p{};
    p.input = rows_apart ? scratch.take<Bf16>(chunk.rows * hidden_) : grad_input_at(chunk.first);
    p.target_logit = scratch.take<float>(padded(chunk));
    p.scale = scratch.take<float>(padded(chunk));
    p.parts = scratch.take<float>(chunk.rows * columns_);
    p.repair = scratch.take<int>(padded(chunk) / sm90::kTileM);
    p.one_hot = scratch.take<flce90::OneHot>(chunk.rows);
    p.partial = chunk.parts > 1 ? scratch.take<float>(chunk.parts * chunk.rows * hidden_) : nullptr;
    return p;
  }

  flce90::ChunkRows rows_of(const Sm90Chunk& chunk) const {
    return {list_.count, static_cast<int>(chunk.first), static_cast<int>(chunk.rows)};
  }

  sm90::Maps maps_of(const Sm90Chunk& chunk, const flce90::Panels& panels, const CUtensorMap& b) const {
    const int64_t in_first = std::min<int64_t>(chunk.rows, panels.rows_in_first);
    const auto map = [&](int place, int64_t rows) {
      // No swizzle: the panels have it already.
      return map_of(panels.memory[place], sm90::kPanel, rows, vocab_ / sm90::kPanel, sm90::kPanel,
                    panels.stride[place], CU_TENSOR_MAP_SWIZZLE_NONE);
    };
    const CUtensorMap first = map(0, in_first);
    return {{first, in_first < chunk.rows ? map(1, chunk.rows - in_first) : first}, b};
  }

  flce90::Owners owners() const {
    const bool needed = call_.need_grad_weight;
    return {needed ? static_cast<unsigned long long*>(owners_.mutable_data_ptr()) : nullptr};
  }

  // Exponentials, results and scales; the input rows become scaled where the weight gradient needs them.
  void exponentials(const Sm90Chunk& chunk, const Places& at, const flce90::Panels& panels) {
    const flce90::Gather gather{rows_of(chunk),
                                list_.index + chunk.first,
                                call_.options.problem.targets,
                                static_cast<const Bf16*>(input_.const_data_ptr()),
                                weight(),
                                input_.stride(0),
                                weight_.stride(0),
                                static_cast<int>(vocab_),
                                static_cast<int>(hidden_),
                                at.input,
                                at.target_logit,
                                at.repair,
                                owners()};
    if (call_.need_grad_weight) {
      check_cuda(cudaMemsetAsync(owners_.mutable_data_ptr(), 0xff, owners_.numel(), call_.stream), kOp);
    }
    flce90::gather<<<static_cast<unsigned>(padded(chunk)), flce90::kRowThreads, 0, call_.stream>>>(gather);
    check_launch(kOp);

    const CUtensorMap rows = matrix_map(at.input, chunk.rows, hidden_, hidden_);
    const sm90::Maps maps{{rows, rows}, matrix_map(weight(), vocab_, hidden_, weight_.stride(0))};
    flce90::Exponentials job{rows_of(chunk),
                             static_cast<int>(vocab_),
                             static_cast<int>(hidden_),
                             at.target_logit,
                             at.parts,
                             panels,
                             write_gradient_,
                             at.repair,
                             flce90::Phase::kAll};
    launch_product(maps, job, call_.device, call_.stream);
    job.phase = flce90::Phase::kMaxima;
    launch_product(maps, job, call_.device, call_.stream);
    const flce90::Repair repair{rows_of(chunk), at.repair, at.parts, static_cast<int>(columns_), at.scale};
    flce90::raise_reference<<<static_cast<unsigned>(chunk.rows), flce90::kRowThreads, 0, call_.stream>>>(
        repair);
    check_launch(kOp);
    job.phase = flce90::Phase::kRepair;
    job.reference = at.scale;
    launch_product(maps, job, call_.device, call_.stream);

    const flce90::Rule rule{problem_,
                            rows_of(chunk),
                            list_.index + chunk.first,
                            at.target_logit,
                            at.parts,
                            static_cast<int>(columns_),
                            at.repair,
                            panels,
                            write_gradient_,
                            call_.need_grad_weight ? at.input : nullptr,
                            static_cast<int>(hidden_),
                            at.scale,
                            owners(),
                            at.one_hot};
    flce90::apply_rule<<<static_cast<unsigned>(chunk.rows), flce90::kRowThreads, 0, call_.stream>>>(rule);
    check_launch(kOp);
  }

  void multiply_input(const Sm90Chunk& chunk, const Places& at, const flce90::Panels& panels) {
    if (!call_.need_grad_input) return;
    const flce90::GradInput job{rows_of(chunk),
                                static_cast<int>(vocab_),
                                static_cast<int>(hidden_),
                                panels.rows_in_first,
                                static_cast<int>(chunk.parts),
                                at.scale,
                                at.one_hot,
                                weight(),
                                weight_.stride(0),
                                grad_input_at(chunk.first),
                                at.partial};
    launch_product(maps_of(chunk, panels, matrix_map(weight(), vocab_, hidden_, weight_.stride(0))), job,
                   call_.device, call_.stream);
    if (chunk.parts > 1) {
      flce90::add_parts<<<static_cast<unsigned>(chunk.rows), flce90::kRowThreads, 0, call_.stream>>>(job);
      check_launch(kOp);
    }
  }

  void multiply_weight(const Sm90Chunk& chunk, const Places& at, const flce90::Panels& panels,
                       unsigned char* units, const Sm90Plan& plan, const Tensor& readers, bool is_first,
                       bool is_last) {
    if (!call_.need_grad_weight) return;
    const sm90::Maps maps = maps_of(chunk, panels, matrix_map(at.input, chunk.rows, hidden_, hidden_));
    const bool hosted = is_first && plan.hosted_rows > 0;
    const bool in_bands = !hosted && chunk.rows * hidden_ * 2 > kInputBytesInL2;
    const flce90::GradWeight job{rows_of(chunk),
                                 static_cast<int>(vocab_),
                                 static_cast<int>(hidden_),
                                 panels.rows_in_first,
                                 static_cast<const flce90::OneHot*>(owners_.const_data_ptr()),
                                 static_cast<const Bf16*>(input_.const_data_ptr()),
                                 input_.stride(0),
                                 static_cast<Bf16*>(grad_weight_.mutable_data_ptr()),
                                 units,
                                 plan.panel_bytes,
                                 is_first,
                                 is_last,
                                 hosted ? static_cast<int*>(readers.mutable_data_ptr()) : nullptr,
                                 static_cast<int>(plan.slack),
                                 in_bands ? flce90::kBand : static_cast<int>(hidden_ / sm90::kTileN)};
    launch_product(maps, job, call_.device, call_.stream, hosted);
  }

  const FusedLinearCe& call_;
  int64_t rows_, hidden_, vocab_, columns_;
  Tensor input_, weight_;
  bool write_gradient_;
  Tensor owners_;  // of the classes, in the chunk at hand
  Tensor lists_, grad_input_, grad_weight_;
  compact::RowList list_{};
  ce::Problem problem_{};
};

}  // namespace

std::optional<Sm90Plan> plan_sm90(const FusedLinearCe& call) {
#ifndef LIGER_HAS_SM90A
  return std::nullopt;
#else
  ce::Problem problem = call.options.problem;
  call.results.attach(problem, 0);
  const bool fits = device_attributes(call.device).capability == 90 &&
                    call.input.scalar_type() == ScalarType::BFloat16 && !call.bias && problem.extras == 0 &&
                    call.input.size(0) <= INT_MAX / 2 && has_tensor_maps();
  if (!fits) return std::nullopt;
  return plan_sm90({call.input.size(0), call.input.size(1), call.weight.size(0), call.need_grad_input,
                    call.need_grad_weight, call.exact_accumulation, call.memory_budget,
                    resident_clusters<flce90::GradInput>(call.device)});
#endif
}

FusedLinearCeGradients fused_linear_ce_sm90(const FusedLinearCe& call, const Sm90Plan& plan) {
  return Engine(call).run(plan);
}

}  // namespace liger
