// SPDX-License-Identifier: BSD-3-Clause

// Gated products, activation(gate) * up, forward and backward. The activation is never materialised: the
// backward recomputes it from gate. It can also write the product, which the backward of the next GEMM needs.
//
// Grid: one vector per thread in small blocks (device/elementwise.cuh). With N = kVec<T> all rows are aligned
// to 16 bytes; N = 1 has no requirement.
//
// In place, the outputs of the backward are its inputs: a thread reads all of its elements before it writes
// them, and no other thread accesses them.
#pragma once

#include "activation/activations.cuh"
#include "device/elementwise.cuh"

namespace liger {

struct Gated {
  InputRows gate, up, grad_out;            // grad_out: backward only
  OutputRows product, grad_gate, grad_up;  // gradients: backward only; product may be null in the backward
  Extent extent;
};

template <typename Activation, typename T, int N>
__device__ __forceinline__ Vec<T, N> gated_vector(const Vec<T, N>& gate, const Vec<T, N>& up) {
  float g[N], u[N];
  unpack(gate, g);
  unpack(up, u);
#pragma unroll
  for (int i = 0; i < N; ++i) g[i] = Activation::template value<T>(g[i]) * u[i];
  return pack<T, N>(g);
}

// Returns the product and replaces gate and up by their gradients.
template <typename Activation, typename T, int N>
__device__ __forceinline__ Vec<T, N> gated_grad_vector(const Vec<T, N>& grad_out, Vec<T, N>& gate,
                                                       Vec<T, N>& up) {
  float d[N], g[N], u[N], product[N];
  unpack(grad_out, d);
  unpack(gate, g);
  unpack(up, u);
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const ValueAndDerivative a = Activation::template value_and_derivative<T>(g[i]);
    product[i] = a.value * u[i];
    g[i] = d[i] * u[i] * a.derivative;
    u[i] = d[i] * a.value;
  }
  gate = pack<T, N>(g);
  up = pack<T, N>(u);
  return pack<T, N>(product);
}

template <typename Activation, typename T, int N>
__global__ void __launch_bounds__(kElementwiseThreads, 8) gated_kernel(const Gated p) {
  const Position at(p.extent);
  if (at.row >= p.extent.rows) return;
  const Vec<T, N> gate = at.template read<T, N>(p.gate), up = at.template read<T, N>(p.up);
  at.write(p.product, gated_vector<Activation>(gate, up));
}

template <typename Activation, typename T, int N>
__global__ void __launch_bounds__(kElementwiseThreads, 8) gated_backward_kernel(const Gated p) {
  const Position at(p.extent);
  if (at.row >= p.extent.rows) return;
  const Vec<T, N> grad_out = at.template read<T, N>(p.grad_out);
  Vec<T, N> gate = at.template read<T, N>(p.gate), up = at.template read<T, N>(p.up);
  const Vec<T, N> product = gated_grad_vector<Activation>(grad_out, gate, up);
  at.write(p.grad_gate, gate);
  at.write(p.grad_up, up);
  if (p.product.data) at.write(p.product, product);
}

// The columns of p.extent are vectors of N elements.
template <typename Activation, typename T, int N>
void launch_gated(const Gated& p, cudaStream_t stream) {
  const unsigned blocks = elementwise_blocks(p.extent);
  if (p.grad_out.data != nullptr) {
    gated_backward_kernel<Activation, T, N><<<blocks, kElementwiseThreads, 0, stream>>>(p);
  } else {
    gated_kernel<Activation, T, N><<<blocks, kElementwiseThreads, 0, stream>>>(p);
  }
}

}  // namespace liger
