"""DTensor rules for every op of ``torch.ops.liger`` (docs/distributed.md), and vocabulary-parallel losses
(docs/vocab_parallel.md).

The rules are registered when ``torch.distributed.tensor`` is imported: before that no DTensor can exist.
"""

import importlib
from typing import Any

from .._core.dtensor import is_dtensor, when_dtensor_is_imported

__all__ = [
    "is_dtensor",
    "vocab_parallel_cross_entropy",
    "vocab_parallel_fused_linear_ce",
    "vocab_parallel_fused_linear_logprobs",
]


def __getattr__(name: str) -> Any:
    # Imported at first use, because it imports torch.distributed.tensor.
    if name == "vocab_parallel_fused_linear_logprobs":
        return getattr(importlib.import_module("liger.distributed.vocab_parallel_logprobs"), name)
    if name.startswith("vocab_parallel_"):
        return getattr(importlib.import_module("liger.distributed.vocab_parallel"), name)
    raise AttributeError(f"module 'liger.distributed' has no attribute '{name}'")


def _register_rules():
    from . import _rules

    _rules.register()


def _initialise():
    when_dtensor_is_imported(_register_rules)
