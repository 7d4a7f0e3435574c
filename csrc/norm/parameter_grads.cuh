// SPDX-License-Identifier: BSD-3-Clause

// The gradients of a norm's parameters: sums over all rows.
#pragma once

#include <type_traits>

#include "device/vec.cuh"
#include "norm/sum_partials.cuh"

namespace liger {

// Where a kernel writes its sums for K parameters: to partial sums, a row of `stride` elements per block, or,
// with a single block, to the gradients.
template <int K>
struct ParameterGrads {
  void* data[K];  // null: not needed
  int64_t stride;
  bool is_float;  // else of the dtype of x

  template <typename T, int N>
  __device__ __forceinline__ void store(int k, int64_t first, const float (&sums)[N]) const {
    if (is_float) {
      store_floats<N>(static_cast<float*>(data[k]) + first, sums);
    } else {
      liger::store(static_cast<T*>(data[k]) + first, pack<T, N>(sums));
    }
  }
};

// Adds `partials` rows of partial sums of parameters of `length` elements.
template <typename T, int K>
void sum_partials(const ParameterGrads<K>& sums, int partials, const ParameterGrads<K>& grads, int64_t length,
                  bool overlap, cudaStream_t stream) {
  const auto launch = [&](auto tag) {
    using W = typename decltype(tag)::type;
    PartialSums<W, K> p{};
    p.stride = sums.stride;
    int needed = 0;
    for (int k = 0; k < K; ++k) {
      if (!grads.data[k]) continue;
      p.partial[needed] = static_cast<const float*>(sums.data[k]);
      p.count[needed] = partials;
      p.out[needed++] = static_cast<W*>(grads.data[k]);
    }
    launch_sum_partials(p, needed, length, overlap, stream);
  };
  grads.is_float ? launch(std::type_identity<float>{}) : launch(std::type_identity<T>{});
}

// Runs launch(sums), a backward that writes `partials` sums of each parameter whose gradient is needed. A
// single sum is the gradient; more go to a workspace, workspace(number of floats), and a second launch adds
// them. grads is a copy: launch() may overwrite the caller's with the sums.
template <typename T, int K, typename Launch, typename Workspace>
void launch_with_sums(const ParameterGrads<K> grads, int64_t length, int partials, bool overlap,
                      cudaStream_t stream, const Launch& launch, const Workspace& workspace) {
  int needed = 0;
  for (const void* grad : grads.data) needed += grad != nullptr;
  if (needed == 0 || partials == 1) {
    launch(grads);
    return;
  }
  ParameterGrads<K> sums{{}, needed * length, true};
  float* next = workspace(partials * sums.stride);
  for (int k = 0; k < K; ++k) {
    if (!grads.data[k]) continue;
    sums.data[k] = next;
    next += length;
  }
  launch(sums);
  sum_partials<T>(sums, partials, grads, length, overlap, stream);
}

}  // namespace liger
