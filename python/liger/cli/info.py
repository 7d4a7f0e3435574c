# SPDX-License-Identifier: BSD-3-Clause
"""``liger info``: versions, devices, the build, the backend of each function, environment variables."""

import importlib.metadata
import inspect
import json
import os
import platform

import torch

import liger

from .._core.runtime import load
from .._core.runtime.build_info import build_info
from .._core.runtime.environment import environment_flag, triton_interpreted, wgmma_engine_allowed
from .._core.runtime.memory_budget import default_memory_budget

# Variable -> its default. docs/reference/environment.md describes them.
VARIABLES = {
    "LIGER_BACKEND": "auto",
    "LIGER_MEMORY_BUDGET": "512M",
    "LIGER_AUTOGRAD": "auto",
    "LIGER_WGMMA": "1",
    "LIGER_CHECK_TARGETS": "0",
    "LIGER_LOG": "",
    "LIGER_COMPAT_OVERRIDE": "0 (read by liger.compat)",
    "TRITON_INTERPRET": "0",
    "LIGER_BUILD_CUDA": "auto (read when building)",
    "LIGER_CUDA_ARCHS": "the GPUs at hand, else all (read when building)",
}
# The readers of variables that are read after the import of liger, which does not check them.
_READERS = {
    "LIGER_MEMORY_BUDGET": default_memory_budget,
    "LIGER_WGMMA": wgmma_engine_allowed,
    "LIGER_COMPAT_OVERRIDE": lambda: environment_flag("LIGER_COMPAT_OVERRIDE"),
}


# Public function -> the op of LIGER_BACKEND that serves it, apart from GEMMs of torch, where their names
# differ; None: the function that it is given.
_SERVED_BY = {
    **{"swiglu_packed": "swiglu", "geglu_packed": "geglu", "mrope": "rope", "complex_rope": "rope"},
    "fused_linear_logprobs": "cross_entropy_stats",
    **dict.fromkeys(("kl_div", "jsd", "tvd", "fused_linear_kl_div", "fused_linear_jsd"), "divergence"),
    **{"grouped_experts": "swiglu", "tiled_mlp": "swiglu", "tiled": None},
}
# Each public function of liger.ops -> that op.
FUNCTIONS = {
    name: _SERVED_BY.get(name, name)
    for name in liger.__all__
    if inspect.isfunction(found := vars(liger).get(name)) and found.__module__.startswith("liger.ops.")
}


def collect():
    """The output of ``liger info`` as a dictionary that is JSON-serialisable."""
    # Before the report: querying the devices initialises CUDA, which determines the backends.
    devices = [_device(i) for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    ops = liger.backend_report() if devices else _on_the_cpu(liger.backend_report())
    return {
        "versions": {
            "liger": liger.__version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "torch cuda": torch.version.cuda,
            "triton": _version("triton"),
            "transformers": _version("transformers"),
        },
        "devices": devices,
        "build": dict(build_info()),
        "cuda library": {"loaded": load.CUDA_LOADED, "reason": load.CUDA_REASON},
        "liger._C": {"loaded": load.C is not None, "reason": load.C_REASON},
        "ops": ops,
        "functions": {
            name: op and {"op": op, "backend": ops[op]["backend"]} for name, op in FUNCTIONS.items()
        },
        "environment": {name: os.environ.get(name) for name in VARIABLES},
    }


def run(arguments):
    info = collect()
    if arguments.json:
        print(json.dumps(info, indent=2))
        return 0

    versions = dict(info["versions"])
    versions["torch"] += f", CUDA {versions.pop('torch cuda') or 'none'}"
    _section("versions", [(name, version or "not installed") for name, version in versions.items()])

    devices = [
        (f"cuda:{i}", f"{d['name']}, compute capability {d['capability']}, {d['memory_gib']:.0f} GiB")
        for i, d in enumerate(info["devices"])
    ]
    _section("devices", devices or [("cpu", f"{torch.get_num_threads()} threads; no CUDA device")])

    build = info["build"]
    if build["cuda"]:
        kernels = f"CUDA {build['cuda']} kernels for {build['cuda_archs']}"
    else:
        kernels = "CPU and Triton build, without CUDA kernels"
    built_with = f"torch {build['torch']}, g++ {build['compiler']}; runs on torch 2.10 and later"
    _section(
        "build",
        [
            ("kernels", kernels),
            ("cuda library", info["cuda library"]["reason"]),
            ("liger._C", info["liger._C"]["reason"]),
            ("built with", built_with),
        ],
    )

    numbers = {}
    for row in info["ops"].values():
        numbers.setdefault(row["reason"], f"[{len(numbers) + 1}]")
    _section("functions", [(name, _served(name, info["ops"], numbers)) for name in info["functions"]])
    _section("reasons", [(number, reason) for reason, number in numbers.items()])
    _section(
        "environment",
        [
            (name, f"not set: {VARIABLES[name]}" if value is None else value + _complaint(name))
            for name, value in info["environment"].items()
        ],
    )
    return 0


def _complaint(name):
    """The fault of a variable's value, in brackets."""
    try:
        _READERS.get(name, bool)()
    except ValueError as error:
        return f" (invalid: {error})"
    return ""


def _served(name, ops, numbers):
    """The backend of a function, the number of the reason, and the op that LIGER_BACKEND knows it by."""
    op = FUNCTIONS[name]
    if op is None:
        return "runs the function that it is given"
    text = f"{ops[op]['backend']:7s} {numbers[ops[op]['reason']]}"
    return text if op == name else f"{text}  as {op}"


def _on_the_cpu(report):
    """The backend report of a machine without a GPU: the backends of CPU tensors and of a CUDA device."""
    cpu_report = {}
    for op, row in report.items():
        if row["backend"] == "torch" or (row["backend"] == "triton" and triton_interpreted()):
            cpu_report[op] = row
        else:
            would = f"a CUDA device would get {row['backend']} ({row['reason']})"
            cpu_report[op] = {"backend": "torch", "reason": f"CPU tensors, no CUDA device here; {would}"}
    return cpu_report


def _device(index):
    properties = torch.cuda.get_device_properties(index)
    return {
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "memory_gib": properties.total_memory / 2**30,
        "multiprocessors": properties.multi_processor_count,
    }


def _version(distribution):
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _section(title, rows):
    width = max(len(name) for name, _ in rows)
    print(title)
    for name, text in rows:
        print(f"  {name:{width}s}  {text}")
