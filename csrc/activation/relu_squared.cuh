// SPDX-License-Identifier: BSD-3-Clause

// relu(x)^2 and its gradient, 2 * relu(x) * grad_y. The backward needs x alone.
//
// Grid: one vector per thread in small blocks (device/elementwise.cuh). With N = kVec<T> all rows are aligned
// to 16 bytes; N = 1 has no requirement.
#pragma once

#include "device/elementwise.cuh"

namespace liger {

struct ReluSquared {
  InputRows x, grad_y;  // grad_y: backward only
  OutputRows out;       // y or grad_x
  Extent extent;
};

// x <= 0 is false for NaN, so NaN propagates as in torch.relu.
__device__ __forceinline__ float relu_squared_value(float x) {
  return x <= 0.0f ? 0.0f : x * x;
}
__device__ __forceinline__ float relu_squared_grad(float grad_y, float x) {
  return x <= 0.0f ? 0.0f : 2.0f * x * grad_y;
}

template <typename T, int N, bool kBackward>
__global__ void __launch_bounds__(kElementwiseThreads, 8) relu_squared_kernel(const ReluSquared p) {
  const Position at(p.extent);
  if (at.row >= p.extent.rows) return;
  float x[N];
  unpack(at.template read<T, N>(p.x), x);
  if constexpr (kBackward) {
    float grad_y[N];
    unpack(at.template read<T, N>(p.grad_y), grad_y);
#pragma unroll
    for (int i = 0; i < N; ++i) x[i] = relu_squared_grad(grad_y[i], x[i]);
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) x[i] = relu_squared_value(x[i]);
  }
  at.write(p.out, pack<T, N>(x));
}

// The columns of p.extent are vectors of N elements.
template <typename T, int N>
void launch_relu_squared(const ReluSquared& p, cudaStream_t stream) {
  const unsigned blocks = elementwise_blocks(p.extent);
  if (p.grad_y.data != nullptr) {
    relu_squared_kernel<T, N, true><<<blocks, kElementwiseThreads, 0, stream>>>(p);
  } else {
    relu_squared_kernel<T, N, false><<<blocks, kElementwiseThreads, 0, stream>>>(p);
  }
}

}  // namespace liger
