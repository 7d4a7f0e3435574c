# SPDX-License-Identifier: BSD-3-Clause
"""DTensor rules for every op of ``torch.ops.liger`` (docs/guides/distributed.md), and losses of a sharded
vocabulary (docs/guides/vocab_parallel.md).

The rules are registered when ``torch.distributed.tensor`` is imported: before that no DTensor can exist.
"""

from .._core.dtensor.inputs import in_shards, is_dtensor, when_dtensor_is_imported
from .._core.runtime.lazy import lazy

__all__ = ["is_dtensor"]

__getattr__, __dir__ = lazy(__name__, __all__, {})


def _register_rules():
    from .rules import ops

    ops.register()


def _lazily(name):
    def computed(*arguments, **keywords):
        # This module imports torch.distributed.tensor.
        from .vocab import dtensors

        return getattr(dtensors, name)(*arguments, **keywords)

    return computed


def _initialise():
    when_dtensor_is_imported(_register_rules)
    for name in ("fused_linear_ce", "fused_linear_logprobs", "cross_entropy", "told_to_all"):
        in_shards[name] = _lazily(name)
