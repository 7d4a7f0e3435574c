// SPDX-License-Identifier: BSD-3-Clause

// The weight and the bias of a norm, in the dtype of the activations or in float32.
#pragma once

#include "device/vec.cuh"

namespace liger {

// offset + parameter for N columns; `default_value` if the parameter is null. For N > 1 the parameter at
// `column` is aligned for vectors of N elements, up to 16 bytes.
template <typename T, int N>
__device__ __forceinline__ void load_parameter(const void* parameter, bool is_float, float offset,
                                               float default_value, int64_t column, float (&out)[N]) {
  if (parameter == nullptr) {
#pragma unroll
    for (int i = 0; i < N; ++i) out[i] = default_value;
    return;
  }
  if (is_float) {
    load_floats<N>(static_cast<const float*>(parameter) + column, out);
  } else {
    load_floats<N>(static_cast<const T*>(parameter) + column, out);
  }
#pragma unroll
  for (int i = 0; i < N; ++i) out[i] += offset;
}

}  // namespace liger
