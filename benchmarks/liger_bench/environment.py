# SPDX-License-Identifier: BSD-3-Clause
"""Description of the machine, the software and the source commit of a result."""

import datetime
import importlib.metadata
import importlib.util
import os
import platform
import subprocess
from pathlib import Path

import torch

PEERS = {
    "triton": "triton",
    "liger_kernel": "liger-kernel",
    "quack": "quack-kernels",
    "cutlass": "nvidia-cutlass-dsl",
    "cut_cross_entropy": "cut-cross-entropy",
    "trl": "trl",
    "unsloth_zoo": "unsloth_zoo",
}


CHECKOUT = Path(__file__).resolve().parents[2]
# Default folder of results.
RESULTS = CHECKOUT / "benchmarks" / "results"


def _output(*command, folder=None):
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _version(module, distribution):
    """The version of an importable module; a module without package metadata has none."""
    if importlib.util.find_spec(module) is None:
        return None
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def environment(options):
    """Names and values; None for those that do not apply."""
    gpu = options.device == "cuda"
    # A copy without git history gets its commit from the environment.
    commit, modified = os.environ.get("LIGER_COMMIT"), None
    if not commit:
        commit = _output("git", "rev-parse", "HEAD", folder=CHECKOUT)
        changes = _output("git", "status", "--porcelain", "--untracked-files=no", folder=CHECKOUT)
        modified = None if changes is None else bool(changes)
    query = ("--id=0", "--query-gpu=driver_version", "--format=csv,noheader")
    driver = _output("nvidia-smi", *query) if gpu else None
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": commit,
        "modified": modified,
        "device": torch.cuda.get_device_name() if gpu else platform.machine(),
        "driver": driver,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        **{module: _version(module, distribution) for module, distribution in PEERS.items()},
        "size": options.size + (" sweep" if options.sweep else ""),
        "backends": list(options.backends),
        "dtype": str(options.dtype).removeprefix("torch."),
    }
