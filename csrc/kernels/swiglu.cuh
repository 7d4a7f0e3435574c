// SwiGLU, silu(gate) * up, forward and backward. The backward computes the sigmoid again from gate.
//
// Tensors are rows with one stride each, so that the halves of a packed (rows, 2I) tensor are read and
// written in place; tensors without gaps are one long row. The in-place backward is the same kernel with
// outputs that are its inputs: every thread reads all it needs before it writes, and no other thread touches
// the same elements.
#pragma once

#include "common/vec.cuh"

namespace liger {

struct SwigluInput {
  const void* data;
  int64_t stride;  // elements between rows
};
struct SwigluOutput {
  void* data;
  int64_t stride;
};

struct Swiglu {
  SwigluInput gate, up, grad_out;            // grad_out: backward only
  SwigluOutput product, grad_gate, grad_up;  // the gradients: backward only, and there product may be null
  int64_t rows, columns;                     // columns in vectors
};

inline constexpr int kSwigluThreads = 128;

// float32 gets a sigmoid as exact as the C library's. Half types get the fast one: its error, a few units of
// 2^-22, is far below their rounding.
template <typename T>
__device__ __forceinline__ float sigmoid(float x) {
  if constexpr (sizeof(T) == 4) {
    return 1.0f / (1.0f + expf(-x));
  } else {
    return __fdividef(1.0f, 1.0f + __expf(-x));
  }
}

template <typename T, int N>
__device__ __forceinline__ Vec<T, N> swiglu_vector(const Vec<T, N>& gate, const Vec<T, N>& up) {
  float g[N], u[N];
  unpack(gate, g);
  unpack(up, u);
#pragma unroll
  for (int i = 0; i < N; ++i) g[i] = g[i] * sigmoid<T>(g[i]) * u[i];
  return pack<T, N>(g);
}

// gate and up are replaced by their gradients; the product comes back.
template <typename T, int N>
__device__ __forceinline__ Vec<T, N> swiglu_grad_vector(const Vec<T, N>& grad_out, Vec<T, N>& gate,
                                                        Vec<T, N>& up) {
  float d[N], g[N], u[N], product[N];
  unpack(grad_out, d);
  unpack(gate, g);
  unpack(up, u);
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const float s = sigmoid<T>(g[i]), silu = g[i] * s;
    product[i] = silu * u[i];
    g[i] = d[i] * u[i] * fmaf(silu, 1.0f - s, s);
    u[i] = d[i] * silu;
  }
  gate = pack<T, N>(g);
  up = pack<T, N>(u);
  return pack<T, N>(product);
}

// One vector of each tensor per thread, in small blocks: full occupancy keeps more loads under way than
// unrolling does. Consecutive threads take consecutive vectors, row after row.
struct SwigluPosition {
  int64_t row, column;  // column in vectors

  __device__ __forceinline__ explicit SwigluPosition(const Swiglu& p) {
    const int64_t first = int64_t{blockIdx.x} * kSwigluThreads;
    row = p.rows == 1 ? 0 : first / p.columns;
    column = first - row * p.columns + threadIdx.x;
    if (column < p.columns) return;
    if (p.columns >= kSwigluThreads) {
      ++row;
      column -= p.columns;
    } else {
      const uint32_t whole = static_cast<uint32_t>(column) / static_cast<uint32_t>(p.columns);
      row += whole;
      column -= whole * p.columns;
    }
  }
  template <typename T, int N>
  __device__ __forceinline__ Vec<T, N> read(const SwigluInput& x) const {
    return load<T, N>(static_cast<const T*>(x.data) + row * x.stride + column * N);
  }
  template <typename T, int N>
  __device__ __forceinline__ void write(const SwigluOutput& x, const Vec<T, N>& value) const {
    store(static_cast<T*>(x.data) + row * x.stride + column * N, value);
  }
};

template <typename T, int N>
__global__ void __launch_bounds__(kSwigluThreads, 8) swiglu_kernel(const Swiglu p) {
  const SwigluPosition at(p);
  if (at.row >= p.rows) return;
  const Vec<T, N> gate = at.template read<T, N>(p.gate), up = at.template read<T, N>(p.up);
  at.write(p.product, swiglu_vector(gate, up));
}

template <typename T, int N>
__global__ void __launch_bounds__(kSwigluThreads, 8) swiglu_backward_kernel(const Swiglu p) {
  const SwigluPosition at(p);
  if (at.row >= p.rows) return;
  const Vec<T, N> grad_out = at.template read<T, N>(p.grad_out);
  Vec<T, N> gate = at.template read<T, N>(p.gate), up = at.template read<T, N>(p.up);
  const Vec<T, N> product = swiglu_grad_vector(grad_out, gate, up);
  at.write(p.grad_gate, gate);
  at.write(p.grad_up, up);
  if (p.product.data) at.write(p.product, product);
}

// p.columns in vectors of N.
template <typename T, int N>
void launch_swiglu(const Swiglu& p, cudaStream_t stream) {
  const unsigned blocks = static_cast<unsigned>((p.rows * p.columns + kSwigluThreads - 1) / kSwigluThreads);
  if (p.grad_out.data != nullptr) {
    swiglu_backward_kernel<T, N><<<blocks, kSwigluThreads, 0, stream>>>(p);
  } else {
    swiglu_kernel<T, N><<<blocks, kSwigluThreads, 0, stream>>>(p);
  }
}

}  // namespace liger
