# SPDX-License-Identifier: BSD-3-Clause
"""The loss of NeMo Automodel vs. torch, and as Automodel builds and calls it."""

import importlib

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard

FRAMEWORK = "nemo_automodel"


def stand_in():
    """nemo_automodel 0.7.0."""

    class LinearCrossEntropy(nn.Module):
        @staticmethod
        def materialize_lm_weight(lm_weight, *, grad_reduce_group=None):
            return lm_weight.full_tensor() if hasattr(lm_weight, "full_tensor") else lm_weight

    return {"nemo_automodel.components.loss.linear_ce_base": {"LinearCrossEntropy": LinearCrossEntropy}}


@pytest.fixture
def tensors():
    """Hidden states, labels of which some are ignored, and the weight of an lm_head."""
    hidden = torch.randn(2, 5, 8, requires_grad=True)
    labels = torch.randint(11, (2, 5))
    labels[0, :2] = -100
    return hidden, labels, torch.randn(11, 8, requires_grad=True)


def losses(hidden, labels, weight, softcap=0.0):
    """The loss of each token."""
    logits = (hidden @ weight.T).float()
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="none").reshape(labels.shape)


def assert_same(ours, theirs, hidden, weight):
    torch.testing.assert_close(ours, theirs)
    for a, b in zip(*(torch.autograd.grad(x.sum(), (hidden, weight)) for x in (ours, theirs)), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("softcap", [0.0, 5.0])
def test_sums_and_means(integration, tensors, softcap):
    hidden, labels, weight = tensors
    reductions = {"sum": torch.sum, "mean": lambda x: x.sum() / (labels != -100).sum(), "none": lambda x: x}
    for reduction, reduce in reductions.items():
        loss = integration.LigerLinearCrossEntropy(logit_softcapping=softcap, reduction=reduction)
        assert_same(loss(*tensors), reduce(losses(*tensors, softcap)), hidden, weight)


def test_the_number_of_labels_and_weights_of_tokens(integration, tensors):
    hidden, labels, weight = tensors
    loss, weights = integration.LigerLinearCrossEntropy(), torch.rand(2, 5)
    assert_same(loss(*tensors, num_label_tokens=40), losses(*tensors).sum() / 40, hidden, weight)
    expected = (losses(*tensors) * weights).sum() / 40
    assert_same(loss(*tensors, num_label_tokens=40, loss_weights=weights), expected, hidden, weight)
    none = torch.full_like(labels, -100)
    assert loss(hidden, none, weight, num_label_tokens=0).item() == 0.0
    with pytest.raises(ValueError, match="reduction 'mean', expected 'sum'"):
        integration.LigerLinearCrossEntropy(reduction="mean")(*tensors, num_label_tokens=40)


def test_packed_sequences(integration, tensors):
    hidden, labels, weight = tensors
    packed = hidden.reshape(1, 10, 8), labels.flatten(), weight
    assert_same(integration.LigerLinearCrossEntropy()(*packed), losses(*tensors).sum(), hidden, weight)


def test_a_weight_in_float32(integration, tensors):
    """The sharded weight of FSDP has its own dtype outside of the lm_head."""
    hidden, labels, weight = tensors
    loss = integration.LigerLinearCrossEntropy(memory_budget=1024)(hidden.bfloat16(), labels, weight)
    torch.testing.assert_close(loss, losses(hidden, labels, weight).sum(), rtol=0.02, atol=0.02)
    assert torch.autograd.grad(loss, weight)[0].dtype == torch.float32


def test_a_weight_that_fsdp_shards(integration, tensors, process_group):
    hidden, labels, weight = tensors
    head = nn.Linear(8, 11, bias=False)
    head.weight = nn.Parameter(weight.detach().clone())
    fully_shard(head, mesh=process_group)
    group = process_group.get_group()
    loss = integration.LigerLinearCrossEntropy()(hidden, labels, head.weight, 8, grad_reduce_group=group)
    expected = losses(*tensors).sum() / 8
    torch.testing.assert_close(loss, expected)
    (grad,) = torch.autograd.grad(loss, head.weight)
    torch.testing.assert_close(grad.full_tensor(), torch.autograd.grad(expected, weight)[0])


@pytest.mark.parametrize("integration", ["installed"], indirect=True)
def test_automodel_builds_and_calls_it(integration, tensors):
    """The loss of a configuration, and its use for the main loss and for predictions of later tokens."""
    hidden, labels, weight = tensors
    nodes = importlib.import_module("nemo_automodel.components.config.loader")
    target = f"{integration.__name__}.LigerLinearCrossEntropy"
    node = nodes.ConfigNode({"_target_": target, "memory_budget": 1 << 20})
    loss = node.instantiate()
    assert type(loss) is integration.LigerLinearCrossEntropy and loss.options["memory_budget"] == 1 << 20
    built = importlib.import_module("nemo_automodel.components.loss.loss").build_loss_module(type(loss))
    assert type(built) is type(loss)

    model = nn.Module()
    model.lm_head = nn.Linear(8, 11, bias=False)
    model.lm_head.weight = nn.Parameter(weight.detach())
    calculate = importlib.import_module("nemo_automodel.components.loss.utils").calculate_loss
    ours = calculate(loss, hidden_states=hidden, labels=labels, model=model, num_label_tokens=8)
    head = model.lm_head.weight
    assert_same(ours, losses(hidden, labels, head).sum() / 8, hidden, head)
    later = importlib.import_module("nemo_automodel.components.loss.mtp").calculate_mtp_loss
    given = {"mtp_per_depth_h": [hidden], "labels": labels, "model": model, "scaling_factor": 1.0}
    next_labels = F.pad(labels[:, 1:], (0, 1), value=-100)
    expected = losses(hidden, next_labels, head).sum() / 8
    assert_same(later(loss, **given, num_label_tokens=8), expected, hidden, head)
