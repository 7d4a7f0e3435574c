// What host code may do while another thread captures a CUDA graph.
#pragma once

#include <cuda_runtime.h>

namespace liger {

// While a graph is captured in the global mode, which is torch's, other threads may not allocate memory or
// wait for events, unless they say that they know what they do: such a call would fail, and end the capture.
// Only for work that touches no captured stream.
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
