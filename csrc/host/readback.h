// Numbers that a kernel reports to the host without stopping either: the kernel writes them to host memory,
// and the host waits for that kernel only where it needs them, when the device has other work already.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace liger {

// Whether a CUDA graph is being captured on the stream: then nothing may be waited for.
bool is_capturing(cudaStream_t stream, const char* op);

// For one use, on the current device. Its memory and event come from a pool and go back there, so that a call
// allocates nothing after the first; any number of threads may have one at a time.
class Readback {
 public:
  static constexpr int kNumbers = 2;

  Readback(int device, const char* op);
  ~Readback();
  Readback(const Readback&) = delete;
  Readback& operator=(const Readback&) = delete;

  // Where the kernel writes.
  int32_t* numbers() const { return slot_.numbers; }
  // After the launch of the kernel.
  void mark(cudaStream_t stream);
  // Until the kernel is done; numbers() may be read then.
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
