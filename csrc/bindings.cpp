// liger._C: how this package was built. Introspection only: no op depends on it.
#include <pybind11/pybind11.h>

namespace py = pybind11;

PYBIND11_MODULE(_C, m) {
  m.doc() = "Build information of liger-ops.";

  m.def(
      "build_info",
      [] {
        py::dict info;
        info["version"] = LIGER_VERSION;
        info["torch"] = LIGER_TORCH_VERSION;
        info["cuda"] = LIGER_CUDA_VERSION;
        info["cuda_archs"] = LIGER_CUDA_ARCHS;
        info["compiler"] = __VERSION__;
        return info;
      },
      "Versions and CUDA architectures this package was built with; an empty 'cuda' means no CUDA kernels.");
}
