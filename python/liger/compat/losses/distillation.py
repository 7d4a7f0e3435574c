# SPDX-License-Identifier: BSD-3-Clause
"""Distillation losses of two lm_heads, with the arguments of liger_kernel.

``compiled`` and ``chunk_size`` have no effect: the memory budget decides how many tokens a chunk has.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

from ...losses import FusedLinearCosineSimilarityLoss, FusedLinearJSDLoss
from ..function_class import function_class


@functools.lru_cache(maxsize=256)
def _loss(loss_class, options):
    return loss_class(**dict(options))


def _distil(loss_class):
    def apply(
        student_input, student_weight, teacher_input, teacher_weight, true_labels, student_bias=None,
        teacher_bias=None, weight_hard_loss=0.5, weight_soft_loss=0.5, beta=0.5, ignore_index=-100, temperature=1.0,
        compiled=True, chunk_size=1024, return_soft_hard_loss=False,
    ):  # fmt: skip
        options = {
            "weight_hard_loss": weight_hard_loss, "weight_soft_loss": weight_soft_loss, "beta": beta,
            "ignore_index": ignore_index, "temperature": temperature,
        }  # fmt: skip
        teacher = {
            "teacher_input": teacher_input, "teacher_weight": teacher_weight, "teacher_bias": teacher_bias,
        }  # fmt: skip
        teacher = {name: None if t is None else t.detach() for name, t in teacher.items()}
        tensors = student_input, student_weight, true_labels, student_bias
        loss, (soft, hard, *_) = _loss(loss_class, tuple(options.items()))(*tensors, **teacher)
        if not return_soft_hard_loss:
            return loss
        if soft is None or hard is None:
            # The loss does not compute a term with factor 0.
            swapped = {"weight_hard_loss": weight_soft_loss, "weight_soft_loss": weight_hard_loss}
            with torch.no_grad():
                _, other = _loss(loss_class, tuple((options | swapped).items()))(*tensors, **teacher)
            soft, hard = (other.soft_loss, hard) if soft is None else (soft, other.hard_loss)
        return loss, soft, hard

    apply.__doc__ = f"""The loss of :class:`liger.losses.{loss_class.__name__}`, or with ``return_soft_hard_loss``
    (loss, distance, cross entropy), the last two without their factors, also where those are 0."""
    return apply


liger_fused_linear_jsd = _distil(FusedLinearJSDLoss)
liger_fused_linear_cosine = _distil(FusedLinearCosineSimilarityLoss)
LigerFusedLinearJSDFunction = function_class("LigerFusedLinearJSDFunction", liger_fused_linear_jsd)
LigerFusedLinearCosineSimilarityFunction = function_class(
    "LigerFusedLinearCosineSimilarityFunction", liger_fused_linear_cosine
)


class _DistillationModule(nn.Module):
    _apply_loss: Any

    def __init__(
        self, weight_hard_loss: float = 0.5, weight_soft_loss: float = 0.5, beta: float = 0.5,
        ignore_index: int = -100, temperature: float = 1.0, compiled: bool = True, chunk_size: int = 1024,
        return_soft_hard_loss: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.weight_hard_loss, self.weight_soft_loss, self.beta = weight_hard_loss, weight_soft_loss, beta
        self.ignore_index, self.temperature = ignore_index, temperature
        self.compiled, self.chunk_size = compiled, chunk_size
        self.return_soft_hard_loss = return_soft_hard_loss

    def forward(
        self, student_input: torch.Tensor, student_weight: torch.Tensor, teacher_input: torch.Tensor,
        teacher_weight: torch.Tensor, true_labels: torch.Tensor, student_bias: torch.Tensor | None = None,
        teacher_bias: torch.Tensor | None = None,
    ) -> Any:  # fmt: skip
        return type(self)._apply_loss(
            student_input, student_weight, teacher_input, teacher_weight, true_labels, student_bias, teacher_bias,
            self.weight_hard_loss, self.weight_soft_loss, self.beta, self.ignore_index, self.temperature,
            self.compiled, self.chunk_size, self.return_soft_hard_loss,
        )  # fmt: skip


class LigerFusedLinearJSDLoss(_DistillationModule):
    """:class:`liger.losses.FusedLinearJSDLoss`."""

    _apply_loss = staticmethod(liger_fused_linear_jsd)


class LigerFusedLinearCosineSimilarityLoss(_DistillationModule):
    """:class:`liger.losses.FusedLinearCosineSimilarityLoss`."""

    _apply_loss = staticmethod(liger_fused_linear_cosine)
