// SPDX-License-Identifier: BSD-3-Clause

// One switch from a torch dtype to the CUDA type of a kernel template.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "host/checks/checks.h"

namespace liger {

template <typename T>
struct TypeTag {
  using type = T;
};

// Calls body(TypeTag<float | __half | __nv_bfloat16>{}); the dtype was checked by require_cuda_dtype.
template <typename Body>
void dispatch_dtype(ScalarType dtype, Body&& body) {
  switch (dtype) {
    case ScalarType::Half:
      body(TypeTag<__half>{});
      break;
    case ScalarType::BFloat16:
      body(TypeTag<__nv_bfloat16>{});
      break;
    case ScalarType::Float:
      body(TypeTag<float>{});
      break;
    default:
      require(false, "liger: no CUDA kernel for ", dtype_name(dtype));
  }
}

}  // namespace liger
