// SPDX-License-Identifier: BSD-3-Clause

// PTX of the grouped GEMMs, beyond lm_head/sm90/gemm/ptx.cuh. No other file here has assembly, so that a test
// can run them on a CPU.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "device/async.cuh"
#include "device/cluster.cuh"

namespace liger::experts {

// The registers of a thread of the producer and of a consumer; the sum over all warpgroups is constant.
__device__ __forceinline__ void give_registers() {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
#endif
}
__device__ __forceinline__ void take_registers() {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
#endif
}

// cp.async of 16 bytes to a shared address, or zeros.
__device__ __forceinline__ void copy_or_zero(uint32_t destination, const void* source, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(destination), "l"(source),
               "r"(valid ? 16 : 0)
               : "memory");
}
// Arrives at the mbarrier, which counts this thread, once all earlier copies of the thread have landed.
__device__ __forceinline__ void copies_arrive(uint64_t* barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(shared_address(barrier)) : "memory");
}

// From a shared address.
__device__ __forceinline__ void load_shared(uint32_t from, uint32_t& word) {
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(word) : "r"(from) : "memory");
}
__device__ __forceinline__ void load_shared(uint32_t from, uint32_t& first, uint32_t& second) {
  asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(first), "=r"(second) : "r"(from) : "memory");
}

// NaN if either is.
__device__ __forceinline__ float min_or_nan(float a, float b) {
  float least;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(least) : "f"(a), "f"(b));
  return least;
}

// 16 bytes, in one instruction: of an assignment of uint4 the compiler often makes four.
__device__ __forceinline__ void store_vector(void* to, const uint32_t (&words)[4]) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(words[0]), "r"(words[1]),
               "r"(words[2]), "r"(words[3])
               : "memory");
}

// Arrives at a named barrier of `threads` threads without waiting.
__device__ __forceinline__ void arrive_threads(int barrier, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// Sets an accumulator before the mainloop; the compiler moves it nowhere else.
__device__ __forceinline__ void set_sum(float& sum, float value) {
  asm volatile("mov.b32 %0, %1;" : "=f"(sum) : "f"(value));
}

// Transposes an 8 x 8 matrix of 16-bit elements, a row of which is in four lanes.
__device__ __forceinline__ uint32_t transpose_matrix(uint32_t word) {
  uint32_t transposed;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(transposed) : "r"(word));
  return transposed;
}

}  // namespace liger::experts
