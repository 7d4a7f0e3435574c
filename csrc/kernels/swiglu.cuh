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

inline constexpr int kSwigluThreads = 256;

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

// The vectors of one thread: consecutive threads take consecutive vectors, row after row.
template <int U>
struct SwigluPosition {
  int64_t row[U], column[U];  // column in vectors

  __device__ __forceinline__ explicit SwigluPosition(const Swiglu& p) {
    constexpr int kTile = kSwigluThreads * U;
    const int64_t first = int64_t{blockIdx.x} * kTile;
    const int64_t first_row = p.rows == 1 ? 0 : first / p.columns;
    const int64_t first_column = first - first_row * p.columns;
#pragma unroll
    for (int u = 0; u < U; ++u) {
      row[u] = first_row;
      column[u] = first_column + threadIdx.x + u * kSwigluThreads;
      if (column[u] < p.columns) continue;
      if (p.columns >= kTile) {
        ++row[u];
        column[u] -= p.columns;
      } else {
        const uint32_t whole = static_cast<uint32_t>(column[u]) / static_cast<uint32_t>(p.columns);
        row[u] += whole;
        column[u] -= whole * p.columns;
      }
    }
  }
};

template <typename T, int N, int U>
__global__ void __launch_bounds__(kSwigluThreads, 4) swiglu_kernel(const Swiglu p) {
  const SwigluPosition<U> at(p);
  Vec<T, N> gate[U], up[U];
#pragma unroll
  for (int u = 0; u < U; ++u) {
    if (at.row[u] >= p.rows) continue;
    gate[u] = load<T, N>(static_cast<const T*>(p.gate.data) + at.row[u] * p.gate.stride + at.column[u] * N);
    up[u] = load<T, N>(static_cast<const T*>(p.up.data) + at.row[u] * p.up.stride + at.column[u] * N);
  }
#pragma unroll
  for (int u = 0; u < U; ++u) {
    if (at.row[u] >= p.rows) continue;
    T* product = static_cast<T*>(p.product.data) + at.row[u] * p.product.stride + at.column[u] * N;
    store(product, swiglu_vector(gate[u], up[u]));
  }
}

template <typename T, int N, int U>
__global__ void __launch_bounds__(kSwigluThreads, 4) swiglu_backward_kernel(const Swiglu p) {
  const SwigluPosition<U> at(p);
  Vec<T, N> grad_out[U], gate[U], up[U];
#pragma unroll
  for (int u = 0; u < U; ++u) {
    if (at.row[u] >= p.rows) continue;
    grad_out[u] =
        load<T, N>(static_cast<const T*>(p.grad_out.data) + at.row[u] * p.grad_out.stride + at.column[u] * N);
    gate[u] = load<T, N>(static_cast<const T*>(p.gate.data) + at.row[u] * p.gate.stride + at.column[u] * N);
    up[u] = load<T, N>(static_cast<const T*>(p.up.data) + at.row[u] * p.up.stride + at.column[u] * N);
  }
#pragma unroll
  for (int u = 0; u < U; ++u) {
    if (at.row[u] >= p.rows) continue;
    const Vec<T, N> product = swiglu_grad_vector(grad_out[u], gate[u], up[u]);
    store(static_cast<T*>(p.grad_gate.data) + at.row[u] * p.grad_gate.stride + at.column[u] * N, gate[u]);
    store(static_cast<T*>(p.grad_up.data) + at.row[u] * p.grad_up.stride + at.column[u] * N, up[u]);
    if (p.product.data) {
      store(static_cast<T*>(p.product.data) + at.row[u] * p.product.stride + at.column[u] * N, product);
    }
  }
}

// p.columns in vectors of N. One vector per thread forward and two backward measure fastest: full occupancy
// keeps more loads under way than unrolling does.
template <typename T, int N>
void launch_swiglu(const Swiglu& p, cudaStream_t stream) {
  const bool backward = p.grad_out.data != nullptr;
  const int64_t tile = kSwigluThreads * (backward ? 2 : 1);
  const unsigned blocks = static_cast<unsigned>((p.rows * p.columns + tile - 1) / tile);
  if (backward) {
    swiglu_backward_kernel<T, N, 2><<<blocks, kSwigluThreads, 0, stream>>>(p);
  } else {
    swiglu_kernel<T, N, 1><<<blocks, kSwigluThreads, 0, stream>>>(p);
  }
}

}  // namespace liger
