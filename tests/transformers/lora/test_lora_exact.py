# SPDX-License-Identifier: BSD-3-Clause
"""Float32 adapters of a 16-bit model: PEFT computes in float32, and so the range and the strides of factors
are free."""

import contextlib
import copy

import pytest
import torch
from torch import nn

import liger

peft = pytest.importorskip("peft")
pytest.importorskip("transformers")

from cases import assert_as_exact_as_torch  # noqa: E402

import liger.transformers as lt  # noqa: E402
from liger.transformers.lora import exact as products  # noqa: E402

ROWS, INPUTS, OUTPUTS, RANK = 6, 40, 24, 4


@pytest.fixture(params=["split", "converted"], autouse=True)
def operands(request, monkeypatch):
    """What is done to operands in two dtypes."""
    monkeypatch.setattr(products, "_CONVERTED", 0 if request.param == "split" else 2**25)


def layers(dtype, device, a, b):
    """A patched LoRA layer, its unpatched twin, and the twin in float64, with the first and second factor."""
    plain = nn.Sequential(nn.Linear(INPUTS, OUTPUTS)).to(device, dtype)
    plain = peft.get_peft_model(plain, peft.LoraConfig(r=a.shape[0], lora_alpha=16, target_modules=["0"]))
    ours = liger.patch(copy.deepcopy(plain), verbose=False)
    assert list(lt.patch_report(ours).replaced.values()) == ["lora_linear"]
    found = [model.base_model.model[0] for model in (ours, plain, copy.deepcopy(plain).double())]
    for layer in found:
        wide = layer.base_layer.weight.dtype == torch.float64
        layer.lora_A["default"].weight = nn.Parameter(a.double() if wide else a)
        layer.lora_B["default"].weight = nn.Parameter(b.double() if wide else b)
    return found


def results_of(layer, x, upstream, of_backward=None):
    """name -> the result, and the gradients of the input and of the factors."""
    x = x.to(layer.base_layer.weight.dtype).requires_grad_()
    y = layer(x)
    factors = [layer.lora_A["default"].weight, layer.lora_B["default"].weight]
    with of_backward or contextlib.nullcontext():
        grads = torch.autograd.grad(y, [x, *factors], upstream.to(y.dtype))
    return dict(zip(("y", "x", "A", "B"), (y.detach(), *grads), strict=True))


STRIDED = {
    "columns": lambda w: w.repeat_interleave(2, 1)[:, ::2],
    "rows and columns": lambda w: w.repeat_interleave(2, 0).repeat_interleave(3, 1)[::2, ::3],
    "transposed": lambda w: w.t().contiguous().t(),
    "one row, repeated": lambda w: w[:1].expand_as(w),
    "one column, repeated": lambda w: w[:, :1].expand_as(w),
    "one element, repeated": lambda w: w[:1, :1].expand_as(w),
}


@pytest.mark.parametrize("rank", [1, RANK])
@pytest.mark.parametrize("strides", STRIDED)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_factors_of_any_strides(dtype, strides, rank, device):
    a, b = torch.randn(rank, INPUTS, device=device), torch.randn(OUTPUTS, rank, device=device)
    found = layers(dtype, device, STRIDED[strides](a), STRIDED[strides](b))
    x = torch.randn(ROWS, INPUTS, device=device).to(dtype)
    upstream = torch.randn(ROWS, OUTPUTS, device=device).to(dtype)
    ours, theirs, exact = (results_of(layer, x, upstream) for layer in found)
    for name in ours:
        assert_as_exact_as_torch(ours[name], theirs[name], exact[name], name)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_low_rank_products_beyond_the_range_of_float16(dtype, device, monkeypatch):
    """A fresh adapter (B = 0), and upstream gradients that a GradScaler has scaled; in blocks of rows."""
    for name in ("_CPU_BLOCK", "_GPU_BLOCK"):
        monkeypatch.setattr(f"liger._core.math.row_blocks.{name}", 2 * OUTPUTS)
    a = torch.linspace(0, 10, RANK * INPUTS, device=device).view(RANK, INPUTS)
    x = 3000 * torch.randn(ROWS, INPUTS, device=device).to(dtype)
    upstream = torch.full((ROWS, OUTPUTS), 2000, dtype=dtype, device=device)
    b = torch.linspace(0.5, 1, OUTPUTS * RANK, device=device).view(OUTPUTS, RANK)
    for factors, given in (((a, 0 * b), x), ((1e-3 * (a - 5), b), x / 3000)):
        found = layers(dtype, device, *factors)
        ours, theirs, exact = (results_of(layer, given, upstream) for layer in found)
        for name in ours:
            assert_as_exact_as_torch(ours[name], theirs[name], exact[name], name)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_backward_under_autocast(dtype, device):
    """The forward had no autocast, and its backward is as exact as without."""
    a, b = torch.randn(RANK, INPUTS, device=device), torch.randn(OUTPUTS, RANK, device=device)
    ours, _, exact = layers(dtype, device, a, b)
    x = torch.randn(ROWS, INPUTS, device=device).to(dtype)
    upstream = torch.randn(ROWS, OUTPUTS, device=device).to(dtype)
    expected = results_of(exact, x, upstream)
    plain = results_of(ours, x, upstream)
    inside = results_of(ours, x, upstream, torch.autocast(x.device.type, dtype=dtype))
    for name in inside:
        assert_as_exact_as_torch(inside[name], plain[name], expected[name], name)


@pytest.mark.parametrize("where", ["x", "upstream", "A", "B"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_same_elements_are_finite(dtype, where, device):
    given = {"x": (ROWS, INPUTS), "upstream": (ROWS, OUTPUTS), "A": (RANK, INPUTS), "B": (OUTPUTS, RANK)}
    given = {name: torch.randn(shape, device=device).to(dtype) for name, shape in given.items()}
    given[where][1, 2] = float("inf")
    found = layers(dtype, device, given["A"].float(), given["B"].float())[:2]
    ours, theirs = (results_of(layer, given["x"], given["upstream"]) for layer in found)
    for name in ours:
        assert torch.equal(ours[name].isfinite(), theirs[name].isfinite()), name
    assert not all(their.isfinite().all() for their in theirs.values())
