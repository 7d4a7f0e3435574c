"""Modules over the ops of liger, with the constructors of their counterparts in torch.nn."""

import importlib
from typing import Any

from .experts import GroupedExperts
from .loss import CrossEntropyLoss, FusedLinearCrossEntropyLoss, LMHeadLoss
from .mlp import GEGLUMLP, SwiGLUMLP
from .norm import LayerNorm, RMSNorm, RMSNormGated
from .rotary import ApplyRotaryEmb
from .tiled_mlp import TiledGEGLUMLP, TiledSwiGLUMLP

__all__ = [
    "GEGLUMLP",
    "ApplyRotaryEmb",
    "CrossEntropyLoss",
    "FusedLinearCrossEntropyLoss",
    "GroupedExperts",
    "LMHeadLoss",
    "LayerNorm",
    "RMSNorm",
    "RMSNormGated",
    "SwiGLUMLP",
    "TiledGEGLUMLP",
    "TiledSwiGLUMLP",
    "VocabParallelFusedLinearCrossEntropyLoss",
]


def __getattr__(name: str) -> Any:
    # Imported at first use, because it imports torch.distributed.tensor.
    if name == "VocabParallelFusedLinearCrossEntropyLoss":
        return getattr(importlib.import_module("liger.nn.vocab_parallel"), name)
    raise AttributeError(f"module 'liger.nn' has no attribute '{name}'")
