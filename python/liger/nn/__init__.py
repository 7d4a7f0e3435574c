"""Modules over the ops of liger, with the constructors of their counterparts in torch.nn."""

from .loss import CrossEntropyLoss, FusedLinearCrossEntropyLoss, LMHeadLoss
from .mlp import SwiGLUMLP
from .norm import RMSNorm
from .rotary import ApplyRotaryEmb
from .tiled_mlp import TiledGEGLUMLP, TiledSwiGLUMLP

__all__ = [
    "ApplyRotaryEmb",
    "CrossEntropyLoss",
    "FusedLinearCrossEntropyLoss",
    "LMHeadLoss",
    "RMSNorm",
    "SwiGLUMLP",
    "TiledGEGLUMLP",
    "TiledSwiGLUMLP",
]
