// SPDX-License-Identifier: BSD-3-Clause

// The wgmma instructions of the GEMM, by element type and number of columns.
#pragma once

#include <cuda_fp16.h>

#include <type_traits>

#include "lm_head/sm90/gemm/ptx.cuh"

#ifdef LIGER_SM90A
namespace liger::sm90 {

// The accumulators of an instruction: their names in the assembly, and their constraints.
// clang-format off: one line per 16, and per instruction.
#define LIGER_NAMES_8 "%0, %1, %2, %3"
#define LIGER_NAMES_64 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define LIGER_NAMES_128 LIGER_NAMES_64 \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define LIGER_NAMES_160 LIGER_NAMES_128 \
  ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
#define LIGER_NAMES_192 LIGER_NAMES_160 \
  ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define LIGER_NAMES_224 LIGER_NAMES_192 \
  ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111"
#define LIGER_NAMES_240 LIGER_NAMES_224 \
  ", %112, %113, %114, %115, %116, %117, %118, %119"
#define LIGER_NAMES_256 LIGER_NAMES_240 \
  ", %120, %121, %122, %123, %124, %125, %126, %127"
#define LIGER_SUMS(i) \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define LIGER_SUMS_8 "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
#define LIGER_SUMS_64 LIGER_SUMS(0), LIGER_SUMS(8), LIGER_SUMS(16), LIGER_SUMS(24)
#define LIGER_SUMS_128 LIGER_SUMS_64, LIGER_SUMS(32), LIGER_SUMS(40), LIGER_SUMS(48), LIGER_SUMS(56)
#define LIGER_SUMS_160 LIGER_SUMS_128, LIGER_SUMS(64), LIGER_SUMS(72)
#define LIGER_SUMS_192 LIGER_SUMS_160, LIGER_SUMS(80), LIGER_SUMS(88)
#define LIGER_SUMS_224 LIGER_SUMS_192, LIGER_SUMS(96), LIGER_SUMS(104)
#define LIGER_SUMS_240 LIGER_SUMS_224, LIGER_SUMS(112)
#define LIGER_SUMS_256 LIGER_SUMS_240, LIGER_SUMS(120)
// The other operands are numbered from columns / 2 on.
#define LIGER_WGMMA(type, columns, o0, o1, o2, o3, o4, o5) \
  asm volatile( \
      "{\n" \
      ".reg .pred p;\n" \
      ".reg .b64 a, b;\n" \
      "mov.b64 a, {%" #o0 ", %" #o5 "};\n" \
      "mov.b64 b, {%" #o1 ", %" #o5 "};\n" \
      "setp.ne.b32 p, %" #o2 ", 0;\n" \
      "wgmma.mma_async.sync.aligned.m64n" #columns "k16.f32." type "." type \
      " {" LIGER_NAMES_##columns "}, a, b, p, 1, 1, %" #o3 ", %" #o4 ";\n" \
      "}\n" \
      : LIGER_SUMS_##columns \
      : "r"(a), "r"(b), "r"(keep), "n"(int{kAMn}), "n"(int{kBMn}), "n"(kDescriptorHigh))
// clang-format on
#define LIGER_WGMMA_OF_TYPE(type)                         \
  if constexpr (kColumns == 256) {                        \
    LIGER_WGMMA(type, 256, 128, 129, 130, 131, 132, 133); \
  } else if constexpr (kColumns == 240) {                 \
    LIGER_WGMMA(type, 240, 120, 121, 122, 123, 124, 125); \
  } else if constexpr (kColumns == 224) {                 \
    LIGER_WGMMA(type, 224, 112, 113, 114, 115, 116, 117); \
  } else if constexpr (kColumns == 192) {                 \
    LIGER_WGMMA(type, 192, 96, 97, 98, 99, 100, 101);     \
  } else if constexpr (kColumns == 160) {                 \
    LIGER_WGMMA(type, 160, 80, 81, 82, 83, 84, 85);       \
  } else if constexpr (kColumns == 128) {                 \
    LIGER_WGMMA(type, 128, 64, 65, 66, 67, 68, 69);       \
  } else if constexpr (kColumns == 64) {                  \
    LIGER_WGMMA(type, 64, 32, 33, 34, 35, 36, 37);        \
  } else {                                                \
    LIGER_WGMMA(type, 8, 4, 5, 6, 7, 8, 9);               \
  }

// d (64 x kColumns, this warpgroup's) = a (64 x 16) b (16 x kColumns) + (keep ? d : 0); a and b are the low
// words of descriptors.
template <typename T, int kColumns, bool kAMn, bool kBMn>
__device__ __forceinline__ void wgmma(float* d, uint32_t a, uint32_t b, int keep) {
  static_assert(kColumns == 256 || kColumns == 240 || kColumns == 224 || kColumns == 192 || kColumns == 160 ||
                kColumns == 128 || kColumns == 64 || kColumns == 8);
  static_assert(std::is_same_v<T, __nv_bfloat16> || std::is_same_v<T, __half>);
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    LIGER_WGMMA_OF_TYPE("bf16")
  } else {
    LIGER_WGMMA_OF_TYPE("f16")
  }
}

#undef LIGER_WGMMA_OF_TYPE
#undef LIGER_WGMMA
#undef LIGER_SUMS_256
#undef LIGER_NAMES_256
#undef LIGER_SUMS_240
#undef LIGER_NAMES_240
#undef LIGER_SUMS_224
#undef LIGER_NAMES_224
#undef LIGER_SUMS_192
#undef LIGER_NAMES_192
#undef LIGER_SUMS_160
#undef LIGER_NAMES_160
#undef LIGER_SUMS_128
#undef LIGER_NAMES_128
#undef LIGER_SUMS_64
#undef LIGER_SUMS_8
#undef LIGER_NAMES_8
#undef LIGER_NAMES_64
#undef LIGER_SUMS

}  // namespace liger::sm90
#endif
