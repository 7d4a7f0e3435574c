// SPDX-License-Identifier: BSD-3-Clause

// The architecture of the kernel images that the driver has loaded for a device.
#pragma once

namespace liger {

// This may be below the capability of the device: a build for 8.0 alone runs on 9.0 through PTX, without the
// code under __CUDA_ARCH__ >= 900. So kernels are chosen by LoadedCode, never by the capability.
struct LoadedCode {
  int architecture;  // __CUDA_ARCH__ / 10
  bool sm90a;        // compiled for sm_90a, which has wgmma
};

// Returns the loaded code of the current device.
LoadedCode loaded_code();

}  // namespace liger
