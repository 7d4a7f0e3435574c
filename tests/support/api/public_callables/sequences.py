# SPDX-License-Identifier: BSD-3-Clause
"""Losses of sequences in liger.losses: preference pairs and KTO."""

import torch
from losses_cases import packed

from liger import losses

from .case import HIDDEN, IGNORED, LENGTH, ROWS, VOCAB, add, normal


def sequences_with_head(device, dtype, sequences=ROWS):
    """Hidden states, a projection and targets of sequences: one shorter, one with a hole, one without a
    token."""
    target = torch.randint(VOCAB, (sequences, LENGTH))
    target[0, 3:] = target[1, 2] = IGNORED
    target[-1] = IGNORED
    return (
        normal(device, dtype, sequences, LENGTH, HIDDEN),
        normal(device, dtype, VOCAB, HIDDEN, scale=0.3),
        target.to(device),
        normal(device, dtype, VOCAB, scale=0.3),
    )


def of_module(module):
    """``call`` of a loss: the loss, and the metrics that there are."""

    def call(**given):
        loss, metrics = module(**given)
        return loss, *(metric for metric in metrics if metric is not None)

    return call


def _preference(reference):
    def make(device, dtype):
        hidden, weight, target, bias = sequences_with_head(device, dtype)
        made = {"input": hidden, "weight": weight, "target": target, "bias": bias}
        if reference:
            made |= {
                "ref_input": normal(device, dtype, *hidden.shape),
                "ref_weight": normal(device, dtype, *weight.shape, scale=0.3),
                "ref_bias": normal(device, dtype, VOCAB, scale=0.3),
            }
        return made

    return make


def _packed_preference(device, dtype):
    made = _preference(False)(device, dtype)
    (hidden, target), ends = packed([made["input"], made["target"]], made["target"])
    return made | {"input": hidden, "target": target, "cu_seqlens": ends, "max_length": LENGTH}


def _ref_logps(per_token):
    """Log-probabilities of the reference, per token or sequence; a mask takes the place of ignored
    targets."""

    def make(device, dtype):
        made = _preference(False)(device, dtype)
        mask = made["target"] != IGNORED
        scores = -1.0 - 2 * torch.rand(ROWS, LENGTH).to(device)
        ref_logps = scores if per_token else (scores * mask).sum(-1)
        return made | {"target": made["target"].clamp_min(0), "mask": mask, "ref_logps": ref_logps}

    return make


def _likelihood(device, dtype):
    """Tokens of the likelihood term that differ from the tokens of the pair."""
    made = _preference(False)(device, dtype)
    nll_target = torch.randint(VOCAB, (ROWS, LENGTH))
    nll_target[0, 4] = nll_target[1, 2] = nll_target[3] = IGNORED
    return made | {"nll_target": nll_target.to(device)}


def outside_sequences(cu_seqlens, rows):
    """Rows of a packed batch that are in no sequence."""
    row = torch.arange(rows, device=cu_seqlens.device)
    return (row < cu_seqlens[0]) | (row >= cu_seqlens[-1])


def ignored_sequences(*names):
    def ignored(given):
        mask = given["target"] == IGNORED
        if "nll_target" in given:
            mask = mask & (given["nll_target"] == IGNORED)
        if "mask" in given:
            mask = mask | ~given["mask"]
        if "cu_seqlens" in given:
            mask = mask | outside_sequences(given["cu_seqlens"], mask.shape[-1])
        found = {name: mask for name in names if name in given}
        if "ref_logps" in given:
            found["ref_logps"] = mask if given["ref_logps"].shape == mask.shape else mask.all(-1)
        return found

    return ignored


for _name, _loss, _make in (
    *(
        (f"DPO {kind}", losses.FusedLinearDPOLoss(loss_type=kind, label_smoothing=0.1), _preference(True))
        for kind in losses.preference.DPO_LOSS_TYPES
    ),
    ("DPO chunks", losses.FusedLinearDPOLoss(memory_budget=2 * VOCAB * 4), _preference(True)),
    ("DPO packed", losses.FusedLinearDPOLoss(use_ref_model=False), _packed_preference),
    ("DPO nll", losses.FusedLinearDPOLoss(use_ref_model=False, compute_nll_loss=True), _preference(False)),
    ("DPO ref_logps", losses.FusedLinearDPOLoss(), _ref_logps(per_token=True)),
    ("DPO ref_logps of sequences", losses.FusedLinearDPOLoss(), _ref_logps(per_token=False)),
    ("ORPO", losses.FusedLinearORPOLoss(), _preference(False)),
    ("ORPO nll_target", losses.FusedLinearORPOLoss(), _likelihood),
    ("CPO", losses.FusedLinearCPOLoss(label_smoothing=0.1), _preference(False)),
    ("SimPO", losses.FusedLinearSimPOLoss(), _preference(False)),
):
    add(
        f"losses.{_name}", of_module(_loss), _make, "input weight bias",
        public=f"losses.{type(_loss).__name__}", ignored=ignored_sequences("input", "ref_input"), loss=True,
    )  # fmt: skip


def _kto(device, dtype):
    hidden, weight, target, bias = sequences_with_head(device, dtype)
    labels = torch.tensor([True, False, True, False]).to(device)
    return {
        "input": hidden, "weight": weight, "target": target, "bias": bias, "preference_labels": labels,
        "ref_input": normal(device, dtype, *hidden.shape),
        "ref_weight": normal(device, dtype, *weight.shape, scale=0.3), "kl": torch.tensor(0.1).to(device),
    }  # fmt: skip


for _kind in losses.unpaired.KTO_LOSS_TYPES:
    add(
        f"losses.KTO {_kind}", of_module(losses.FusedLinearKTOLoss(loss_type=_kind, undesirable_weight=0.7)), _kto,
        "input weight bias", public="losses.FusedLinearKTOLoss",
        ignored=ignored_sequences("input", "ref_input"), loss=True,
    )  # fmt: skip
