"""Modules over the ops of liger, with the constructors of their counterparts in torch.nn."""

from typing import TYPE_CHECKING

from .._core.lazy import lazy
from .activation import ReLUSquared, Softmax
from .experts import GroupedExperts
from .loss import CrossEntropyLoss, FusedLinearCrossEntropyLoss, LMHeadLoss
from .mlp import GEGLUMLP, SwiGLUMLP
from .norm import GroupNorm, LayerNorm, RMSNorm, RMSNormGated
from .rotary import ApplyRotaryEmb
from .tiled_mlp import TiledGEGLUMLP, TiledSwiGLUMLP

__all__ = [
    "GEGLUMLP",
    "ApplyRotaryEmb",
    "CrossEntropyLoss",
    "FusedLinearCrossEntropyLoss",
    "GroupNorm",
    "GroupedExperts",
    "LMHeadLoss",
    "LayerNorm",
    "RMSNorm",
    "RMSNormGated",
    "ReLUSquared",
    "Softmax",
    "SwiGLUMLP",
    "TiledGEGLUMLP",
    "TiledSwiGLUMLP",
    "VocabParallelFusedLinearCrossEntropyLoss",
]

if TYPE_CHECKING:
    from .vocab_parallel import VocabParallelFusedLinearCrossEntropyLoss
else:
    # liger.nn.vocab_parallel imports torch.distributed.tensor.
    __getattr__, __dir__ = lazy(
        __name__, __all__, {"VocabParallelFusedLinearCrossEntropyLoss": "liger.nn.vocab_parallel"}
    )
