"""Post-training losses over a linear head whose logits exist only a chunk of tokens at a time (docs/losses.md)."""

from .base import FusedLinearLoss, TokenStatistics
from .policy import FusedLinearGRPOLoss, FusedLinearPPOLoss, PolicyMetrics
from .preference import (
    FusedLinearCPOLoss,
    FusedLinearDPOLoss,
    FusedLinearORPOLoss,
    FusedLinearSimPOLoss,
    PreferenceLoss,
    PreferenceMetrics,
)
from .unpaired import FusedLinearKTOLoss, KTOMetrics

__all__ = [
    "FusedLinearCPOLoss",
    "FusedLinearDPOLoss",
    "FusedLinearGRPOLoss",
    "FusedLinearKTOLoss",
    "FusedLinearLoss",
    "FusedLinearORPOLoss",
    "FusedLinearPPOLoss",
    "FusedLinearSimPOLoss",
    "KTOMetrics",
    "PolicyMetrics",
    "PreferenceLoss",
    "PreferenceMetrics",
    "TokenStatistics",
]
