// SPDX-License-Identifier: BSD-3-Clause

// NVTX ranges, which Nsight Systems shows. Without a profiler they cost a load and a branch.
#pragma once

#if __has_include(<nvtx3/nvToolsExt.h>)
#include <nvtx3/nvToolsExt.h>
#define LIGER_WITH_NVTX 1
#endif

namespace liger {

// A range on the calling thread for the lifetime of the object.
class NvtxRange {
 public:
#ifdef LIGER_WITH_NVTX
  explicit NvtxRange(const char* name) { nvtxRangePushA(name); }
  ~NvtxRange() { nvtxRangePop(); }
#else
  explicit NvtxRange(const char*) {}
#endif
  NvtxRange(const NvtxRange&) = delete;
  NvtxRange& operator=(const NvtxRange&) = delete;
};

}  // namespace liger
