// Which of the architectures that the library was compiled for a device runs.
#pragma once

namespace liger {

// A device need not run code of its own capability: a build for 8.0 alone runs on 9.0, through PTX. What is
// compiled for __CUDA_ARCH__ >= 900 only is missing there, and kernels are to be chosen by this, never by the
// capability.
struct LoadedCode {
  int architecture;  // __CUDA_ARCH__ / 10
  bool sm90a;        // compiled for 9.0a, the code with the matrix units of 9.0
};

// Of the current device.
LoadedCode loaded_code();

}  // namespace liger
