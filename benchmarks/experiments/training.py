# SPDX-License-Identifier: BSD-3-Clause
"""Training steps of one method at one size, by the contestants of liger_bench.models.contestants."""

import functools
import statistics
import time

import torch

import liger
from liger_bench.measure import spread
from liger_bench.models import sizes as model_sizes
from liger_bench.models import trainee as model_trainee
from liger_bench.models.contestants import Contestant, compiled, with_liger_kernel

from . import text
from .cells import COMPILED

WARM_UP, STEPS = 2, 3
# Steps that take longer than this, in seconds, are warmed up and measured once.
SLOW_STEP = 3.0


def backend(machine):
    return "cuda" if machine.gpu else "torch"


def contestant(method, machine):
    """The contestant with this name; ``liger`` is ``liger.patch`` on the backend of the machine."""
    if method == COMPILED:
        # Inductor takes half a minute on a CPU.
        return Contestant(functools.partial(compiled, backend="eager") if machine.tiny else compiled)
    if method == "liger":
        return patched(machine)
    return {"transformers": Contestant(lambda model: model), "liger-kernel": Contestant(with_liger_kernel)}[
        method
    ]


def patched(machine, **options):
    """A contestant: ``liger.patch`` with these options."""
    return Contestant(lambda model: liger.patch(model, **options), context(machine))


def context(machine):
    """What makes the context of a contestant of liger."""
    return functools.partial(liger.use_backend, backend(machine))


class Training(model_trainee.Trainee):
    """A Trainee on this machine."""

    def __init__(self, contestant, size, machine):
        super().__init__(contestant, size, machine.device.partition(":")[0])
        self.machine = machine

    def measured(self, batches, steps=STEPS):
        """The record of some steps after a warm-up, of fewer where they are slow. ``losses`` are of all
        steps."""
        losses = []
        step = self.step
        if self.machine.gpu:
            # Models are made in float32.
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

        def noted(tokens):
            losses.append(step(tokens))
            return losses[-1]

        self.step = noted
        start = time.perf_counter()
        self.warm_up(batches)
        first = time.perf_counter() - start
        for _ in range(0 if first > 2 * SLOW_STEP else WARM_UP - 1):
            self.warm_up(batches)
        for i in range(steps):
            self.measure(batches[i % len(batches)])
            if sum(self.samples) > 1e3 * SLOW_STEP:
                break
        tokens = batches[0].numel()
        record = {
            "ms": spread(self.samples),
            "host_ms": spread(self.host),
            "tokens_per_second": tokens / statistics.median(self.samples) * 1e3,
            "first_loss": self.loss,
            "losses": [float(loss) for loss in losses],
            "peak_bytes": self.peak,
            "first_step_s": first,
        }
        if self.machine.gpu:
            record["reserved_bytes"] = torch.cuda.max_memory_reserved()
        experts = getattr(self.model.config, "_experts_implementation", None)
        return record if experts is None else record | {"experts": experts}


def size_of(model, machine):
    """The Size with this name in SIZES, or its tiny one."""
    return model_sizes.size_of(model, machine.tiny)


def measure(cell, machine, entered=None, size=None, steps=STEPS):
    """Training steps of the model, batch and sequence of the cell's settings, or of a model of another
    size."""
    given = cell.settings
    size = size or size_of(given.get("model", "1b"), machine)
    training = Training(entered or contestant(cell.method, machine), size, machine)
    batches = text.batches(machine, size.config["vocab_size"], STEPS, given["batch"], given["sequence"])
    with training.contestant.context():
        training.build()
        return training.measured(batches, steps)
