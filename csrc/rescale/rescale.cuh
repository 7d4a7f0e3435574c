// SPDX-License-Identifier: BSD-3-Clause

// x * factor with a scalar in device memory, so that the host does not synchronise.
//
// Grid-stride loop over at most 8 blocks per SM. With N = kVec<T> both tensors are aligned to 16 bytes and
// their size is a multiple of N; N = 1 has no requirement.
#pragma once

#include <algorithm>

#include "device/vec.cuh"

namespace liger {

enum class FactorType { kHalf, kBFloat16, kFloat, kDouble };

struct Rescale {
  const void* in;
  void* out;  // may equal `in`: then a factor of 1 reads and writes no element
  const void* factor;
  FactorType factor_type;
  int64_t count;  // vectors
};

__device__ __forceinline__ float read_factor(const void* factor, FactorType type) {
  switch (type) {
    case FactorType::kHalf:
      return to_float(*static_cast<const __half*>(factor));
    case FactorType::kBFloat16:
      return to_float(*static_cast<const __nv_bfloat16*>(factor));
    case FactorType::kFloat:
      return *static_cast<const float*>(factor);
    default:
      return static_cast<float>(*static_cast<const double*>(factor));
  }
}

// In place, a factor of 1 costs only the launch: the grid is small for that reason.
template <typename T, int N>
__global__ void __launch_bounds__(256) rescale_kernel(const Rescale p) {
  constexpr int kUnroll = 4;
  const float factor = read_factor(p.factor, p.factor_type);
  if (p.in == p.out && factor == 1.0f) return;
  const T* in = static_cast<const T*>(p.in);
  T* out = static_cast<T*>(p.out);
  const int64_t step = int64_t{gridDim.x} * blockDim.x * kUnroll;
  for (int64_t first = int64_t{blockIdx.x} * blockDim.x * kUnroll + threadIdx.x; first < p.count;
       first += step) {
    Vec<T, N> x[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int64_t i = first + u * blockDim.x;
      if (i < p.count) x[u] = load<T, N>(in + i * N);
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int64_t i = first + u * blockDim.x;
      if (i >= p.count) break;
      float value[N];
      unpack(x[u], value);
#pragma unroll
      for (int j = 0; j < N; ++j) value[j] *= factor;
      store(out + i * N, pack<T, N>(value));
    }
  }
}

template <typename T, int N>
void launch_rescale(const Rescale& p, int sm_count, cudaStream_t stream) {
  const int64_t blocks = std::min<int64_t>((p.count + 1023) / 1024, int64_t{sm_count} * 8);
  rescale_kernel<T, N><<<static_cast<unsigned>(blocks), 256, 0, stream>>>(p);
}

}  // namespace liger
