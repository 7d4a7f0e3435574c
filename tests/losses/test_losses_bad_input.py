# SPDX-License-Identifier: BSD-3-Clause
"""Bad input of preference, unpaired and policy losses: the class of the error, and what it says."""

import pytest
import torch
from losses_cases import LENGTH, make

from liger import losses


def dpo(change=lambda x, w, t: (x, w, t), options=None, **how):
    return lambda x, w, t: losses.FusedLinearDPOLoss(**(options or {}))(*change(x, w, t), **how)


def grpo(advantages=None, options=None, **how):
    advantages = torch.zeros(6) if advantages is None else advantages
    return lambda x, w, t: losses.FusedLinearGRPOLoss(**(options or {}))(
        x, w, t, advantages=advantages, **how
    )  # fmt: skip


def kto(labels, options=None, **how):
    return lambda x, w, t: losses.FusedLinearKTOLoss(**(options or {}))(
        x, w, t, preference_labels=labels, **how
    )


FREE = {"use_ref_model": False}
BAD = {
    "odd": (dpo(lambda x, w, t: (x[:5], w, t[:5]), FREE), RuntimeError, "5 sequences, expected an even number"),
    "no reference": (dpo(), ValueError, "FusedLinearDPOLoss: no reference"),
    "unwanted reference": (dpo(options=FREE, ref_logps=torch.zeros(6)), ValueError, "use_ref_model is False"),
    "no reference weight": (dpo(ref_input=torch.zeros(6, LENGTH, 8)), ValueError, "without ref_weight"),
    "reference grad": (dpo(ref_logps=torch.zeros(6, requires_grad=True)), RuntimeError, "ref_logps requires grad"),
    "divisor grad": (
        dpo(options=FREE, denominator=torch.ones((), requires_grad=True)), RuntimeError,
        "FusedLinearDPOLoss: denominator requires grad",
    ),
    "reference vocabulary": (
        dpo(ref_input=torch.zeros(6, LENGTH, 8), ref_weight=torch.zeros(30, 8)),
        RuntimeError, "ref_weight has 30 classes, expected 29",
    ),
    "flat": (
        dpo(lambda x, w, t: (x[0], w, t[0]), FREE), RuntimeError, r"expected \(sequences, length\), or cu_seqlens",
    ),
    "cu_seqlens": (
        dpo(lambda x, w, t: (x[0], w, t[0]), FREE, cu_seqlens=torch.zeros(2, 2)), RuntimeError, "cu_seqlens has shape",
    ),
    "mask": (dpo(options=FREE, mask=torch.ones(6)), RuntimeError, "FusedLinearDPOLoss: mask has shape"),
    "items": (dpo(options=FREE, denominator=torch.ones(2)), RuntimeError, "denominator has shape"),
    "loss type": (dpo(options={"loss_type": "nope"}), ValueError, "unknown loss_type 'nope', expected one of sigmoid"),
    "smoothing": (dpo(options={"loss_type": "robust", "label_smoothing": 0.5}), ValueError, "label_smoothing is 0.5"),
    "grpo type": (grpo(options={"loss_type": "gspo"}), ValueError, "unknown loss_type 'gspo'"),
    "grpo level": (
        grpo(options={"importance_sampling_level": "word"}), ValueError, "unknown importance_sampling_level 'word'",
    ),
    "grpo reference": (grpo(), ValueError, "FusedLinearGRPOLoss: no reference"),
    "kto type": (kto(torch.ones(6), options={"loss_type": "bco"}), ValueError, "unknown loss_type 'bco'"),
    "kto reference": (kto(torch.ones(6)), ValueError, "FusedLinearKTOLoss: no reference"),
    "cpo type": (
        lambda x, w, t: losses.FusedLinearCPOLoss(loss_type="simpo"), ValueError, "unknown loss_type 'simpo'",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name):
    function, kind, message = BAD[name]
    hidden, weight, target, _ = make("cpu")
    with pytest.raises(kind, match=message):
        function(hidden.requires_grad_(), weight, target.clamp_min(0))
