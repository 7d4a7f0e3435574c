"""Post-training losses over a linear head whose logits exist only a chunk of tokens at a time (docs/losses.md)."""

from .base import FusedLinearLoss, TokenStatistics
from .distillation import (
    DistillationLoss,
    FusedLinearCosineSimilarityLoss,
    FusedLinearJSDLoss,
    FusedLinearKLDivLoss,
    FusedLinearTopKLoss,
)
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
    "DistillationLoss",
    "FusedLinearCPOLoss",
    "FusedLinearCosineSimilarityLoss",
    "FusedLinearDPOLoss",
    "FusedLinearGRPOLoss",
    "FusedLinearJSDLoss",
    "FusedLinearKLDivLoss",
    "FusedLinearKTOLoss",
    "FusedLinearLoss",
    "FusedLinearORPOLoss",
    "FusedLinearPPOLoss",
    "FusedLinearSimPOLoss",
    "FusedLinearTopKLoss",
    "KTOMetrics",
    "PolicyMetrics",
    "PreferenceLoss",
    "PreferenceMetrics",
    "TokenStatistics",
]
