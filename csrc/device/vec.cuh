// SPDX-License-Identifier: BSD-3-Clause

// Vectorised memory accesses (16 bytes) of float16, bfloat16 and float32, and conversion to and from float.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace liger {

// Elements of T per 16-byte access.
template <typename T>
inline constexpr int kVec = 16 / sizeof(T);

template <typename T, int N>
struct alignas(sizeof(T) * N) Vec {
  T v[N];
};

template <typename T>
__device__ __forceinline__ float to_float(T x) {
  return static_cast<float>(x);
}
template <>
__device__ __forceinline__ float to_float<__half>(__half x) {
  return __half2float(x);
}
template <>
__device__ __forceinline__ float to_float<__nv_bfloat16>(__nv_bfloat16 x) {
  // The compiler can optimise a shift. The conversion instruction of sm_90 is opaque to it and costs
  // registers.
  return __uint_as_float(uint32_t{__bfloat16_as_ushort(x)} << 16);
}

template <typename T>
__device__ __forceinline__ T from_float(float x);
template <>
__device__ __forceinline__ float from_float<float>(float x) {
  return x;
}
template <>
__device__ __forceinline__ __half from_float<__half>(float x) {
  return __float2half_rn(x);
}
template <>
__device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}

// x rounded to T and converted back to float.
template <typename T>
__device__ __forceinline__ float round_to(float x) {
  return to_float(from_float<T>(x));
}

// Conversions of a whole vector. Half types are handled in pairs, as 32-bit words: as single elements, each
// element would occupy a register for the lifetime of the vector.
template <typename T, int N>
inline constexpr bool kPaired = sizeof(T) == 2 && N % 2 == 0;

template <typename T, int N>
__device__ __forceinline__ void unpack(const Vec<T, N>& x, float (&out)[N]) {
  if constexpr (kPaired<T, N>) {
    const uint32_t* words = reinterpret_cast<const uint32_t*>(&x);
#pragma unroll
    for (int i = 0; i < N / 2; ++i) {
      if constexpr (std::is_same_v<T, __half>) {
        const uint32_t word = words[i];
        const float2 two = __half22float2(*reinterpret_cast<const __half2*>(&word));
        out[2 * i] = two.x, out[2 * i + 1] = two.y;
      } else {
        out[2 * i] = __uint_as_float(words[i] << 16);
        out[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
      }
    }
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) out[i] = to_float(x.v[i]);
  }
}
template <typename T, int N>
__device__ __forceinline__ Vec<T, N> pack(const float (&x)[N]) {
  Vec<T, N> out;
  if constexpr (kPaired<T, N>) {
    uint32_t* words = reinterpret_cast<uint32_t*>(&out);
#pragma unroll
    for (int i = 0; i < N / 2; ++i) {
      if constexpr (std::is_same_v<T, __half>) {
        const __half2 two = __floats2half2_rn(x[2 * i], x[2 * i + 1]);
        words[i] = *reinterpret_cast<const uint32_t*>(&two);
      } else {
        const __nv_bfloat162 two = __floats2bfloat162_rn(x[2 * i], x[2 * i + 1]);
        words[i] = *reinterpret_cast<const uint32_t*>(&two);
      }
    }
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) out.v[i] = from_float<T>(x[i]);
  }
  return out;
}

// Rounds each value to T.
template <typename T, int N>
__device__ __forceinline__ void round_values(float (&x)[N]) {
  unpack(pack<T, N>(x), x);
}

// Products in T. A product of two values of a half type is exact in float, so this rounds as often as float
// does.
template <typename T, int N>
__device__ __forceinline__ Vec<T, N> multiply(const Vec<T, N>& a, const Vec<T, N>& b) {
  using Pair = std::conditional_t<std::is_same_v<T, __half>, __half2, __nv_bfloat162>;
  static_assert(kPaired<T, N>);
  Vec<T, N> out;
#pragma unroll
  for (int i = 0; i < N / 2; ++i)
    reinterpret_cast<Pair*>(&out)[i] =
        __hmul2_rn(reinterpret_cast<const Pair*>(&a)[i], reinterpret_cast<const Pair*>(&b)[i]);
  return out;
}

template <typename T, int N>
__device__ __forceinline__ Vec<T, N> load(const T* p) {
  return *reinterpret_cast<const Vec<T, N>*>(p);
}
template <typename T, int N>
__device__ __forceinline__ void store(T* p, const Vec<T, N>& x) {
  *reinterpret_cast<Vec<T, N>*>(p) = x;
}

// A load from shared memory that the compiler does not replace by the registers of an earlier load. Use it
// for a value that is read twice and would take too many registers in between.
template <typename T, int N>
__device__ __forceinline__ Vec<T, N> load_again(const Vec<T, N>* shared) {
  static_assert(sizeof(Vec<T, N>) == 16);
  uint4 raw;
  asm volatile("ld.volatile.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(raw.x), "=r"(raw.y), "=r"(raw.z), "=r"(raw.w)
               : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(shared))));
  return *reinterpret_cast<const Vec<T, N>*>(&raw);
}

// Load with an evict-first hint, for data that no later block reads.
template <typename T, int N>
__device__ __forceinline__ Vec<T, N> load_streaming(const T* p) {
  static_assert(sizeof(Vec<T, N>) == 16);
  const int4 raw = __ldcs(reinterpret_cast<const int4*>(p));
  return *reinterpret_cast<const Vec<T, N>*>(&raw);
}
// Store with an evict-first hint. It is always one access, while the compiler may split store() in a large
// kernel.
template <typename T, int N>
__device__ __forceinline__ void store_streaming(T* p, const Vec<T, N>& x) {
  static_assert(sizeof(Vec<T, N>) == 16);
  __stcs(reinterpret_cast<int4*>(p), *reinterpret_cast<const int4*>(&x));
}
// store() to global memory as one access, for kernels in which the compiler splits store(), down to single
// elements.
template <typename T, int N>
__device__ __forceinline__ void store_whole(T* p, const Vec<T, N>& x) {
  if constexpr (sizeof(Vec<T, N>) == 16) {
    __stwb(reinterpret_cast<int4*>(p), *reinterpret_cast<const int4*>(&x));
  } else {
    store(p, x);
  }
}
// Loads N consecutive elements as floats, in accesses of up to 16 bytes.
template <int N, typename T>
__device__ __forceinline__ void load_floats(const T* p, float (&out)[N]) {
  constexpr int kWidth = N < kVec<T> ? N : kVec<T>;
#pragma unroll
  for (int i = 0; i < N; i += kWidth) {
    const Vec<T, kWidth> x = load<T, kWidth>(p + i);
#pragma unroll
    for (int j = 0; j < kWidth; ++j) out[i + j] = to_float(x.v[j]);
  }
}
template <int N>
__device__ __forceinline__ void store_floats(float* p, const float (&x)[N]) {
  constexpr int kWidth = N < 4 ? N : 4;
#pragma unroll
  for (int i = 0; i < N; i += kWidth) {
    Vec<float, kWidth> out;
#pragma unroll
    for (int j = 0; j < kWidth; ++j) out.v[j] = x[i + j];
    store(p + i, out);
  }
}

inline bool is_aligned16(const void* p) {
  return reinterpret_cast<uintptr_t>(p) % 16 == 0;
}

}  // namespace liger
