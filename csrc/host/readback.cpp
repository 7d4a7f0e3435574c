// SPDX-License-Identifier: BSD-3-Clause
#include "host/readback.h"

#include <map>
#include <mutex>
#include <vector>

#include "host/launch/capture.h"
#include "host/torch.h"

namespace liger {
struct Readback::Pool {
  std::mutex mutex;
  std::map<int, std::vector<Slot>> free;  // by device
};

// Never destroyed: at exit the driver may be unloaded before static objects are destroyed.
Readback::Pool& Readback::pool() {
  static Pool* const pool = new Pool;
  return *pool;
}

bool is_capturing(cudaStream_t stream, const char* op) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  check_cuda(cudaStreamIsCapturing(stream, &status), op);
  return status != cudaStreamCaptureStatusNone;
}

Readback::Readback(int device, const char* op) : device_(device), op_(op) {
  {
    const std::lock_guard<std::mutex> lock(pool().mutex);
    std::vector<Slot>& free = pool().free[device];
    if (!free.empty()) {
      slot_ = free.back();
      free.pop_back();
      return;
    }
  }
  const RelaxedCapture relaxed;
  void* memory = nullptr;
  check_cuda(cudaHostAlloc(&memory, kNumbers * sizeof(int32_t), cudaHostAllocPortable), op);
  slot_.numbers = static_cast<int32_t*>(memory);
  const cudaError_t status = cudaEventCreateWithFlags(&slot_.done, cudaEventDisableTiming);
  if (status != cudaSuccess) cudaFreeHost(memory);
  check_cuda(status, op);
}

Readback::~Readback() {
  if (pending_) {
    // The exception may arrive before the kernel is done, which still writes: the memory waits for it.
    const RelaxedCapture relaxed;
    cudaEventSynchronize(slot_.done);
  }
  const std::lock_guard<std::mutex> lock(pool().mutex);
  pool().free[device_].push_back(slot_);
}

void Readback::mark(cudaStream_t stream) {
  pending_ = true;
  check_cuda(cudaEventRecord(slot_.done, stream), op_);
}

void Readback::wait() {
  const RelaxedCapture relaxed;
  check_cuda(cudaEventSynchronize(slot_.done), op_);
  pending_ = false;
}

}  // namespace liger
