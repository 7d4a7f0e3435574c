# SPDX-License-Identifier: BSD-3-Clause
"""What cross_entropy and fused_linear_ce refuse, in the same words in every backend."""

import os
import subprocess
import sys

import pytest
import torch
from cases import DTYPES
from cross_entropy_reference import random_layer, random_logits
from errors import error_about

import liger


def test_cross_entropy_target_out_of_range_on_the_cpu():
    target = torch.tensor([1, 2, -100, 17])
    words = "cross_entropy: target at row 3 is 17, expected 0 <= target < 10 or ignore_index -100"
    with pytest.raises(RuntimeError, match=f"^{words}$"):
        liger.cross_entropy(torch.randn(4, 10), target)
    with pytest.raises(
        RuntimeError, match="target at row 0 is -1, expected 0 <= target < 10 or ignore_index 3"
    ):
        liger.cross_entropy(torch.randn(2, 10), torch.tensor([-1, 3]), ignore_index=3)


@pytest.mark.gpu
@pytest.mark.parametrize("classes", [10, 32000, 131072])
@pytest.mark.parametrize("wrong", ["the first that is none", -1, (1 << 32) + 5, 1 << 40])
def test_cross_entropy_target_out_of_range_on_a_gpu_gives_nan(device, wrong, classes):
    """Whichever kernel takes rows of so many classes; what is out of range for 64 bits is so for 32, too."""
    wrong = wrong if isinstance(wrong, int) else classes
    logits = torch.randn(4, classes, device=device, requires_grad=True)
    target = torch.tensor([1, wrong, 3, -100], device=device)
    output = liger.cross_entropy(logits, target, reduction="none", metrics=("logprobs",))
    assert output.loss.isnan().tolist() == output.logprobs.isnan().tolist() == [False, True, False, False]
    output.loss.sum().backward()
    assert logits.grad.isnan().all(-1).tolist() == [False, True, False, False]
    loss = liger.cross_entropy(logits, target)
    (grad,) = torch.autograd.grad(loss, logits)
    assert loss.isnan() and grad[1].isnan().all() and not grad[3].any()


# name: (a change of good arguments, the error)
BOTH = {
    "float target": (
        lambda a: a.update(target=a["target"].float()),
        "target has dtype float32, expected int64 or int32 class indices (class probabilities are not supported)",
    ),
    "target shape": (
        lambda a: a.update(target=a["target"][:3]),
        "target has shape (3,), expected (4,), one class index per row",
    ),
    "ce_weight shape": (
        lambda a: a.update(ce_weight=torch.ones(9)),
        "ce_weight has shape (9,), expected (10,), one weight per class",
    ),
    "token_weight shape": (
        lambda a: a.update(token_weight=torch.ones(5)),
        "token_weight has shape (5,), expected (4,), one weight per row",
    ),
    "denominator with none": (
        lambda a: a.update(denominator=3, reduction="none"),
        "denominator was given with reduction 'none', expected 'mean' or 'sum'",
    ),
}
CROSS_ENTROPY = {
    **BOTH,
    "integer logits": (
        lambda a: a.update(logits=a["logits"].long()),
        "logits has dtype int64, expected float16, bfloat16, float32 or float64",
    ),
    "no classes": (
        lambda a: a.update(logits=a["logits"][:, :0]),
        "logits has shape (4, 0), expected (rows, classes) with at least one class",
    ),
    "ce_weight dtype": (
        lambda a: a.update(ce_weight=torch.ones(10).long()),
        "ce_weight has dtype int64, expected float16, bfloat16, float32 or float64",
    ),
    "denominator shape": (
        lambda a: a.update(denominator=torch.ones(2)),
        "denominator has shape (2,), expected one element",
    ),
    "denominator dtype": (
        lambda a: a.update(denominator=torch.ones((), dtype=torch.bool)),
        "denominator has dtype bool, expected a floating dtype, int64 or int32",
    ),
    "reduction": (
        lambda a: a.update(reduction="average"),
        "reduction is 'average', expected 'mean', 'sum' or 'none'",
    ),
    "smoothing": (
        lambda a: a.update(label_smoothing=1.5),
        "label_smoothing is 1.5, expected a value between 0 and 1",
    ),
    "softcap": (lambda a: a.update(softcap=0.0), "softcap is 0, expected a positive, finite value or None"),
    "batch shape": (
        lambda a: a.update(logits=a["logits"].view(2, 2, 10), target=a["target"]),
        "target has shape (4,), expected the shape of logits without its last dimension, (2, 2)",
    ),
    "token_weight batch shape": (
        lambda a: a.update(
            logits=a["logits"].view(4, 1, 10), target=a["target"].view(4, 1), token_weight=torch.ones(1, 4)
        ),
        "token_weight has shape (1, 4), expected the shape of logits without its last dimension, (4, 1)",
    ),
}


@pytest.mark.parametrize("name", CROSS_ENTROPY)
def test_cross_entropy_bad_input(device, name):
    change, words = CROSS_ENTROPY[name]
    arguments = {"logits": torch.randn(4, 10), "target": torch.tensor([1, 2, 3, 4])}
    change(arguments)
    on_device = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in arguments.items()}
    with pytest.raises(error_about(words)) as caught:
        liger.cross_entropy(**on_device)
    assert str(caught.value).splitlines()[0] == f"cross_entropy: {words}"


@pytest.mark.parametrize("name", ["ce_weight", "token_weight", "denominator"])
def test_cross_entropy_weights_that_require_grad_are_refused(device, name):
    logits, target = random_logits(4, 4, device)
    weight = torch.ones((1,) if name == "denominator" else (4,), device=device, requires_grad=True)
    with pytest.raises(
        RuntimeError, match=rf"cross_entropy: {name} requires grad, but .* has no gradient for it"
    ):
        liger.cross_entropy(logits.requires_grad_(), target, **{name: weight})


@pytest.mark.gpu
def test_cross_entropy_weight_on_another_device(device):
    logits, target = random_logits(4, 9, device)
    with pytest.raises(
        RuntimeError, match="cross_entropy: ce_weight is on cpu, expected the device of logits, cuda"
    ):
        liger.cross_entropy(logits, target, ce_weight=torch.ones(9))


def test_fused_linear_ce_target_out_of_range_on_the_cpu():
    words = "fused_linear_ce: target at row 1 is 17, expected 0 <= target < 10 or ignore_index -100"
    with pytest.raises(RuntimeError, match=f"^{words}$"):
        liger.fused_linear_ce(torch.randn(2, 4), torch.randn(10, 4), torch.tensor([1, 17]))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [4, 300])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("wrong", [2048, -1, (1 << 32) + 5])
def test_fused_linear_ce_target_out_of_range_on_a_gpu_gives_nan(device, wrong, dtype, rows):
    """In every engine, and where ignored rows are left out."""
    x, weight, bias, _ = random_layer(rows, 256, 2048, device)
    x, weight, bias = (t.to(dtype).requires_grad_() for t in (x, weight, bias))
    target = torch.tensor([1, wrong, 3, -100], device=device).repeat(rows // 4)
    for b in (bias, None):
        losses = liger.fused_linear_ce(x, weight, target, b, reduction="none")
        assert losses.isnan().tolist() == [False, True, False, False] * (rows // 4)
        loss = liger.fused_linear_ce(x, weight, target, b)
        (grad,) = torch.autograd.grad(loss, x)
        assert loss.isnan() and grad[1].isnan().all() and not grad[3].any()


FUSED_LINEAR_CE = {
    **BOTH,
    "input dimensions": (
        lambda a: a.update(input=torch.randn(())),
        "input has shape (), expected (rows, hidden)",
    ),
    "hidden size": (
        lambda a: a.update(weight=torch.randn(10, 5)),
        "weight has shape (10, 5), expected (vocab, hidden) with the hidden size of input, 8",
    ),
    "sharded weight": (
        lambda a: a.update(weight=torch.randn(0, 8)),
        "weight has shape (0, 8), expected at least one row; a sharded weight must be gathered first",
    ),
    "dtype mix": (
        lambda a: a.update(weight=a["weight"].half()),
        "weight has dtype float16, expected the dtype of input, float32",
    ),
    "integer input": (
        lambda a: a.update(input=a["input"].long()),
        "input has dtype int64, expected float16, bfloat16, float32 or float64",
    ),
    "bias shape": (
        lambda a: a.update(bias=torch.randn(9)),
        "bias has shape (9,), expected (10,), one value per class",
    ),
    "bias dtype": (
        lambda a: a.update(bias=torch.randn(10).half()),
        "bias has dtype float16, expected the dtype of input, float32",
    ),
    "batch shape": (
        lambda a: a.update(input=a["input"].view(2, 2, 8)),
        "target has shape (4,), expected the shape of input without its last dimension, (2, 2)",
    ),
    "reduction": (
        lambda a: a.update(reduction="batchmean"),
        "reduction is 'batchmean', expected 'mean', 'sum' or 'none'",
    ),
    "smoothing": (
        lambda a: a.update(label_smoothing=-0.5),
        "label_smoothing is -0.5, expected a value between 0 and 1",
    ),
    "softcap": (lambda a: a.update(softcap=-1.0), "softcap is -1, expected a positive, finite value or None"),
    "zero budget": (
        lambda a: a.update(memory_budget=0),
        "memory_budget is 0, expected a positive number of bytes or None",
    ),
    "negative budget": (
        lambda a: a.update(memory_budget=-5),
        "memory_budget is -5, expected a positive number of bytes or None",
    ),
    "accum_dtype": (
        lambda a: a.update(accum_dtype=torch.float16),
        "accum_dtype is float16, expected float32, the dtype of input, float32, or None",
    ),
}


@pytest.mark.parametrize("name", FUSED_LINEAR_CE)
def test_fused_linear_ce_bad_input(device, name):
    change, words = FUSED_LINEAR_CE[name]
    arguments = {
        "input": torch.randn(4, 8),
        "weight": torch.randn(10, 8),
        "target": torch.tensor([1, 2, 3, 4]),
    }
    change(arguments)
    on_device = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in arguments.items()}
    with pytest.raises(error_about(words)) as caught:
        liger.fused_linear_ce(**on_device)
    assert str(caught.value).splitlines()[0] == f"fused_linear_ce: {words}"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("wrong", [torch.bool, torch.int8, torch.complex64], ids=str)
def test_fused_linear_ce_denominator_of_another_dtype(device, dtype, wrong):
    """Also in float16, where the divisor of the loss is computed from it."""
    x, weight, _, target = random_layer(4, 8, 10, device, dtype)
    denominator = torch.ones((), device=device, dtype=wrong)
    words = f"denominator has dtype {str(wrong).removeprefix('torch.')}, expected a floating dtype, int64 or int32"
    with pytest.raises(RuntimeError, match=f"^fused_linear_ce: {words}"):
        liger.fused_linear_ce(x.requires_grad_(), weight, target, denominator=denominator)


@pytest.mark.parametrize("name", ["ce_weight", "token_weight", "denominator"])
def test_fused_linear_ce_weights_that_require_grad_are_refused(device, name):
    x, weight, _, target = random_layer(4, 8, 4, device)
    extra = torch.ones((1,) if name == "denominator" else (4,), device=device, requires_grad=True)
    with pytest.raises(
        RuntimeError, match=rf"fused_linear_ce: {name} requires grad, but .* has no gradient for it"
    ):
        liger.fused_linear_ce(x.requires_grad_(), weight, target, **{name: extra})


CHECKED_CALL = """
import sys, torch, liger
liger.set_backend(sys.argv[1])
target = torch.tensor([0, 1, int(sys.argv[2]), 3], device="cuda")
liger.cross_entropy(torch.randn(4, 7, device="cuda"), target)
liger.fused_linear_ce(torch.randn(4, 8, device="cuda"), torch.randn(7, 8, device="cuda"), target)
torch.cuda.synchronize()
"""


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["cuda", "triton"])
@pytest.mark.parametrize("target", [2, 9, -1])
def test_checked_targets_stop_on_a_gpu(backend, target):
    """In a process of its own: a kernel that stops takes the CUDA context with it."""
    run = subprocess.run(
        [sys.executable, "-c", CHECKED_CALL, backend, str(target)],
        env={**os.environ, "LIGER_CHECK_TARGETS": "1"},
        capture_output=True,
        text=True,
    )
    output = run.stdout + run.stderr
    if 0 <= target < 7:
        assert run.returncode == 0, output
    else:
        assert run.returncode != 0
        expected = {
            "cuda": f"cross_entropy: target at row 2 is {target}, expected 0 <= target < 7 or ignore_index -100",
            "triton": "target out of range",
        }
        assert expected[backend] in output, output
