# SPDX-License-Identifier: BSD-3-Clause
"""One step of a planned model: the allocator at its start, and whether its backward has started."""

import weakref
from dataclasses import dataclass, field

import torch


@dataclass
class Step:
    """Forwards up to their backward; ``start``: allocated bytes before them."""

    start: int
    retries: int
    ooms: int
    phase: bool
    load: list[int]
    is_measured: bool
    kept: int = 0
    inputs: int = 0
    forwards: int = 0
    forward_bytes: int | None = None
    # Allocated bytes after the first forward; the peak of the step cannot be below.
    after_forward: int = 0
    # The backward has started. The peak includes other work.
    backward: bool = False
    is_disturbed: bool = False
    # Weak references to the hooks of the outputs, which exist as long as their graphs.
    graphs: list[weakref.ref] = field(default_factory=list)

    @property
    def is_over(self):
        """True if the backward has started, or all results are gone, by an error for example."""
        return self.backward or not any(graph() is not None for graph in self.graphs)


class BackwardHook:
    """Hook of an output: records the start of the backward, and has the meter note the peak after it."""

    def __init__(self, step, meter):
        self.step, self.meter = step, meter

    def __call__(self, gradient):
        if self.step.is_measured and not self.step.backward:
            # The code of a training loop, which may reset the peak, runs after the backward.
            torch.autograd.Variable._execution_engine.queue_callback(self.meter.note)
        self.step.backward = True
