// SPDX-License-Identifier: BSD-3-Clause

// Asynchronous readback: a kernel writes numbers to pinned host memory, and the host waits for that kernel
// only when it needs them, after it has launched further work.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace liger {

// True while a CUDA graph is captured on the stream: the host must not wait then.
bool is_capturing(cudaStream_t stream, const char* op);

// An object is for one use, on the current device. Memory and event come from a pool, so only the first call
// allocates. Thread-safe.
class Readback {
 public:
  static constexpr int kNumbers = 2;

  Readback(int device, const char* op);
  ~Readback();
  Readback(const Readback&) = delete;
  Readback& operator=(const Readback&) = delete;

  // The destination of the kernel.
  int32_t* numbers() const { return slot_.numbers; }
  // Call after the launch of the kernel.
  void mark(cudaStream_t stream);
  // Waits until the kernel is done; numbers() may be read then.
  void wait();

 private:
  struct Slot {
    int32_t* numbers;
    cudaEvent_t done;
  };
  struct Pool;
  static Pool& pool();

  int device_;
  const char* op_;
  Slot slot_{};
  bool pending_ = false;
};

}  // namespace liger
