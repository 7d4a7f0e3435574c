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


X, LOGITS, TARGET = torch.randn(4, 8), torch.randn(4, 10), torch.tensor([1, 2, 3, 4])
# (changes of good arguments, the error): what a shape or dtype alone does not decide.
BOTH = [
    ({"target": TARGET.float()}, "target has dtype float32, expected int64 or int32 class indices (class "
     "probabilities are not supported)"),
    ({"target": TARGET[:3]}, "target has shape (3,), expected (4,), one class index per row"),
    ({"ce_weight": torch.ones(9)}, "ce_weight has shape (9,), expected (10,), one weight per class"),
    ({"ce_weight": torch.ones(10).long()}, "ce_weight has dtype int64, expected float16, bfloat16, float32 or float64"),
    ({"token_weight": torch.ones(5)}, "token_weight has shape (5,), expected (4,), one weight per row"),
    ({"denominator": torch.ones(2)}, "denominator has shape (2,), expected one element"),
    ({"denominator": 3, "reduction": "none"},
     "denominator was given with reduction 'none', expected 'mean' or 'sum'"),
]  # fmt: skip
SHAPE = "expected the shape of {0} without its last dimension"
BAD = {
    liger.cross_entropy: [
        *BOTH,
        ({"logits": LOGITS[:, :0]}, "logits has shape (4, 0), expected (rows, classes) with at least one class"),
        ({"logits": LOGITS.view(2, 2, 10)}, f"target has shape (4,), {SHAPE.format('logits')}, (2, 2)"),
        ({"logits": LOGITS.view(4, 1, 10), "target": TARGET.view(4, 1), "token_weight": torch.ones(1, 4)},
         f"token_weight has shape (1, 4), {SHAPE.format('logits')}, (4, 1)"),
    ],
    liger.fused_linear_ce: [
        *BOTH,
        ({"weight": torch.randn(10, 5)},
         "weight has shape (10, 5), expected (vocab, hidden) with the hidden size of input, 8"),
        ({"weight": torch.randn(0, 8)},
         "weight has shape (0, 8), expected at least one row; a sharded weight must be gathered first"),
        ({"bias": torch.randn(9)}, "bias has shape (9,), expected (10,), one value per class"),
        ({"input": X.view(2, 2, 8)}, f"target has shape (4,), {SHAPE.format('input')}, (2, 2)"),
        ({"accum_dtype": torch.float16}, "accum_dtype is float16, expected float32, the dtype of input, "
         "float32, or None"),
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("function", "change", "words"),
    [(function, *case) for function, cases in BAD.items() for case in cases],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_bad_input(device, function, change, words):
    good = {
        liger.cross_entropy: {"logits": LOGITS},
        liger.fused_linear_ce: {"input": X, "weight": torch.randn(10, 8)},
    }
    given = {**good[function], "target": TARGET, **change}
    on_device = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in given.items()}
    with pytest.raises(error_about(words)) as caught:
        function(**on_device)
    assert str(caught.value).splitlines()[0] == f"{function.__name__}: {words}"


@pytest.mark.gpu
def test_cross_entropy_weight_on_another_device(device):
    logits, target = random_logits(4, 9, device)
    with pytest.raises(
        RuntimeError, match="cross_entropy: ce_weight is on cpu, expected the device of logits, cuda"
    ):
        liger.cross_entropy(logits, target, ce_weight=torch.ones(9))


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


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("wrong", [torch.bool, torch.int8, torch.complex64], ids=str)
def test_fused_linear_ce_denominator_of_another_dtype(device, dtype, wrong):
    """Also in float16, where the divisor of the loss is computed from it."""
    x, weight, _, target = random_layer(4, 8, 10, device, dtype)
    denominator = torch.ones((), device=device, dtype=wrong)
    words = f"denominator has dtype {str(wrong).removeprefix('torch.')}, expected a floating dtype, int64 or int32"
    with pytest.raises(RuntimeError, match=f"^fused_linear_ce: {words}"):
        liger.fused_linear_ce(x.requires_grad_(), weight, target, denominator=denominator)


@pytest.mark.parametrize("function", BAD)
def test_a_denominator_that_requires_grad_is_refused(device, function):
    x, weight, _, target = random_layer(4, 8, 4, device)
    given = (x, weight, target) if function is liger.fused_linear_ce else (x[:, :4], target)
    denominator = torch.ones((1,), device=device, requires_grad=True)
    words = rf"{function.__name__}: denominator requires grad, but .* has no gradient for it"
    with pytest.raises(RuntimeError, match=words):
        function(given[0].requires_grad_(), *given[1:], denominator=denominator)


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
