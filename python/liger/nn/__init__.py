"""Modules over the ops of liger, with the constructors of their counterparts in torch.nn."""

from .loss import CrossEntropyLoss, FusedLinearCrossEntropyLoss, LMHeadLoss
from .mlp import SwiGLUMLP
from .norm import RMSNorm
from .rotary import ApplyRotaryEmb

__all__ = [
    "ApplyRotaryEmb",
    "CrossEntropyLoss",
    "FusedLinearCrossEntropyLoss",
    "LMHeadLoss",
    "RMSNorm",
    "SwiGLUMLP",
]
