# SPDX-License-Identifier: BSD-3-Clause
"""Post-training losses over a linear head: logits exist only a chunk of tokens at a time
(docs/guides/losses.md)."""

from ._distillation import DistillationLoss, DistillationMetrics, DistillationOptions
from ._pairs import PreferenceLoss, PreferenceMetrics
from .base import FusedLinearLoss
from .distillation import (
    FusedLinearCosineSimilarityLoss,
    FusedLinearJSDLoss,
    FusedLinearKLDivLoss,
    FusedLinearTopKLoss,
)
from .policy import FusedLinearGRPOLoss, FusedLinearPPOLoss, PolicyMetrics, PolicyOptions
from .preference import FusedLinearCPOLoss, FusedLinearDPOLoss, FusedLinearORPOLoss, FusedLinearSimPOLoss
from .results import LossOptions, LossResult, TokenMetrics
from .unpaired import FusedLinearKTOLoss, KTOMetrics

__all__ = [
    "DistillationLoss",
    "DistillationMetrics",
    "DistillationOptions",
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
    "LossOptions",
    "LossResult",
    "PolicyMetrics",
    "PolicyOptions",
    "PreferenceLoss",
    "PreferenceMetrics",
    "TokenMetrics",
]
