// SPDX-License-Identifier: BSD-3-Clause

// Asynchronous copies to shared memory, and barriers of a part of a block.
#pragma once

#include "device/vec.cuh"

namespace liger {

// Asynchronous copy from global to shared memory, which bypasses registers (cp.async). Fewer than 4 bytes,
// which cp.async does not support, are copied synchronously.
template <typename T, int N>
__device__ __forceinline__ void copy_async(Vec<T, N>* shared, const T* global) {
  constexpr int kBytes = sizeof(Vec<T, N>);
  if constexpr (kBytes == 16) {
    const unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(shared));
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address), "l"(global) : "memory");
  } else if constexpr (kBytes >= 4) {
    const unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(shared));
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(address), "l"(global), "n"(kBytes)
                 : "memory");
  } else {
    *shared = load<T, N>(global);
  }
}
__device__ __forceinline__ void commit_async() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
// Waits until at most `pending` (0 to 3) of this thread's committed copy groups are in flight.
__device__ __forceinline__ void wait_async(int pending) {
  switch (pending) {
    case 0:
      asm volatile("cp.async.wait_group 0;" ::: "memory");
      break;
    case 1:
      asm volatile("cp.async.wait_group 1;" ::: "memory");
      break;
    case 2:
      asm volatile("cp.async.wait_group 2;" ::: "memory");
      break;
    default:
      asm volatile("cp.async.wait_group 3;" ::: "memory");
      break;
  }
}

// Synchronises `threads` threads of the block, whole warps that all name this barrier (1 to 15).
__device__ __forceinline__ void sync_threads(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

}  // namespace liger
