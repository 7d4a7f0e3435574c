#include "norm/group_norm.cuh"

#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <limits>
#include <tuple>

#include "host/dispatch.h"
#include "host/persistent_launch.h"
#include "host/torch.h"
#include "norm/group_norm_persistent.cuh"
#include "norm/group_norm_resident.cuh"
#include "norm/host.cuh"
#include "norm/resident_plan.h"

namespace liger {
namespace {

// The sizes of x (samples, channels, spatial...). A row is one group of one sample.
struct Sizes {
  int64_t samples, channels, spatial, groups;
  int64_t rows() const { return samples * groups; }
  int64_t channels_per_group() const { return channels / groups; }
  int64_t row() const { return channels_per_group() * spatial; }
};

Sizes sizes_of(const Tensor& x, int64_t groups) {
  int64_t spatial = 1;
  for (int64_t d = 2; d < x.dim(); ++d) spatial *= x.size(d);
  return {x.size(0), x.size(1), spatial, groups};
}

// True if 16-byte accesses to contiguous tensors at these addresses are possible.
bool can_vectorise(const Sizes& sizes, const Tensor& x, std::initializer_list<const void*> pointers) {
  bool possible = sizes.spatial % static_cast<int64_t>(16 / x.element_size()) == 0;
  for (const void* pointer : pointers) possible = possible && is_aligned16(pointer);
  return possible;
}

// A result for kernels that write contiguous tensors only.
RowOutput contiguous_output(const Tensor& result) {
  Tensor written = result.is_contiguous() ? result : torch::stable::new_empty(result, result.sizes());
  return {result, std::move(written), {}};
}

// True for rows of up to four vectors per thread: the register-resident forward is as fast as the one that
// stages rows in shared memory.
bool fits_in_registers(int64_t vectors) {
  return vectors <= 4 * kForwardThreads<4>;
}

// Returns false if no cluster size holds a row. Two blocks per SM are faster than a smaller cluster at one
// block per SM.
template <typename T>
bool launch_persistent(const char* op, const GroupNorm& p, const DeviceAttributes& device,
                       cudaStream_t stream) {
  using TwoPerSm = PersistentShape<256, 4, PartialMoments, 1, 2>;
  using OnePerSm = PersistentShape<512, 4, PartialMoments, 1, 1>;
  const auto launch = [&](auto shape) {
    using Shape = decltype(shape);
    PersistentLaunch<GroupNorm> launch(op, p.hidden / kVec<T>, device);
    launch.template add_candidate<Shape>(group_norm_persistent_kernel<T, Shape>);
    return launch.run(p.rows, stream, p);
  };
  return launch(TwoPerSm{}) || launch(OnePerSm{});
}

// The launch of the persistent backward, without a candidate (blocks() == 0) if the shape does not fit it.
template <typename T>
PersistentLaunch<GroupNormBackward> choose_backward_launch(const char* op, const Sizes& sizes,
                                                           bool vectorised, const DeviceAttributes& device) {
  PersistentLaunch<GroupNormBackward> launch(op, sizes.row() / kVec<T>, device);
  if (!vectorised || device.code.architecture < 90 || sizes.channels_per_group() > kMaxChannels ||
      sizes.spatial / kVec<T> < kMinChannelVectors) {
    return launch;
  }
  using TwoPerSm = GroupNormBackwardShape<256, 2>;
  using OnePerSm = GroupNormBackwardShape<512, 1>;
  launch.template add_candidate<TwoPerSm>(group_norm_backward_persistent_kernel<T, TwoPerSm>, 1, 1);
  if (launch.blocks() == 0) {
    launch.template add_candidate<OnePerSm>(group_norm_backward_persistent_kernel<T, OnePerSm>);
  }
  return launch;
}

// The plan of the backward that stages rows of x and grad_y; blocks == 0 if the shape does not fit it.
SmemRowPlan smem_row_plan(const Sizes& sizes, int vector, int segment_vectors, bool vectorised,
                          const DeviceAttributes& device) {
  if (!vectorised || segment_vectors == 0 || device.code.architecture < 90) return {};
  return plan_smem_rows(sizes.row() / vector, segment_vectors, 2, sizeof(float2), sizeof(float2), device);
}

template <typename Kernel, typename... Arguments>
void launch_resident(const char* op, Kernel kernel, const SmemRowPlan& r, int64_t rows,
                     const DeviceAttributes& device, cudaStream_t stream, const Arguments&... arguments) {
  if (r.persistent) {
    require(
        launch_persistent_clusters(op, kernel, r, r.threads, r.shared, rows, device, stream, arguments...),
        op, ": no cluster of ", r.blocks, " blocks fits this device");
    return;
  }
  // Several blocks per SM overlap the loads of one with the arithmetic of another.
  check_cuda(allow_shared_memory(reinterpret_cast<const void*>(kernel), Carveout::kShared), op);
  kernel<<<static_cast<unsigned>(rows), static_cast<unsigned>(r.threads), static_cast<size_t>(r.shared),
           stream>>>(arguments..., r);
}

std::tuple<Tensor, Tensor, Tensor> group_norm(const Tensor& x, int64_t num_groups,
                                              const std::optional<Tensor>& weight,
                                              const std::optional<Tensor>& bias, double eps) {
  constexpr const char* op = "group_norm";
  check_group_norm(op, x, num_groups, weight, bias, eps);
  require_cuda_dtype(op, "x", x);
  const OpGuard guard(op, x.get_device_index());
  const Sizes sizes = sizes_of(x, num_groups);
  RowOutput y = contiguous_output(new_like(x));
  Tensor mean = empty({sizes.samples, num_groups}, ScalarType::Float, x);
  Tensor rstd = empty({sizes.samples, num_groups}, ScalarType::Float, x);
  if (x.numel() == 0) {
    // The mean of an empty row is NaN, and so is its rstd.
    if (rstd.numel() > 0) {
      torch::stable::fill_(mean, std::numeric_limits<double>::quiet_NaN());
      torch::stable::fill_(rstd, std::numeric_limits<double>::quiet_NaN());
    }
    return {y.result, mean, rstd};
  }

  const Tensor input = torch::stable::contiguous(x);
  const std::optional<Tensor> scale = dense_parameter(weight), added = dense_parameter(bias);
  GroupNorm p{};
  p.x = input.const_data_ptr();
  p.y = y.data();
  p.mean = static_cast<float*>(mean.mutable_data_ptr());
  p.rstd = static_cast<float*>(rstd.mutable_data_ptr());
  p.x_rows = p.y_rows = {sizes.row()};
  p.rows = sizes.rows();
  p.hidden = sizes.row();
  p.eps = static_cast<float>(eps);
  p.inverse_hidden = 1.0f / static_cast<float>(p.hidden);
  p.affine.weight = data(scale);
  p.affine.bias = data(added);
  p.affine.is_float = float_parameters(weight, bias);
  p.affine.channels_per_group = sizes.channels_per_group();
  p.affine.groups = ChannelDivide(num_groups, p.rows);
  const bool vectorised = can_vectorise(sizes, x, {p.x, p.y});
  dispatch_dtype(x.scalar_type(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    const int64_t n = vectorised ? kVec<T> : 1;
    p.affine.vectors = ChannelDivide(sizes.spatial / n, p.hidden / n);
    const DeviceAttributes& device = device_attributes(x.get_device_index());
    const bool persistent = vectorised && device.code.architecture >= 90 && !fits_in_registers(p.hidden / n);
    if (persistent && launch_persistent<T>(op, p, device, current_stream(x))) return;
    const int chunks = moment_norm_chunks<T>(p.hidden, vectorised);
    const Tensor chunk_moments = empty({p.rows * chunks, 2}, ScalarType::Float, x);
    p.chunk_moments = static_cast<Moments*>(chunk_moments.mutable_data_ptr());
    launch_group_norm<T>(p, vectorised, chunks, current_stream(x));
  });
  check_launch(op);
  y.finish();
  return {y.result, mean, rstd};
}

std::tuple<Tensor, Tensor, Tensor> group_norm_backward(const Tensor& grad_y, const Tensor& x,
                                                       int64_t num_groups,
                                                       const std::optional<Tensor>& weight,
                                                       const std::optional<Tensor>& bias, const Tensor& mean,
                                                       const Tensor& rstd, bool need_grad_x,
                                                       bool need_grad_weight, bool need_grad_bias) {
  constexpr const char* op = "group_norm_backward";
  check_group_norm(op, x, num_groups, weight, bias);
  require_cuda_dtype(op, "x", x);
  require_like(op, "grad_y", grad_y, "x", x);
  const Sizes sizes = sizes_of(x, num_groups);
  require_row_statistic(op, "mean", mean, x, sizes.rows());
  require_row_statistic(op, "rstd", rstd, x, sizes.rows());
  need_grad_weight = need_grad_weight && weight;
  need_grad_bias = need_grad_bias && bias;
  const OpGuard guard(op, x.get_device_index());
  RowOutput grad_x = contiguous_output(need_grad_x ? new_like(x) : no_tensor(x.scalar_type(), x));
  Tensor grad_weight = parameter_grad(weight, need_grad_weight, x);
  Tensor grad_bias = parameter_grad(bias, need_grad_bias, x);
  const std::tuple<Tensor, Tensor, Tensor> grads{grad_x.result, grad_weight, grad_bias};
  if (x.numel() == 0) {
    if (need_grad_weight) torch::stable::zero_(grad_weight);
    if (need_grad_bias) torch::stable::zero_(grad_bias);
    return grads;
  }
  if (!need_grad_x && !need_grad_weight && !need_grad_bias) return grads;

  const Tensor input = torch::stable::contiguous(x), upstream = torch::stable::contiguous(grad_y);
  const std::optional<Tensor> scale = dense_parameter(weight);
  const Tensor row_mean = torch::stable::contiguous(mean), row_scale = torch::stable::contiguous(rstd);
  GroupNormBackward p{};
  p.grad_y = upstream.const_data_ptr();
  p.x = input.const_data_ptr();
  p.weight = data(scale);
  p.mean = static_cast<const float*>(row_mean.const_data_ptr());
  p.rstd = static_cast<const float*>(row_scale.const_data_ptr());
  p.grad_x = need_grad_x ? grad_x.data() : nullptr;
  p.samples = sizes.samples;
  p.channels = sizes.channels;
  p.spatial = sizes.spatial;
  p.channels_per_group = sizes.channels_per_group();
  p.by_group = ChannelDivide(p.channels_per_group, p.samples * p.channels);
  p.by_sample = ChannelDivide(p.channels, p.samples * p.channels);
  p.float_weight = float_parameters(weight, std::nullopt);
  const bool vectorised = can_vectorise(sizes, x, {p.x, p.grad_y, need_grad_x ? p.grad_x : nullptr});
  const cudaStream_t stream = current_stream(x);
  dispatch_dtype(x.scalar_type(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    const ChannelSegments segments =
        vectorised ? channel_segments(sizes.spatial / kVec<T>) : ChannelSegments{};
    const DeviceAttributes& device = device_attributes(x.get_device_index());
    const bool rows_in_smem = vectorised && need_grad_x;
    const PersistentLaunch<GroupNormBackward> persistent =
        choose_backward_launch<T>(op, sizes, rows_in_smem, device);
    const SmemRowPlan smem_plan = persistent.blocks() > 0
                                      ? SmemRowPlan{}
                                      : smem_row_plan(sizes, kVec<T>, segments.vectors, rows_in_smem, device);
    // One partial sum per sample, or per block of a group if its row is staged in shared memory.
    const int64_t blocks = std::max(persistent.blocks(), smem_plan.blocks);
    const int64_t partials = sizes.samples * std::max<int64_t>(blocks, 1);
    const Tensor sums = empty({partials, 2, sizes.channels}, ScalarType::Float, x);
    const Tensor gradients =
        empty({blocks > 0 ? 0 : sizes.rows(), sizeof(RowGradient) / sizeof(float)}, ScalarType::Float, x);
    p.sums = static_cast<float*>(sums.mutable_data_ptr());
    p.gradients = static_cast<RowGradient*>(gradients.mutable_data_ptr());
    if (blocks > 0) p.by_channel = ChannelDivide(sizes.spatial / kVec<T>, sizes.row() / kVec<T>);
    if (persistent.blocks() > 0) {
      require(persistent.run(sizes.rows(), stream, p), op, ": no cluster of ", persistent.blocks(),
              " blocks fits this device");
    } else if (smem_plan.blocks > 0) {
      launch_resident(op, group_norm_backward_resident_kernel<T>, smem_plan, sizes.rows(), device, stream, p,
                      segments);
    } else {
      launch_group_norm_backward<T>(p, vectorised, stream);
    }
    check_launch(op);
    // p.sums has both gradients, whichever is needed.
    if (!need_grad_weight && !need_grad_bias) return;
    const Tensor weight_out = need_grad_weight ? grad_weight : new_like(grad_bias);
    const Tensor bias_out = need_grad_bias ? grad_bias : new_like(grad_weight);
    sum_partials<T>(p.sums, static_cast<int>(partials), weight_out, &bias_out, false, stream);
  });
  check_launch(op);
  grad_x.finish();
  return grads;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(liger, CUDA, m) {
  m.impl("group_norm", TORCH_BOX(&group_norm));
  m.impl("group_norm_backward", TORCH_BOX(&group_norm_backward));
}

}  // namespace liger
