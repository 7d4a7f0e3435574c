# SPDX-License-Identifier: BSD-3-Clause
"""The process of one cell: measures it, and writes a record or the reason why there is none.

The driver forks it where no CUDA context exists yet, and else starts it anew:

    python -m experiments.process E3 'liger @ 4x1024' RECORD_JSON CACHE_FOLDER [--tiny]
"""

import argparse
import importlib.metadata
import json
import os
import traceback
from pathlib import Path

import torch

from liger_bench.environment import environment
from liger_bench.harness import Options
from liger_bench.measure import PROVIDER_ERRORS

from . import experiment
from .cells import Machine
from .results import write_text

DISTRIBUTIONS = ("transformers", "trl", "peft", "deepspeed", "bitsandbytes")
# In the messages of errors that are not torch.OutOfMemoryError: of the CUDA runtime, cuBLAS, Triton.
OUT_OF_MEMORY = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "DefaultCPUAllocator: can't allocate memory")


def facts(machine):
    """The environment of a record."""
    known = environment(Options(machine.device.partition(":")[0], backends=("cuda",)))
    for name in ("size", "backends", "dtype", "date"):
        known.pop(name)
    for name in DISTRIBUTIONS:
        try:
            known[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            known[name] = None
    return known


def failure(error):
    """The record of a cell that raised."""
    text = f"{type(error).__name__}: {error}".strip()
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)) or any(s in text for s in OUT_OF_MEMORY):
        return {"status": "oom", "reason": text.splitlines()[0][:300]}
    return {"status": "failed", "reason": text[:600], "traceback": traceback.format_exc()[-2000:]}


def outcome(cell, measure, machine):
    """The record of a cell. Its code may fail in many ways: that is a result."""
    try:
        record = {"status": "ok", **measure(cell, machine)}
    except PROVIDER_ERRORS as error:
        traceback.print_exc()
        record = failure(error)
    return record


def run(name, cell, path, tiny, cache, with_facts):
    """Measures a cell and writes its record; of several ranks, the first one does."""
    device = "cuda" if torch.cuda.is_available() and not tiny else "cpu"
    rank = int(os.environ.get("LOCAL_RANK", 0))
    if device == "cuda" and cell.gpus > 1:
        device = f"cuda:{rank}"
        torch.cuda.set_device(device)
    machine = Machine(device, tiny, Path(cache))
    record = outcome(cell, experiment(name).measure, machine)
    if with_facts and rank == 0:
        record["facts"] = facts(machine)
    failed = record["status"] != "ok"
    # The rank that fails first writes the record: the others fail because of it, or wait for it.
    if (not failed and rank == 0) or (failed and not Path(path).exists()):
        write_text(Path(path), json.dumps(record))
    if failed and cell.gpus > 1:
        os._exit(
            1
        )  # torchrun then ends the other ranks; destructors of the process group would wait for them


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in ("name", "key", "path", "cache"):
        parser.add_argument(name)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--facts", action="store_true", help="adds the environment to the record")
    given = parser.parse_args()
    cell = next(c for c in experiment(given.name).cells(given.tiny) if c.key == given.key)
    run(given.name, cell, given.path, given.tiny, given.cache, given.facts)


if __name__ == "__main__":
    main()
