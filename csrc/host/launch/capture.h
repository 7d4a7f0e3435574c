// SPDX-License-Identifier: BSD-3-Clause

// Host calls that are legal while another thread captures a CUDA graph.
#pragma once

#include <cuda_runtime.h>

namespace liger {

// During a capture in global mode, which torch uses, cudaMalloc or an event wait of another thread fails and
// invalidates the capture, unless that thread is in relaxed mode. Use it only for work that touches no
// captured stream.
class RelaxedCapture {
 public:
  RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  ~RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

}  // namespace liger
