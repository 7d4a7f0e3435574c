# SPDX-License-Identifier: BSD-3-Clause
"""Preference losses, with the arguments and the metrics of liger_kernel.

``compiled`` and ``chunk_size`` have no effect: the memory budget decides how many pairs a chunk has.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

from ...losses import (
    FusedLinearCPOLoss,
    FusedLinearDPOLoss,
    FusedLinearKTOLoss,
    FusedLinearORPOLoss,
    FusedLinearSimPOLoss,
)
from ...losses.preference import _log1mexp
from ..function_class import function_class


@functools.lru_cache(maxsize=256)
def _loss(loss_class, options):
    return loss_class(**dict(options))


def _cached(loss_class, **options):
    return _loss(loss_class, tuple(options.items()))


@torch.no_grad()
def _logit_sums(hidden, weight, bias):
    """The sum of the logits of each sequence of ``hidden`` (S, L, H), over tokens and classes, in float32.

    Linear in the hidden states, so the logits are not computed.
    """
    sums = hidden.sum(1, dtype=torch.float32) @ weight.sum(0, dtype=torch.float32)
    return sums if bias is None else sums + hidden.shape[1] * bias.sum(dtype=torch.float32)


def _metrics(metrics, hidden, weight, bias, *more):
    """(chosen log-probabilities, rejected ones, mean logits of both, likelihood loss, rewards of both,
    *more)."""
    sums = _logit_sums(hidden, weight, bias)
    half = sums.shape[0] // 2
    means = (s.sum() / max(half * hidden.shape[1] * weight.shape[0], 1) for s in (sums[:half], sums[half:]))
    nll = sums.new_zeros(()) if metrics.nll_loss is None else metrics.nll_loss
    return (
        metrics.chosen_logps, metrics.rejected_logps, *means, nll, metrics.chosen_rewards, metrics.rejected_rewards,
        *more,
    )  # fmt: skip


def _reference(use_ref_model, ref_input, ref_weight, ref_bias):
    """The arguments of a reference; without its use, liger_kernel ignores them."""
    if not use_ref_model:
        return {}
    return {"ref_input": ref_input, "ref_weight": ref_weight, "ref_bias": ref_bias}


# --- functions ----------------------------------------------------------------------------------------------


def liger_fused_linear_dpo(
    _input, weight, target, bias=None, ref_input=None, ref_weight=None, ref_bias=None, ignore_index=-100, beta=0.1,
    compute_nll_loss=False, compiled=True, use_ref_model=True, average_log_prob=False, chunk_size=1,
    loss_type="sigmoid", label_smoothing=0.0, discopop_tau=0.05, alpha=1.0,
):  # fmt: skip
    """(loss, metrics) of :class:`liger.losses.FusedLinearDPOLoss`. ``label_smoothing`` is for exo_pair and
    robust."""
    if loss_type not in ("exo_pair", "robust"):
        label_smoothing = 0.0
    loss_of = _cached(
        FusedLinearDPOLoss, ignore_index=ignore_index, beta=beta, compute_nll_loss=compute_nll_loss, alpha=alpha,
        use_ref_model=use_ref_model, average_log_prob=average_log_prob, loss_type=loss_type,
        label_smoothing=label_smoothing, discopop_tau=discopop_tau,
    )  # fmt: skip
    loss, metrics = loss_of(
        _input, weight, target, bias, **_reference(use_ref_model, ref_input, ref_weight, ref_bias)
    )
    return loss, _metrics(metrics, _input, weight, bias)


def liger_fused_linear_orpo(
    _input, weight, target, bias=None, ignore_index=-100, beta=0.1, compute_nll_loss=True, nll_target=None,
    compiled=True, chunk_size=1,
):  # fmt: skip
    """(loss, metrics) of :class:`liger.losses.FusedLinearORPOLoss`; the last metrics are the means of the
    logarithm of the sigmoid of the log odds, and of the log odds."""
    loss_of = _cached(
        FusedLinearORPOLoss, ignore_index=ignore_index, beta=beta, compute_nll_loss=compute_nll_loss
    )
    loss, metrics = loss_of(_input, weight, target, bias, nll_target=nll_target)
    chosen, rejected = (logps - _log1mexp(logps) for logps in (metrics.chosen_logps, metrics.rejected_logps))
    odds = chosen - rejected
    return loss, _metrics(metrics, _input, weight, bias, nn.functional.logsigmoid(odds).mean(), odds.mean())


def liger_fused_linear_cpo(
    _input, weight, target, bias=None, ignore_index=-100, beta=0.1, alpha=1.0, label_smoothing=0.0,
    compute_nll_loss=True, compiled=True, average_log_prob=False, chunk_size=1,
):  # fmt: skip
    """(loss, metrics) of :class:`liger.losses.FusedLinearCPOLoss`."""
    loss_of = _cached(
        FusedLinearCPOLoss, ignore_index=ignore_index, beta=beta, alpha=alpha, label_smoothing=label_smoothing,
        compute_nll_loss=compute_nll_loss, average_log_prob=average_log_prob,
    )  # fmt: skip
    loss, metrics = loss_of(_input, weight, target, bias)
    return loss, _metrics(metrics, _input, weight, bias)


def liger_fused_linear_simpo(
    _input, weight, target, bias=None, ignore_index=-100, beta=0.1, alpha=1.0, label_smoothing=0.0,
    compute_nll_loss=False, compiled=True, gamma=0.5, chunk_size=1,
):  # fmt: skip
    """(loss, metrics) of :class:`liger.losses.FusedLinearSimPOLoss`."""
    loss_of = _cached(
        FusedLinearSimPOLoss, ignore_index=ignore_index, beta=beta, alpha=alpha, label_smoothing=label_smoothing,
        compute_nll_loss=compute_nll_loss, gamma=gamma,
    )  # fmt: skip
    loss, metrics = loss_of(_input, weight, target, bias)
    return loss, _metrics(metrics, _input, weight, bias)


def liger_fused_linear_kto(
    _input, weight, target, preference_labels, bias=None, ref_input=None, ref_weight=None, ref_bias=None, kl=None,
    ignore_index=-100, beta=0.1, compiled=True, use_ref_model=True, average_log_prob=False, chunk_size=1,
):  # fmt: skip
    """(loss, sums of log-probabilities, of logits and of rewards, each of desirable and of other answers) of
    :class:`liger.losses.FusedLinearKTOLoss`."""
    loss_of = _cached(
        FusedLinearKTOLoss, ignore_index=ignore_index, beta=beta, use_ref_model=use_ref_model,
        average_log_prob=average_log_prob,
    )  # fmt: skip
    reference = _reference(use_ref_model, ref_input, ref_weight, ref_bias)
    loss, metrics = loss_of(
        _input, weight, target, bias, preference_labels=preference_labels, kl=kl, **reference
    )
    sums, desirable = _logit_sums(_input, weight, bias), preference_labels != 0
    logits = (torch.where(which, sums, 0.0).sum() for which in (desirable, ~desirable))
    return loss, (
        metrics.chosen_logps_sum, metrics.rejected_logps_sum, *logits, metrics.chosen_rewards_sum,
        metrics.rejected_rewards_sum,
    )  # fmt: skip


LigerFusedLinearDPOFunction = function_class("LigerFusedLinearDPOFunction", liger_fused_linear_dpo)
LigerFusedLinearORPOFunction = function_class("LigerFusedLinearORPOFunction", liger_fused_linear_orpo)
LigerFusedLinearCPOFunction = function_class("LigerFusedLinearCPOFunction", liger_fused_linear_cpo)
LigerFusedLinearSimPOFunction = function_class("LigerFusedLinearSimPOFunction", liger_fused_linear_simpo)
LigerFusedLinearKTOFunction = function_class("LigerFusedLinearKTOFunction", liger_fused_linear_kto)


# --- modules ------------------------------------------------------------------------------------------------


class LigerFusedLinearDPOLoss(nn.Module):
    """:func:`liger_fused_linear_dpo` as a module. ``forward`` takes the weight of the lm_head first."""

    def __init__(
        self, ignore_index: int = -100, beta: float = 0.1, alpha: float = 1.0, compute_nll_loss: bool = False,
        compiled: bool = True, use_ref_model: bool = True, average_log_prob: bool = False, chunk_size: int = 1,
        loss_type: str = "sigmoid", label_smoothing: float = 0.0, discopop_tau: float = 0.05,
    ) -> None:  # fmt: skip
        super().__init__()
        self.ignore_index, self.beta, self.alpha = ignore_index, beta, alpha
        self.compute_nll_loss, self.use_ref_model = compute_nll_loss, use_ref_model
        self.average_log_prob, self.compiled, self.chunk_size = average_log_prob, compiled, chunk_size
        self.loss_type, self.label_smoothing, self.discopop_tau = loss_type, label_smoothing, discopop_tau

    def forward(
        self, lin_weight: torch.Tensor, _input: torch.Tensor, target: torch.Tensor, bias: torch.Tensor | None = None,
        ref_input: torch.Tensor | None = None, ref_weight: torch.Tensor | None = None,
        ref_bias: torch.Tensor | None = None,
    ) -> Any:  # fmt: skip
        return liger_fused_linear_dpo(
            _input, lin_weight, target, bias, ref_input, ref_weight, ref_bias, self.ignore_index, self.beta,
            self.compute_nll_loss, self.compiled, self.use_ref_model, self.average_log_prob, self.chunk_size,
            self.loss_type, self.label_smoothing, self.discopop_tau, self.alpha,
        )  # fmt: skip


class LigerFusedLinearORPOLoss(nn.Module):
    """:func:`liger_fused_linear_orpo` as a module. ``forward`` takes the weight of the lm_head first."""

    def __init__(
        self, ignore_index: int = -100, beta: float = 0.1, compute_nll_loss: bool = True, compiled: bool = True,
        chunk_size: int = 1,
    ) -> None:  # fmt: skip
        super().__init__()
        self.ignore_index, self.beta, self.compute_nll_loss = ignore_index, beta, compute_nll_loss
        self.compiled, self.chunk_size = compiled, chunk_size

    def forward(
        self, lin_weight: torch.Tensor, _input: torch.Tensor, target: torch.Tensor, bias: torch.Tensor | None = None,
        nll_target: torch.Tensor | None = None,
    ) -> Any:  # fmt: skip
        return liger_fused_linear_orpo(
            _input, lin_weight, target, bias, self.ignore_index, self.beta, self.compute_nll_loss, nll_target
        )


class LigerFusedLinearCPOLoss(nn.Module):
    """:func:`liger_fused_linear_cpo` as a module. ``forward`` takes the weight of the lm_head first."""

    def __init__(
        self, ignore_index: int = -100, beta: float = 0.1, alpha: float = 1.0, label_smoothing: float = 0.0,
        compute_nll_loss: bool = True, compiled: bool = True, average_log_prob: bool = False, chunk_size: int = 1,
    ) -> None:  # fmt: skip
        super().__init__()
        self.ignore_index, self.beta, self.alpha = ignore_index, beta, alpha
        self.label_smoothing, self.compute_nll_loss = label_smoothing, compute_nll_loss
        self.average_log_prob, self.compiled, self.chunk_size = average_log_prob, compiled, chunk_size

    def forward(
        self, lin_weight: torch.Tensor, _input: torch.Tensor, target: torch.Tensor, bias: torch.Tensor | None = None
    ) -> Any:  # fmt: skip
        return liger_fused_linear_cpo(
            _input, lin_weight, target, bias, self.ignore_index, self.beta, self.alpha, self.label_smoothing,
            self.compute_nll_loss, self.compiled, self.average_log_prob,
        )  # fmt: skip


class LigerFusedLinearSimPOLoss(nn.Module):
    """:func:`liger_fused_linear_simpo` as a module. ``forward`` takes the weight of the lm_head first."""

    def __init__(
        self, ignore_index: int = -100, beta: float = 0.1, alpha: float = 1.0, label_smoothing: float = 0.0,
        compute_nll_loss: bool = True, compiled: bool = True, gamma: float = 0.5, chunk_size: int = 1,
    ) -> None:  # fmt: skip
        super().__init__()
        self.ignore_index, self.beta, self.alpha, self.gamma = ignore_index, beta, alpha, gamma
        self.label_smoothing, self.compute_nll_loss = label_smoothing, compute_nll_loss
        self.compiled, self.chunk_size = compiled, chunk_size

    def forward(
        self, lin_weight: torch.Tensor, _input: torch.Tensor, target: torch.Tensor, bias: torch.Tensor | None = None
    ) -> Any:  # fmt: skip
        return liger_fused_linear_simpo(
            _input, lin_weight, target, bias, self.ignore_index, self.beta, self.alpha, self.label_smoothing,
            self.compute_nll_loss, self.compiled, self.gamma,
        )  # fmt: skip


class LigerFusedLinearKTOLoss(nn.Module):
    """:func:`liger_fused_linear_kto` as a module. ``forward`` takes the hidden states first."""

    def __init__(
        self, ignore_index: int = -100, beta: float = 0.1, compiled: bool = True, use_ref_model: bool = False,
        average_log_prob: bool = False, chunk_size: int = 1,
    ) -> None:  # fmt: skip
        super().__init__()
        self.ignore_index, self.beta, self.use_ref_model = ignore_index, beta, use_ref_model
        self.average_log_prob, self.compiled, self.chunk_size = average_log_prob, compiled, chunk_size

    def forward(
        self, _input: torch.Tensor, lin_weight: torch.Tensor, target: torch.Tensor, bias: torch.Tensor | None = None,
        preference_labels: torch.Tensor | None = None, ref_input: torch.Tensor | None = None,
        ref_weight: torch.Tensor | None = None, ref_bias: torch.Tensor | None = None,
        kl: torch.Tensor | float | None = None,
    ) -> Any:  # fmt: skip
        return liger_fused_linear_kto(
            _input, lin_weight, target, preference_labels, bias, ref_input, ref_weight, ref_bias, kl,
            self.ignore_index, self.beta, self.compiled, self.use_ref_model, self.average_log_prob,
        )  # fmt: skip
