// SPDX-License-Identifier: BSD-3-Clause

// Declarations for csrc/device/vec.cuh; no kernel of float16 runs.
#pragma once

#include "machine.h"

struct __half {
  uint16_t bits;
};
struct __half2 {
  __half x, y;
};
inline float __half2float(__half) {
  return NAN;
}
__half __float2half_rn(float);
float2 __half22float2(__half2);
__half2 __floats2half2_rn(float, float);
