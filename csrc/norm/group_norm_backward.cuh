// SPDX-License-Identifier: BSD-3-Clause

// GroupNorm backward for any shape, in three kernels:
//   channel_sums_kernel     sum(grad_y * xhat) and sum(grad_y) of each channel of each sample, which are also
//                           the partial sums of the parameter gradients
//   group_gradients_kernel  the RowGradient of each group, from the sums of its channels; one warp per group
//   group_norm_grad_kernel  grad_x, one vector per thread, in the reverse order of the first kernel, because
//   L2 most likely has the data of the last reads
// x and grad_y are read twice if grad_x is needed. With N = kVec<T> all tensors are aligned to 16 bytes and
// the spatial size is a multiple of N; N = 1 has no requirement.
#pragma once

#include "norm/group_norm.cuh"
#include "norm/layer_norm_backward.cuh"

namespace liger {

struct GroupNormBackward {
  const void *grad_y, *x, *weight;  // weight may be null
  const float *mean, *rstd;
  void* grad_x;            // null: not needed
  float* sums;             // (samples, 2, channels): sum(grad_y * xhat) and sum(grad_y)
  RowGradient* gradients;  // (samples, groups)
  int64_t samples, channels, spatial, channels_per_group;
  ChannelDivide by_channel;  // divides by the vectors per channel
  ChannelDivide by_group;    // divides by the channels per group
  ChannelDivide by_sample;   // divides by the channels per sample
  bool float_weight;
};

inline constexpr int kChannelThreads = 512;

// Grouped: 2^lanes_log2 threads per channel of a sample; otherwise one block.
template <typename T, int N, bool Grouped>
__global__ void __launch_bounds__(kChannelThreads)
    channel_sums_kernel(const GroupNormBackward p, int lanes_log2) {
  __shared__ float scratch[32];
  const int lanes = Grouped ? 1 << lanes_log2 : blockDim.x;
  const int lane = Grouped ? threadIdx.x & (lanes - 1) : threadIdx.x;
  const int64_t channel =
      Grouped ? int64_t{blockIdx.x} * (blockDim.x >> lanes_log2) + (threadIdx.x >> lanes_log2) : blockIdx.x;
  const bool active = !Grouped || channel < p.samples * p.channels;
  float dot = 0.0f, sum = 0.0f;
  if (active) {
    const int64_t row = p.by_group.quotient(channel);
    const float mean = p.mean[row], rstd = p.rstd[row];
    const T* x = static_cast<const T*>(p.x) + channel * p.spatial;
    const T* g = static_cast<const T*>(p.grad_y) + channel * p.spatial;
#pragma unroll 4
    for (int64_t i = int64_t{lane} * N; i < p.spatial; i += int64_t{lanes} * N) {
      float xs[N], gs[N];
      unpack(load<T, N>(x + i), xs);
      unpack(load<T, N>(g + i), gs);
      // Each vector is summed first: fewer roundings in the long sum.
      float2 vector_sums{};
#pragma unroll
      for (int k = 0; k < N; ++k) {
        vector_sums.x = fmaf(gs[k], (xs[k] - mean) * rstd, vector_sums.x);
        vector_sums.y += gs[k];
      }
      dot += vector_sums.x, sum += vector_sums.y;
    }
  }
  if constexpr (Grouped) {
    for (int offset = lanes / 2; offset > 0; offset /= 2) {
      dot += __shfl_xor_sync(0xffffffffu, dot, offset);
      sum += __shfl_xor_sync(0xffffffffu, sum, offset);
    }
  } else {
    dot = block_reduce<Sum>(dot, scratch);
    sum = block_reduce<Sum>(sum, scratch);
  }
  if (!active || lane != 0) return;
  const int64_t sample = p.by_sample.quotient(channel);
  float* const out = p.sums + sample * p.channels + channel;  // 2 * sample * channels + channel of the sample
  out[0] = dot;
  out[p.channels] = sum;
}

// One warp per group of a sample.
template <typename T>
__global__ void __launch_bounds__(256) group_gradients_kernel(const GroupNormBackward p) {
  const int64_t row = int64_t{blockIdx.x} * (blockDim.x / 32) + threadIdx.x / 32;
  const int64_t groups = p.channels / p.channels_per_group;
  if (row >= p.samples * groups) return;
  const int64_t sample = row / groups, first = row % groups * p.channels_per_group;
  const float* const sums = p.sums + 2 * sample * p.channels;
  float dot = 0.0f, sum = 0.0f;
  for (int64_t i = threadIdx.x % 32; i < p.channels_per_group; i += 32) {
    float w[1];
    load_parameter<T, 1>(p.weight, p.float_weight, 0.0f, 1.0f, first + i, w);
    dot = fmaf(w[0], sums[first + i], dot);
    sum = fmaf(w[0], sums[p.channels + first + i], sum);
  }
  dot = warp_reduce<Sum>(dot);
  sum = warp_reduce<Sum>(sum);
  const float count = static_cast<float>(p.channels_per_group * p.spatial);
  if (threadIdx.x % 32 == 0) p.gradients[row] = RowGradient(p.mean[row], p.rstd[row], sum, dot, 1.0f / count);
}

inline constexpr int kGradThreads = 256;

template <typename T, int N>
__global__ void __launch_bounds__(kGradThreads) group_norm_grad_kernel(const GroupNormBackward p) {
  const int64_t block = gridDim.x - 1 - int64_t{blockIdx.x};
  const int64_t vector = block * kGradThreads + threadIdx.x;
  const int64_t channel = p.by_channel.quotient(vector);
  if (channel >= p.samples * p.channels) return;
  const Vec<T, N> x = load<T, N>(static_cast<const T*>(p.x) + vector * N);
  const Vec<T, N> g = load<T, N>(static_cast<const T*>(p.grad_y) + vector * N);
  const RowGradient gradient = p.gradients[p.by_group.quotient(channel)];
  float weight[1], w[N];
  load_parameter<T, 1>(p.weight, p.float_weight, 0.0f, 1.0f,
                       channel - p.by_sample.quotient(channel) * p.channels, weight);
#pragma unroll
  for (int i = 0; i < N; ++i) w[i] = weight[0];
  store(static_cast<T*>(p.grad_x) + vector * N, gradient(x, g, w));
}

template <typename T, int N>
void launch_group_norm_backward_vectors(const GroupNormBackward& p, cudaStream_t stream) {
  const int64_t channels = p.samples * p.channels, vectors = p.spatial / N;
  // A warp or less per channel if that is at most eight vectors per thread.
  if (vectors <= 256) {
    int lanes_log2 = 0;
    while (lanes_log2 < 5 && (int64_t{4} << lanes_log2) < vectors) ++lanes_log2;
    const int64_t per_block = 128 >> lanes_log2;
    channel_sums_kernel<T, N, true>
        <<<static_cast<unsigned>((channels + per_block - 1) / per_block), 128, 0, stream>>>(p, lanes_log2);
  } else {
    const int threads = vectors <= 1024 ? 128 : kChannelThreads;
    channel_sums_kernel<T, N, false><<<static_cast<unsigned>(channels), threads, 0, stream>>>(p, 0);
  }
  if (!p.grad_x) return;
  const int64_t rows = channels / p.channels_per_group;
  group_gradients_kernel<T><<<static_cast<unsigned>((rows + 7) / 8), 256, 0, stream>>>(p);
  const int64_t blocks = (channels * vectors + kGradThreads - 1) / kGradThreads;
  group_norm_grad_kernel<T, N><<<static_cast<unsigned>(blocks), kGradThreads, 0, stream>>>(p);
}

// vectorised: every channel is aligned to 16 bytes, and the spatial size is a multiple of kVec<T>.
template <typename T>
void launch_group_norm_backward(GroupNormBackward p, bool vectorised, cudaStream_t stream) {
  const int64_t vectors = vectorised ? p.spatial / kVec<T> : p.spatial;
  p.by_channel = ChannelDivide(vectors, p.samples * p.channels * vectors + kGradThreads);
  vectorised ? launch_group_norm_backward_vectors<T, kVec<T>>(p, stream)
             : launch_group_norm_backward_vectors<T, 1>(p, stream);
}

}  // namespace liger
