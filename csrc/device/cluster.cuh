// SPDX-License-Identifier: BSD-3-Clause

// Thread-block clusters and bulk copies of sm_90 and later: a thin layer over PTX.
//
// Everything here may only be called where __CUDA_ARCH__ >= 900.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace liger {

__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// One 16-byte store, as in store_streaming().
__device__ __forceinline__ void store_shared(void* p, float x, float y, float z, float w) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(p)), "f"(x), "f"(y), "f"(z),
               "f"(w)
               : "memory");
}

// --- cluster -----------------------------------------------------------------------------------------------

// A thread may write to the shared memory of another block only after that block has started. Arrive early
// and wait late to hide the latency.
__device__ __forceinline__ void cluster_arrive_relaxed() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// --- mbarrier and bulk copy --------------------------------------------------------------------------------

// One arrival and its expected bytes complete a phase. The block needs a barrier after the fence.
__device__ __forceinline__ void mbarrier_init(uint64_t* barrier) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(barrier)) : "memory");
}
__device__ __forceinline__ void mbarrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void mbarrier_arrive_expect(uint64_t* barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
               "r"(bytes)
               : "memory");
}
// barrier: its shared address, which a loop need not compute again.
__device__ __forceinline__ void mbarrier_wait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}\n" ::"r"(barrier),
      "r"(parity)
      : "memory");
}
__device__ __forceinline__ void mbarrier_wait(uint64_t* barrier, uint32_t parity) {
  mbarrier_wait(shared_address(barrier), parity);
}

// The same, with acquire semantics at cluster scope: for data that other blocks have sent.
__device__ __forceinline__ void mbarrier_wait_cluster(uint64_t* barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}\n" ::"r"(shared_address(barrier)),
      "r"(parity)
      : "memory");
}

// st.async of kWords words to the block of that rank, at the offset that `local` has in this block; the bytes
// complete on its mbarrier. A thread that waits on that mbarrier sees the data without a fence;
// barrier.cluster with release semantics would be a device-wide fence over all earlier stores of the thread.
// local: aligned to 16 bytes for four words and more, to 8 for two.
template <int kWords>
__device__ __forceinline__ void cluster_store_async(void* local, uint64_t* barrier, uint32_t rank,
                                                    const uint32_t* words) {
  uint32_t remote, counter;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(shared_address(local)), "r"(rank));
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
               : "=r"(counter)
               : "r"(shared_address(barrier)), "r"(rank));
#pragma unroll
  for (int i = 0; i < kWords / 4; ++i) {
    asm volatile(
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];" ::
            "r"(remote + 16 * i),
        "r"(words[4 * i]), "r"(words[4 * i + 1]), "r"(words[4 * i + 2]), "r"(words[4 * i + 3]), "r"(counter)
        : "memory");
  }
  if constexpr (kWords % 4 >= 2) {
    constexpr int i = kWords / 4 * 4;
    asm volatile(
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [%0], {%1, %2}, [%3];" ::"r"(
            remote + 4 * i),
        "r"(words[i]), "r"(words[i + 1]), "r"(counter)
        : "memory");
  }
  if constexpr (kWords % 2 == 1) {
    constexpr int i = kWords - 1;
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(
                     remote + 4 * i),
                 "r"(words[i]), "r"(counter)
                 : "memory");
  }
}

// Orders earlier accesses of this thread to shared memory before later bulk copies (the async proxy).
__device__ __forceinline__ void async_fence() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// cp.async.bulk from global to shared memory; addresses and size are multiples of 16 bytes.
__device__ __forceinline__ void bulk_load(void* destination, const void* source, uint32_t bytes,
                                          uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
          shared_address(destination)),
      "l"(source), "r"(bytes), "r"(shared_address(barrier))
      : "memory");
}

}  // namespace liger
