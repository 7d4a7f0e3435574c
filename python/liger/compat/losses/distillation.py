# SPDX-License-Identifier: BSD-3-Clause
"""Distillation losses of two lm_heads, with the arguments of liger_kernel.

``compiled`` and ``chunk_size`` have no effect: the memory budget decides how many tokens a chunk has.
"""

import torch

from ...losses import FusedLinearCosineSimilarityLoss, FusedLinearJSDLoss
from ..parameters import OptionsModule, detached, loss_of, takes

_INPUTS = (
    "student_input, student_weight, teacher_input, teacher_weight, true_labels, student_bias=None, "
    "teacher_bias=None"
)
_OPTIONS = (
    "weight_hard_loss=0.5 weight_soft_loss=0.5 beta=0.5 ignore_index=-100 temperature=1.0 compiled=True "
    "chunk_size=1024 return_soft_hard_loss=False"
)


def _distil(name, loss_class):
    @takes(f"{_INPUTS}, {_OPTIONS.replace(' ', ', ')}")
    def apply(student_input, student_weight, true_labels, student_bias, return_soft_hard_loss, **given):
        names = ("teacher_input", "teacher_weight", "teacher_bias")
        teacher = {name: detached(given.pop(name)) for name in names}
        tensors = student_input, student_weight, true_labels, student_bias
        loss, (soft, hard, *_) = loss_of(loss_class, **given)(*tensors, **teacher)
        if not return_soft_hard_loss:
            return loss
        if soft is None or hard is None:
            # The loss does not compute a term with factor 0.
            factors = given["weight_soft_loss"], given["weight_hard_loss"]
            given["weight_hard_loss"], given["weight_soft_loss"] = factors
            with torch.no_grad():
                _, other = loss_of(loss_class, **given)(*tensors, **teacher)
            soft, hard = (other.soft_loss, hard) if soft is None else (soft, other.hard_loss)
        return loss, soft, hard

    apply.__name__ = apply.__qualname__ = name
    apply.__doc__ = f"""The loss of :class:`liger.losses.{loss_class.__name__}`, or with ``return_soft_hard_loss``
    (loss, distance, cross entropy), the last two without their factors, also where those are 0."""
    return apply


liger_fused_linear_jsd = _distil("liger_fused_linear_jsd", FusedLinearJSDLoss)
liger_fused_linear_cosine = _distil("liger_fused_linear_cosine", FusedLinearCosineSimilarityLoss)


class _Distillation(OptionsModule):
    @takes(f"self, {_INPUTS}")
    def forward(self, **tensors):
        return self._call(**tensors)


class LigerFusedLinearJSDLoss(_Distillation, of=liger_fused_linear_jsd, options=_OPTIONS):
    """:class:`liger.losses.FusedLinearJSDLoss`."""


class LigerFusedLinearCosineSimilarityLoss(_Distillation, of=liger_fused_linear_cosine, options=_OPTIONS):
    """:class:`liger.losses.FusedLinearCosineSimilarityLoss`."""
