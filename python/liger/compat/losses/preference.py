# SPDX-License-Identifier: BSD-3-Clause
"""Preference losses, with the arguments and the metrics of liger_kernel.

``compiled`` and ``chunk_size`` have no effect: the memory budget decides how many pairs a chunk has.
"""

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
from ..parameters import OptionsModule, detached, loss_of, takes


@torch.no_grad()
def _logit_sums(hidden, weight, bias):
    """The sum of the logits of each sequence of ``hidden`` (S, L, H), over tokens and classes, in float32.

    Linear in the hidden states, so the logits are not computed.
    """
    sums = hidden.sum(1, dtype=torch.float32) @ weight.sum(0, dtype=torch.float32)
    return sums if bias is None else sums + hidden.shape[1] * bias.sum(dtype=torch.float32)


def _of_pairs(loss_class, _input, weight, target, bias, tensors, options, more=lambda metrics: ()):
    """(loss, (log-probabilities, mean logits, likelihood loss, rewards, *more)), chosen before rejected."""
    loss, m = loss_of(loss_class, **options)(_input, weight, target, bias, **tensors)
    sums = _logit_sums(_input, weight, bias)
    half = sums.shape[0] // 2
    means = (s.sum() / max(half * _input.shape[1] * weight.shape[0], 1) for s in (sums[:half], sums[half:]))
    nll = sums.new_zeros(()) if m.nll_loss is None else m.nll_loss
    rewards = m.chosen_rewards, m.rejected_rewards
    return loss, (m.chosen_logps, m.rejected_logps, *means, nll, *rewards, *more(m))


def _reference(use_ref_model, **tensors):
    """The arguments of a reference, which gets no gradient; without its use, liger_kernel ignores them."""
    return {name: detached(t) for name, t in tensors.items()} if use_ref_model else {}


# --- functions ----------------------------------------------------------------------------------------------


@takes(
    "_input, weight, target, bias=None, ref_input=None, ref_weight=None, ref_bias=None, ignore_index=-100, beta=0.1, "
    "compute_nll_loss=False, compiled=True, use_ref_model=True, average_log_prob=False, chunk_size=1, "
    "loss_type='sigmoid', label_smoothing=0.0, discopop_tau=0.05, alpha=1.0"
)
def liger_fused_linear_dpo(_input, weight, target, bias, ref_input, ref_weight, ref_bias, **options):
    """(loss, metrics) of a FusedLinearDPOLoss. ``label_smoothing`` is for exo_pair and robust."""
    if options["loss_type"] not in ("exo_pair", "robust"):
        options["label_smoothing"] = 0.0
    reference = _reference(
        options["use_ref_model"], ref_input=ref_input, ref_weight=ref_weight, ref_bias=ref_bias
    )
    return _of_pairs(FusedLinearDPOLoss, _input, weight, target, bias, reference, options)


def _odds(metrics):
    """The means of the logarithm of the sigmoid of the log odds, and of the log odds."""
    chosen, rejected = (logps - _log1mexp(logps) for logps in (metrics.chosen_logps, metrics.rejected_logps))
    odds = chosen - rejected
    return nn.functional.logsigmoid(odds).mean(), odds.mean()


@takes(
    "_input, weight, target, bias=None, ignore_index=-100, beta=0.1, compute_nll_loss=True, nll_target=None, "
    "compiled=True, chunk_size=1"
)
def liger_fused_linear_orpo(_input, weight, target, bias, nll_target, **options):
    """(loss, metrics) of :class:`liger.losses.FusedLinearORPOLoss`; the last metrics are the means of the
    logarithm of the sigmoid of the log odds, and of the log odds."""
    tensors = {"nll_target": nll_target}
    return _of_pairs(FusedLinearORPOLoss, _input, weight, target, bias, tensors, options, more=_odds)


@takes(
    "_input, weight, target, bias=None, ignore_index=-100, beta=0.1, alpha=1.0, label_smoothing=0.0, "
    "compute_nll_loss=True, compiled=True, average_log_prob=False, chunk_size=1"
)
def liger_fused_linear_cpo(_input, weight, target, bias, **options):
    """(loss, metrics) of :class:`liger.losses.FusedLinearCPOLoss`."""
    return _of_pairs(FusedLinearCPOLoss, _input, weight, target, bias, {}, options)


@takes(
    "_input, weight, target, bias=None, ignore_index=-100, beta=0.1, alpha=1.0, label_smoothing=0.0, "
    "compute_nll_loss=False, compiled=True, gamma=0.5, chunk_size=1"
)
def liger_fused_linear_simpo(_input, weight, target, bias, **options):
    """(loss, metrics) of :class:`liger.losses.FusedLinearSimPOLoss`."""
    return _of_pairs(FusedLinearSimPOLoss, _input, weight, target, bias, {}, options)


@takes(
    "_input, weight, target, preference_labels, bias=None, ref_input=None, ref_weight=None, ref_bias=None, kl=None, "
    "ignore_index=-100, beta=0.1, compiled=True, use_ref_model=True, average_log_prob=False, chunk_size=1"
)
def liger_fused_linear_kto(
    _input, weight, target, preference_labels, bias, ref_input, ref_weight, ref_bias, kl, **options
):
    """(loss, sums of log-probabilities, of logits and of rewards, each of desirable and of other answers) of
    :class:`liger.losses.FusedLinearKTOLoss`."""
    tensors = _reference(
        options["use_ref_model"], ref_input=ref_input, ref_weight=ref_weight, ref_bias=ref_bias
    )
    tensors |= {"preference_labels": preference_labels, "kl": detached(kl)}
    loss, m = loss_of(FusedLinearKTOLoss, **options)(_input, weight, target, bias, **tensors)
    sums, desirable = _logit_sums(_input, weight, bias), preference_labels != 0
    logits = (torch.where(which, sums, 0.0).sum() for which in (desirable, ~desirable))
    rewards = m.chosen_rewards_sum, m.rejected_rewards_sum
    return loss, (m.chosen_logps_sum, m.rejected_logps_sum, *logits, *rewards)


# --- modules ------------------------------------------------------------------------------------------------


class _WeightFirst(OptionsModule):
    """A function of this file as a module. ``forward`` takes the weight of the lm_head first."""

    def forward(self, lin_weight, _input, target, bias=None, *more, **named):
        return self._call(_input, lin_weight, target, bias, *more, **named)


class LigerFusedLinearDPOLoss(
    _WeightFirst,
    of=liger_fused_linear_dpo,
    options="ignore_index beta alpha compute_nll_loss compiled use_ref_model average_log_prob chunk_size loss_type "
    "label_smoothing discopop_tau",
):
    """:func:`liger_fused_linear_dpo` as a module."""


class LigerFusedLinearORPOLoss(
    OptionsModule,
    of=liger_fused_linear_orpo,
    options="ignore_index beta compute_nll_loss compiled chunk_size",
):
    """:func:`liger_fused_linear_orpo` as a module. ``forward`` takes the weight of the lm_head first."""

    def forward(self, lin_weight, _input, target, bias=None, nll_target=None):
        return self._call(_input, lin_weight, target, bias, nll_target=nll_target)


class LigerFusedLinearCPOLoss(
    _WeightFirst,
    of=liger_fused_linear_cpo,
    options="ignore_index beta alpha label_smoothing compute_nll_loss compiled average_log_prob chunk_size",
):
    """:func:`liger_fused_linear_cpo` as a module."""


class LigerFusedLinearSimPOLoss(
    _WeightFirst,
    of=liger_fused_linear_simpo,
    options="ignore_index beta alpha label_smoothing compute_nll_loss=True compiled gamma chunk_size",
):
    """:func:`liger_fused_linear_simpo` as a module."""


class LigerFusedLinearKTOLoss(
    OptionsModule,
    of=liger_fused_linear_kto,
    options="ignore_index beta compiled use_ref_model=False average_log_prob chunk_size",
):
    """:func:`liger_fused_linear_kto` as a module. ``forward`` takes the hidden states first."""

    @takes(
        "self, _input, lin_weight, target, bias=None, preference_labels=None, ref_input=None, ref_weight=None, "
        "ref_bias=None, kl=None"
    )
    def forward(self, lin_weight, **tensors):
        return self._call(weight=lin_weight, **tensors)
