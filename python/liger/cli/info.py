"""Versions, devices, what was built, which backend serves each op and why, and the environment variables in force."""

import importlib.metadata
import json
import os
import platform

import torch

import liger

from .._core import load
from ..backend import triton_interpreted

# What liger reads, and what holds when the variable is not set. docs/environment.md says more.
VARIABLES = {
    "LIGER_BACKEND": "auto",
    "LIGER_MEMORY_BUDGET": "512M",
    "LIGER_CHECK_TARGETS": "0",
    "LIGER_LOG": "",
    "TRITON_INTERPRET": "0",
    "LIGER_BENCHMARKS": "benchmarks/ of a checkout (read by liger bench)",
    "LIGER_BUILD_CUDA": "auto (read when building)",
    "LIGER_CUDA_ARCHS": "80;86;89;90a;100;120 as far as nvcc knows them (read when building)",
}


def add_arguments(parser):
    parser.add_argument("--json", action="store_true", help="print it as JSON")


def collect():
    """Everything ``liger info`` knows, as a dictionary that JSON can hold."""
    devices = [_device(i) for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
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
        "build": _build(),
        "cuda library": {"loaded": load.CUDA_LOADED, "reason": load.CUDA_REASON},
        # After the devices: asking for them initialises CUDA, which is when capabilities become known.
        "ops": liger.backend_report() if devices else _on_the_cpu(liger.backend_report()),
        "environment": {name: os.environ.get(name) for name in VARIABLES},
    }


def run(arguments):
    found = collect()
    if arguments.json:
        print(json.dumps(found, indent=2))
        return 0

    versions = dict(found["versions"])
    versions["torch"] += f", CUDA {versions.pop('torch cuda') or 'none'}"
    _section("versions", [(name, version or "not installed") for name, version in versions.items()])

    devices = [
        (f"cuda:{i}", f"{d['name']}, compute capability {d['capability']}, {d['memory_gib']:.0f} GiB")
        for i, d in enumerate(found["devices"])
    ]
    _section("devices", devices or [("cpu", f"{torch.get_num_threads()} threads; no CUDA device")])

    build = found["build"]
    if build is None:
        kernels = "unknown: the module liger._C does not import, which no op depends on"
    elif build["cuda"]:
        kernels = f"CUDA {build['cuda']} kernels for {build['cuda_archs']}"
    else:
        kernels = "CPU and Triton build, without CUDA kernels"
    rows = [("kernels", kernels), ("cuda library", found["cuda library"]["reason"])]
    if build is not None:
        rows += [
            ("built with", f"torch {build['torch']}, g++ {build['compiler']}; runs on torch 2.10 and later")
        ]
    _section("build", rows)

    _section("ops", [(op, f"{row['backend']:7s} {row['reason']}") for op, row in found["ops"].items()])
    _section(
        "environment",
        [
            (name, f"not set: {VARIABLES[name]}" if value is None else value)
            for name, value in found["environment"].items()
        ],
    )
    return 0


def _on_the_cpu(report):
    """The report of a machine without a GPU: what serves CPU tensors, and what a CUDA device would get."""
    found = {}
    for op, row in report.items():
        if row["backend"] == "torch" or (row["backend"] == "triton" and triton_interpreted()):
            found[op] = row
        else:
            would = f"a CUDA device would get {row['backend']} ({row['reason']})"
            found[op] = {"backend": "torch", "reason": f"CPU tensors, no CUDA device here; {would}"}
    return found


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


def _build():
    """liger._C.build_info(), or None: the ops work without that module, and this command says so."""
    try:
        from .. import _C
    except ImportError:
        return None
    return _C.build_info()


def _section(title, rows):
    width = max(len(name) for name, _ in rows)
    print(title)
    for name, text in rows:
        print(f"  {name:{width}s}  {text}")
