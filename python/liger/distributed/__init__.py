"""The ops over tensors that are spread over processes: every op of ``torch.ops.liger`` takes DTensors
(docs/distributed.md), and losses over a vocabulary in parts (docs/vocab_parallel.md).

The rules are registered when ``torch.distributed.tensor`` is imported, before which there can be no DTensor.
"""

import importlib

from .._core.dtensor import is_dtensor, when_dtensor_is_imported

__all__ = ["is_dtensor", "vocab_parallel_cross_entropy", "vocab_parallel_fused_linear_ce"]


def __getattr__(name):
    # Looked up when first used: it imports the distributed part of torch.
    if name.startswith("vocab_parallel_"):
        return getattr(importlib.import_module("liger.distributed.vocab_parallel"), name)
    raise AttributeError(f"module 'liger.distributed' has no attribute '{name}'")


def _register_rules():
    from . import _rules

    _rules.register()


def _initialise():
    when_dtensor_is_imported(_register_rules)
