# SPDX-License-Identifier: BSD-3-Clause
"""Divergences between a student and a teacher, with the arguments of liger_kernel."""

import torch
from torch import nn

from ...ops.cross_entropy.op import cross_entropy
from ...ops.divergence.op import jsd, kl_div, tvd
from ...ops.fused_linear_divergence.op import fused_linear_jsd, fused_linear_kl_div
from ..parameters import OptionsModule, takes


def _valid_rows(labels, ignore_index):
    """The number of rows without an ignored label, at least 1, as a denominator; None: all rows."""
    return None if labels is None else (labels != ignore_index).sum().clamp_min(1)


# --- JSD ----------------------------------------------------------------------------------------------------


def _apply_jsd(_input, target, shift_labels=None, beta=0.5, ignore_index=-100, jsd_impl=None, jsd_mode=None):
    """:func:`liger.jsd` of log-probabilities (rows, classes): the mean over rows that are not ignored."""
    options = {"beta": beta, "ignore_index": ignore_index, "log_probs": True}
    denominator = _valid_rows(shift_labels, ignore_index)
    return jsd(_input, target.detach(), shift_labels, denominator=denominator, **options)


def liger_jsd(input, target, shift_labels=None, beta=0.5, ignore_index=-100):
    return _apply_jsd(input, target, shift_labels, beta, ignore_index)


class LigerJSD(OptionsModule, of=_apply_jsd, options="beta ignore_index"):
    """Generalised Jensen-Shannon divergence of the student's and the teacher's log-probabilities."""

    def forward(
        self, log_q: torch.Tensor, log_p: torch.Tensor, shift_labels: torch.Tensor | None = None
    ) -> torch.Tensor:
        return self._call(log_q, log_p, shift_labels)


_OF_HEADS = (
    "student_input, student_weight, teacher_input, teacher_weight, shift_labels=None, jsd_beta=0.5, ignore_index=-100, "
    "temperature=1.0, accum_dtype=None"
)


@takes(f"{_OF_HEADS}, jsd_impl=None, jsd_mode=None")
def _apply_fused_linear_jsd(
    student_input, student_weight, teacher_input, teacher_weight, shift_labels, jsd_impl, jsd_mode, **options
):
    """:func:`liger.fused_linear_jsd`: the mean over the rows without an ignored label."""
    options |= {
        "beta": options.pop("jsd_beta"),
        "denominator": _valid_rows(shift_labels, options["ignore_index"]),
    }
    teacher = {"teacher_input": teacher_input.detach(), "teacher_weight": teacher_weight.detach()}
    return fused_linear_jsd(student_input, student_weight, shift_labels, **teacher, **options)


@takes(_OF_HEADS)
def liger_fused_linear_jsd(**given):
    return _apply_fused_linear_jsd(**given)


class LigerFusedLinearJSD(
    OptionsModule, of=liger_fused_linear_jsd, options="jsd_beta ignore_index temperature accum_dtype"
):
    """:func:`liger.fused_linear_jsd` of two lm_heads as a module."""

    def forward(self, student_input, student_weight, teacher_input, teacher_weight, shift_labels=None):
        return self._call(student_input, student_weight, teacher_input, teacher_weight, shift_labels)


# --- KL -----------------------------------------------------------------------------------------------------


def _apply_kl_div(y_pred, y_true, reduction="batchmean", log_target=False, eps=1e-10):
    """KL(target || prediction) as :func:`torch.nn.functional.kl_div` defines it, by :func:`liger.kl_div`.

    Args:
        y_pred: (rows, classes) log-probabilities.
        y_true: the same shape, probabilities or, with ``log_target``, log-probabilities. No gradient.
        eps: without effect: a class with probability 0 adds nothing.
    """
    y_true = y_true.detach()
    if reduction == "none":
        # One number per class; the op of liger sums over classes.
        return nn.functional.kl_div(y_pred, y_true, reduction="none", log_target=log_target)
    options = {"mean": {"reduction": "sum", "denominator": y_pred.numel()}}.get(
        reduction, {"reduction": reduction}
    )
    if not log_target:
        # The logarithm of a 16-bit probability is no 16-bit number.
        wide = torch.promote_types(y_pred.dtype, torch.float32)
        y_pred, y_true = y_pred.to(wide), y_true.to(wide).log()
    return kl_div(y_pred, y_true, log_probs=True, **options)


def liger_kl_div(
    input, target, size_average=True, reduce=True, reduction="mean", log_target=False, eps=1e-10
):
    return _apply_kl_div(input, target, reduction, log_target, eps)


class LigerKLDIVLoss(nn.KLDivLoss):
    """:class:`torch.nn.KLDivLoss` with ``eps`` before its arguments."""

    def __init__(self, eps: float = 1e-10, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.eps = eps

    def forward(self, y_pred: torch.Tensor, y_true: torch.Tensor) -> torch.Tensor:
        return _apply_kl_div(y_pred, y_true, self.reduction, self.log_target, self.eps)


@takes(
    "student_input, student_weight, target, shift_labels=None, reduction='batchmean', ignore_index=-100, "
    "temperature=1.0, eps=1e-10, accum_dtype=None"
)
def liger_fused_linear_kl_div(student_input, student_weight, target, shift_labels, reduction, eps, **options):
    """:func:`liger.fused_linear_kl_div` to given probabilities ``target`` (rows, classes), which sum to 1."""
    if reduction not in ("batchmean", "mean", "sum"):
        raise ValueError(
            f"liger_fused_linear_kl_div: reduction is '{reduction}', expected 'batchmean', 'mean' or 'sum'"
        )
    rows = _valid_rows(shift_labels, options["ignore_index"])
    rows = max(student_input.shape[0], 1) if rows is None else rows
    divisor = {"batchmean": rows, "mean": rows * student_weight.shape[0], "sum": None}[reduction]
    # Logits that have the given probabilities as their softmax at this temperature.
    teacher = target.detach().to(torch.promote_types(target.dtype, torch.float32)).log()
    options |= {
        "teacher_logits": teacher * options["temperature"],
        "reduction": "sum",
        "denominator": divisor,
    }
    return fused_linear_kl_div(student_input, student_weight, shift_labels, **options)


class LigerFusedLinearKLDivLoss(
    OptionsModule, of=liger_fused_linear_kl_div, options="reduction ignore_index temperature eps accum_dtype"
):
    """KL divergence of an lm_head's output from given probabilities."""

    def forward(self, student_input, student_weight, target, shift_labels=None):
        return self._call(student_input, student_weight, target, shift_labels)


# --- TVD ----------------------------------------------------------------------------------------------------


def _apply_tvd(p, q, shift_labels=None, reduction="batchmean", ignore_index=-100):
    """Half the absolute difference of probabilities (rows, classes).

    By torch operations: :func:`liger.tvd` takes logits or log-probabilities, and their gradients do not exist
    at probability 0.
    """
    if reduction not in ("none", "sum", "mean", "batchmean"):
        raise ValueError(
            f"liger_tvd: reduction is '{reduction}', expected 'none', 'sum', 'mean' or 'batchmean'"
        )
    terms = 0.5 * (p.float() - q.detach().float()).abs()
    if shift_labels is not None:
        terms = torch.where((shift_labels != ignore_index).unsqueeze(-1), terms, 0.0)
    rows = _valid_rows(shift_labels, ignore_index)
    rows = max(p.shape[0], 1) if rows is None else rows
    if reduction == "none":
        return terms
    return terms.sum() / {"sum": 1, "batchmean": rows, "mean": rows * p.shape[-1]}[reduction]


def liger_tvd(input, target, shift_labels=None, reduction="mean", ignore_index=-100):
    return _apply_tvd(input, target, shift_labels, reduction, ignore_index)


class LigerTVDLoss(OptionsModule, of=_apply_tvd, options="reduction ignore_index"):
    """Total variation distance of probabilities."""

    def forward(
        self, p: torch.Tensor, q: torch.Tensor, shift_labels: torch.Tensor | None = None
    ) -> torch.Tensor:
        return self._call(p, q, shift_labels)


def _apply_ce_tvd(student_logits, teacher_logits, target, ignore_index=-100):
    """(cross entropy, total variation distance) of logits, float32 per row; 0 in ignored rows."""
    return (
        cross_entropy(student_logits, target, ignore_index=ignore_index, reduction="none"),
        tvd(student_logits, teacher_logits.detach(), target, ignore_index=ignore_index, reduction="none"),
    )


class LigerFusedCETVDLoss(OptionsModule, of=_apply_ce_tvd, options="ignore_index"):
    """Cross entropy and total variation distance of every row."""

    def forward(
        self, student_logits: torch.Tensor, teacher_logits: torch.Tensor, target: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self._call(student_logits, teacher_logits, target)
