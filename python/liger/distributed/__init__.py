"""DTensor rules for every op of ``torch.ops.liger`` (docs/distributed.md), and vocabulary-parallel losses
(docs/vocab_parallel.md).

The rules are registered when ``torch.distributed.tensor`` is imported: before that no DTensor can exist.
"""

from typing import TYPE_CHECKING

from .._core.dtensor import is_dtensor, when_dtensor_is_imported
from .._core.lazy import lazy

__all__ = [
    "is_dtensor",
    "vocab_parallel_cross_entropy",
    "vocab_parallel_fused_linear_ce",
    "vocab_parallel_fused_linear_logprobs",
]

if TYPE_CHECKING:
    from .vocab_parallel import vocab_parallel_cross_entropy, vocab_parallel_fused_linear_ce
    from .vocab_parallel_logprobs import vocab_parallel_fused_linear_logprobs
else:
    # These modules import torch.distributed.tensor.
    __getattr__, __dir__ = lazy(
        __name__,
        __all__,
        {
            "vocab_parallel_cross_entropy": "liger.distributed.vocab_parallel",
            "vocab_parallel_fused_linear_ce": "liger.distributed.vocab_parallel",
            "vocab_parallel_fused_linear_logprobs": "liger.distributed.vocab_parallel_logprobs",
        },
    )


def _register_rules():
    from . import _rules

    _rules.register()


def _initialise():
    when_dtensor_is_imported(_register_rules)
