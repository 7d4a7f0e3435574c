# SPDX-License-Identifier: BSD-3-Clause
"""Modules over the ops of liger, with the constructors of their counterparts in torch.nn."""

from .._core.runtime.lazy import lazy
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
]

__getattr__, __dir__ = lazy(__name__, __all__, {})
