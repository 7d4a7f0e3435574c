# SPDX-License-Identifier: BSD-3-Clause
"""Tensors in any layout in memory give what contiguous copies of them give, upstream gradients too. So does
any number of rows at a time."""

import pytest
import torch
from cases import strided_like
from public_callables import CASES, arguments, differentiable_outputs, interpretable, outputs


def padded(tensor):
    """Rows of wider ones, which begin at any element of a vector."""
    wide = tensor.new_zeros(*tensor.shape[:-1], tensor.shape[-1] + 3)
    wide[..., 1:-2] = tensor
    return wide[..., 1:-2]


def transposed(tensor):
    """The first dimension is the innermost one."""
    order = list(range(tensor.dim()))[::-1]
    return tensor.permute(order).contiguous().permute(order)


def swapped(first, second):
    return lambda t: t.transpose(first, second).contiguous().transpose(first, second)


# name -> (in memory, dimensions that it needs)
LAYOUTS = {
    "every second element": (strided_like, 1),
    "padded rows": (padded, 1),
    "transposed": (transposed, 2),
    "columns before rows": (swapped(-1, -2), 2),
    "tokens before heads": (swapped(-2, -3), 3),
}
KEEPING = ["relu_squared", "softmax", "swiglu", "geglu", "geglu tanh", "group_norm", "rope"]


def moved(tensor, layout):
    move, dims = LAYOUTS[layout]
    if not isinstance(tensor, torch.Tensor) or tensor.dim() < dims:
        return tensor
    return move(tensor.detach()).requires_grad_(tensor.requires_grad)


def run(name, given, upstream):
    results = differentiable_outputs(name, given)
    wanted = [given[key] for key in CASES[name].differentiable]
    return [*results, *torch.autograd.grad(results, wanted, upstream)]


@pytest.mark.parametrize("name", interpretable())
def test_equal_to_contiguous_tensors(name, device):
    given = arguments(name, device)
    upstream = [torch.randn_like(r) for r in differentiable_outputs(name, given)]
    expected = run(name, given, upstream)

    def check(**other):
        for a, b in zip(run(name, given | other, gradients), expected, strict=True):
            # Other strides are other loops on a CPU, and other products.
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5 * max(1.0, b.abs().max().item()))

    for layout in LAYOUTS:
        print(layout)
        gradients = [moved(g, layout) for g in upstream]
        check(**{key: moved(value, layout) for key, value in given.items()})
    # One alone: a kernel may not read one argument by the strides of another.
    gradients = upstream
    for key, value in given.items():
        print(key)
        check(**{key: moved(value, "transposed")})


@pytest.mark.parametrize("name", interpretable())
def test_blocks_of_one_row(name, device, monkeypatch):
    given = arguments(name, device)
    upstream = [torch.randn_like(r) for r in differentiable_outputs(name, given)]
    expected = run(name, given, upstream)
    for block in ("_CPU_BLOCK", "_GPU_BLOCK"):
        monkeypatch.setattr(f"liger._core.math.row_blocks.{block}", 1)
    for a, b in zip(run(name, given, upstream), expected, strict=True):
        # Products of one row are other loops.
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5 * max(1.0, b.abs().max().item()))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", KEEPING)
def test_results_keep_the_layout(name, layout, device):
    given, keys = arguments(name, device), CASES[name].differentiable
    for changed in (keys, keys[:1]):
        inputs = given | {key: moved(given[key], layout) for key in changed}
        leaves = [inputs[key] for key in keys]
        results = outputs(name, inputs)
        for result, source in zip(results, leaves, strict=False):
            assert result.stride() == torch.empty_like(source).stride()
        if name.startswith(("swiglu", "geglu")):
            for grad, source in zip(torch.autograd.grad(results[0].sum(), leaves), leaves, strict=True):
                assert grad.stride() == torch.empty_like(source).stride()
