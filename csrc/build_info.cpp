// SPDX-License-Identifier: BSD-3-Clause

// liger::build_info: how the two libraries were built. The other ops do not depend on it.
#include <torch/csrc/stable/library.h>

#include <string>
#include <vector>

namespace liger {
namespace {

// The text is "name=value", so a new field needs no new schema.
std::vector<std::string> build_info() {
  return {"version=" LIGER_VERSION, "torch=" LIGER_TORCH_VERSION, "cuda=" LIGER_CUDA_VERSION,
          "cuda_archs=" LIGER_CUDA_ARCHS, "compiler=" __VERSION__};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(liger, CompositeExplicitAutograd, m) {
  m.impl("build_info", TORCH_BOX(&build_info));
}

}  // namespace liger
