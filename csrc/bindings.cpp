// liger._C: build information and the chunk planner, for introspection only. No op depends on it.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <optional>

#include "linear_ce/planner.h"

namespace py = pybind11;

PYBIND11_MODULE(_C, m) {
  m.doc() = "Build information and the chunk planner of liger-ops.";

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

  m.def(
      "plan_chunks",
      [](int64_t rows, int64_t hidden, int64_t vocab, int64_t element_size, bool need_grad_weight,
         bool exact_accumulation, std::optional<int64_t> memory_budget) {
        const liger::ChunkPlan plan =
            liger::plan_chunks({rows, hidden, vocab, element_size, need_grad_weight, exact_accumulation,
                                memory_budget ? *memory_budget : liger::default_memory_budget()});
        py::dict result;
        result["chunk_rows"] = plan.chunk_rows;
        result["chunks"] = plan.chunks;
        result["logits_bytes"] = plan.logits_bytes;
        result["accumulator_bytes"] = plan.accumulator_bytes;
        return result;
      },
      py::arg("rows"), py::arg("hidden"), py::arg("vocab"), py::arg("element_size") = 2,
      py::arg("need_grad_weight") = true, py::arg("exact_accumulation") = true,
      py::arg("memory_budget") = py::none(),
      "How fused_linear_ce splits `rows` rows into chunks within `memory_budget` bytes (None: "
      "LIGER_MEMORY_BUDGET, else 512 MiB). Returns a dict of chunk_rows, chunks, logits_bytes and "
      "accumulator_bytes. Raises ValueError on negative sizes or a budget that is not positive.");
}
