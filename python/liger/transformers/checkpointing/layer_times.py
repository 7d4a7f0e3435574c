# SPDX-License-Identifier: BSD-3-Clause
"""How long the recomputation of a layer takes, and its attention in it: measured, or estimated from FLOPs."""

import itertools
import math
from typing import Any

import torch

from .attention_calls import observed

# The FLOPs of attention per second, as a share of the FLOPs of GEMMs per second (docs/lab/model.md).
_RATE_OF_ATTENTION = 0.65
# Bytes per microsecond of a copy to the host: a PCIe 5 link makes 53 thousand.
_COPIED = 5e4
# Attributes of routers, or of the modules around them.
_CHOICES = ("top_k", "num_experts_per_tok")


class LayerTimer:
    """Recomputes a layer on a CUDA device, and times its last recomputation.

    Not the forward: in the first step, kernels are loaded and tuned then.
    """

    is_planned = True

    def __init__(self, recompute):
        self.recompute = recompute
        # Pairs of events: around the layer, and around its attention calls.
        self.layer: Any = None
        self.attention: list[Any] = []

    def __call__(self, function, *args, **kwargs):
        runs = itertools.count()

        def timed(*args, **kwargs):
            if next(runs) == 0:
                return function(*args, **kwargs)
            self.attention = []
            start, end = self.layer = _events()
            start.record()
            try:
                with observed(self):
                    return function(*args, **kwargs)
            finally:
                end.record()

        return self.recompute(timed, *args, **kwargs)

    def attend(self, call):
        start, end = _events()
        start.record()
        output = call.plain()
        end.record()
        self.attention.append((start, end))
        return output

    def microseconds(self):
        """(of the layer, of its attention) in the last recomputation, or None; waits for the device."""
        if self.layer is None:
            return None
        self.layer[1].synchronize()
        return _elapsed(self.layer), sum(map(_elapsed, self.attention))


def hides_copies(microseconds, size):
    """True if the copies of so many bytes take no longer than the forward of a layer."""
    return size <= microseconds * _COPIED


def _events():
    return torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)


def _elapsed(pair):
    return 1000 * pair[0].elapsed_time(pair[1])


def estimated(layer, tokens, attention_flops):
    """(time of a layer, time of its attention) for a forward, in a unit that all layers share.

    Args:
        layer: the module. Each weight of two dimensions multiplies every token; of weights of experts, which
            have three, a token takes as many as the router chooses.
        tokens: of the forward.
        attention_flops: of its attention kernels.
    """
    shapes = [tuple(getattr(p, "ds_shape", p.shape)) for p in layer.parameters()]
    weights = sum(math.prod(shape) for shape in shapes if len(shape) == 2)
    weights += _choices(layer) * sum(math.prod(shape[1:]) for shape in shapes if len(shape) == 3)
    attention = attention_flops / _RATE_OF_ATTENTION
    return 2 * tokens * weights + attention, attention


def _choices(layer):
    """How many experts a router of the layer chooses for a token; 1 if no module says it."""
    given = (module.__dict__.get(name) for module in layer.modules() for name in _CHOICES)
    return next((count for count in given if isinstance(count, int)), 1)
