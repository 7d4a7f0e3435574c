// SPDX-License-Identifier: BSD-3-Clause

// bfloat16 and what else csrc/device/vec.cuh names.
#pragma once

#include "machine.h"

struct alignas(16) float4 {
  float x, y, z, w;
};
struct int4 {
  int x, y, z, w;
};
struct __nv_bfloat162 {
  __nv_bfloat16 x, y;
};
inline float4 make_float4(float x, float y, float z, float w) {
  return {x, y, z, w};
}
inline int4 __ldcs(const int4* p) {
  return *p;
}
inline void __stcs(int4* p, int4 value) {
  *p = value;
}
inline void __stwb(int4* p, int4 value) {
  *p = value;
}
inline float __uint_as_float(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}
inline uint16_t __bfloat16_as_ushort(__nv_bfloat16 x) {
  return x.bits;
}
inline __nv_bfloat16 __float2bfloat16_rn(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return {static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}
inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) {
  return {__float2bfloat16_rn(x), __float2bfloat16_rn(y)};
}
inline float __fmul_rn(float x, float y) {
  return x * y;
}
inline float __fsub_rn(float x, float y) {
  return x - y;
}
inline float rsqrtf(float x) {
  return 1.0f / std::sqrt(x);
}
