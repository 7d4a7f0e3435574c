# SPDX-License-Identifier: BSD-3-Clause
"""Fills Triton's cache for a package that compares hundreds of configurations: one process compiles them one
by one, for minutes.

    python -m liger_bench.devices.tuning INDEX COUNT MODULE FUNCTION
"""

import functools
import importlib
import os
import subprocess
import sys
from pathlib import Path

from .processes import end_with_parent

_BENCHMARKS = Path(__file__).parents[2]
# Each has a context and the tensors of its calls in device memory, beside the process that waits for it.
_MAX_PROCESSES = 16


def part_of_configurations(autotune, index, count):
    """``triton.autotune`` with every ``count``-th configuration from ``index`` on, and at least one."""

    @functools.wraps(autotune)
    def parted(configs, *args, **kwargs):
        return autotune(configs[index::count] or configs[:1], *args, **kwargs)

    return parted


@functools.cache
def compile_in_parallel(module, function, count=None):
    """Calls ``module.function()`` once in each of ``count`` processes (one per core, up to 16), which share
    the configurations of the kernels that it calls. Later calls do nothing.

    Raises:
        subprocess.CalledProcessError: a process failed.
    """
    count = count or min(os.cpu_count(), _MAX_PROCESSES)
    command = [sys.executable, "-m", __name__]
    paths = [str(_BENCHMARKS), *filter(None, [os.environ.get("PYTHONPATH")])]
    variables = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    running = [
        subprocess.Popen(
            [*command, str(i), str(count), module, function], env=variables, preexec_fn=end_with_parent
        )
        for i in range(count)
    ]
    codes = [process.wait() for process in running]
    if any(codes):
        raise subprocess.CalledProcessError(max(codes, key=abs), command)


def main():
    index, count, module, function = sys.argv[1:]
    triton = importlib.import_module("triton")
    triton.autotune = part_of_configurations(triton.autotune, int(index), int(count))
    getattr(importlib.import_module(module), function)()


if __name__ == "__main__":
    main()
