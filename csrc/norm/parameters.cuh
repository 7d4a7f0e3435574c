// The weight and the bias of a norm, in the dtype of the activations or in float32.
#pragma once

#include "device/vec.cuh"

namespace liger {

// offset + parameter at N columns; `otherwise` without a parameter.
template <typename T, int N>
__device__ __forceinline__ void load_parameter(const void* parameter, bool is_float, float offset,
                                               float otherwise, int64_t column, float (&out)[N]) {
  if (parameter == nullptr) {
#pragma unroll
    for (int i = 0; i < N; ++i) out[i] = otherwise;
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
