"""liger.trl.patch: trainers of TRL, trained for real with it and without, give the same logs and the same weights."""

import copy
import logging
import math

import pytest
import torch
import trl_trainers as made
from trl_trainers import trl

import liger.trl


def dpo(folder, policy=None, reference=True, data=None, **options):
    reference = {"ref_model": made.model(0.05)} if reference else {}
    return trl.DPOTrainer(
        made.model() if policy is None else policy, args=trl.DPOConfig(str(folder), **made.OPTIONS | options),
        train_dataset=data or made.pairs(), processing_class=made.tokenizer(), **reference,
    )  # fmt: skip


def assert_same_training(make, tolerance=1e-4, count=2):
    """Trains two trainers, one of them patched: losses, gradient norms, all metrics and the weights agree."""
    plain, patched = make(), liger.trl.patch(make())
    for trainer in (plain, patched):
        torch.manual_seed(0)
        trainer.train()
    ours, theirs = made.logged(patched), made.logged(plain)
    assert len(ours) == len(theirs) > count
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.keys() == other.keys()
        for name, value in other.items():
            assert mine[name] == pytest.approx(value, rel=tolerance, abs=tolerance, nan_ok=True), name
    assert any("grad_norm" in entry and entry["grad_norm"] > 0 for entry in theirs)
    weights = dict(plain.model.named_parameters())
    for name, parameter in patched.model.named_parameters():
        # Two steps of Adam: gradients that are all but zero have signs that roundings decide.
        difference = (parameter - weights[name]).abs()
        assert difference.mean() < 1e-4, name
    return patched


@pytest.mark.parametrize("loss_type", ["sigmoid", "ipo", "apo_zero"])
def test_dpo(tmp_path, loss_type):
    assert_same_training(lambda: dpo(tmp_path, loss_type=[loss_type]))
