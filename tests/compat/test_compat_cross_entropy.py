# SPDX-License-Identifier: BSD-3-Clause
"""Cross entropy of liger_kernel where liger's ops return something else."""

import pytest
import torch
from torch.nn import functional as F

IGNORED = -100
CLASSES, HIDDEN, ROWS = 7, 5, 6


def tensors(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    x, weight = (
        torch.randn(*s, generator=generator, dtype=dtype) for s in ((ROWS, HIDDEN), (CLASSES, HIDDEN))
    )
    target = torch.randint(CLASSES, (ROWS,), generator=generator)
    return x.requires_grad_(), weight.requires_grad_(), target


def call(kind, x, weight, target, ce_weight=None, **options):
    """The output of a module of liger_kernel, for logits or for an lm_head."""
    from liger_kernel.transformers import LigerCrossEntropyLoss, LigerFusedLinearCrossEntropyLoss

    if kind == "logits":
        return LigerCrossEntropyLoss(weight=ce_weight, **options)(F.linear(x, weight), target)
    return LigerFusedLinearCrossEntropyLoss(ce_weight=ce_weight, **options)(weight, x, target)


@pytest.mark.parametrize("kind", ["logits", "lm_head"])
@pytest.mark.parametrize("weighted", [False, True])
def test_a_mean_over_no_rows_is_zero(kind, weighted):
    x, weight, target = tensors()
    ce_weight = torch.rand(CLASSES) + 0.5 if weighted else None
    loss = call(kind, x, weight, torch.full_like(target, IGNORED), ce_weight)
    loss.backward()
    assert loss == 0 and not x.grad.any() and not weight.grad.any()


@pytest.mark.parametrize("kind", ["logits", "lm_head"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("ignore_index", [IGNORED, 2, CLASSES + 3])
def test_a_mean_over_some_rows(kind, dtype, weighted, ignore_index):
    x, weight, target = tensors(dtype)
    target[:2] = ignore_index
    ce_weight = torch.linspace(0.5, 2.0, CLASSES, dtype=dtype) if weighted else None
    loss = call(kind, x, weight, target, ce_weight, ignore_index=ignore_index)
    expected = F.cross_entropy(F.linear(x, weight), target, ce_weight, ignore_index=ignore_index)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(*(torch.autograd.grad(v, (x, weight)) for v in (loss, expected)))


@pytest.mark.parametrize("kind", ["logits", "lm_head"])
@pytest.mark.parametrize("ignore_index", [IGNORED, -1])
@pytest.mark.parametrize("return_predicted_tokens", [False, True])
def test_accuracy_per_row(kind, ignore_index, return_predicted_tokens):
    x, weight, target = tensors()
    predicted = F.linear(x, weight).argmax(-1)
    target[:3] = predicted[:3]
    target[1] = ignore_index
    output = call(
        kind, x, weight, target, reduction="none", ignore_index=ignore_index, return_token_accuracy=True,
        return_predicted_tokens=return_predicted_tokens,
    )  # fmt: skip
    assert torch.equal(output.token_accuracy, (predicted == target).float())
    assert output.loss.shape == target.shape and output.z_loss is None
    assert (output.predicted_tokens is not None) == return_predicted_tokens
