# SPDX-License-Identifier: BSD-3-Clause
"""Outputs that a backward recomputes (docs/lab/activations.md) have the bits of the forward."""

import pytest
import torch

import liger
from liger.transformers.mlp.gated_mlp import TILED_ACTIVATIONS
from liger.transformers.mlp.recipe import _form

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# Rows of every kernel: several per block, vectors of two, four and eight per thread, no vectors, read twice.
WIDTHS = (64, 200, 2048, 2560, 4096, 5120, 8192, 1023, 40000)


@pytest.mark.covering(2)
@pytest.mark.parametrize("casting", ["llama", "gemma", "none"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", WIDTHS)
def test_norm_of_a_stored_sum(device, width, dtype, casting):
    x, residual = (torch.randn(37, width, device=device).to(dtype) for _ in range(2))
    weight = torch.randn(width, device=device).to(dtype)
    y, total = liger.fused_add_rms_norm(x, residual, weight, 1e-6, 0.0, casting)
    assert torch.equal(liger.rms_norm(total, weight, 1e-6, 0.0, casting), y)


@pytest.mark.parametrize("activation", [a for a in TILED_ACTIVATIONS if _form(a, False).emits])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", (64, 1023, 8192))
def test_product_of_the_backward(device, width, dtype, activation):
    family, options = ("swiglu", ()) if activation == "silu" else ("geglu", ("none",))
    ops = torch.ops.liger
    gate, up, grad = (torch.randn(2, 37, width, device=device).mul_(4).to(dtype) for _ in range(3))
    expected = getattr(ops, family)(gate, up, *options)
    assert torch.equal(getattr(ops, f"{family}_backward")(grad, gate, up, True, *options)[2], expected)
    packed = torch.cat((gate, up), -1)
    packed_product = getattr(ops, f"{family}_packed")(packed, *options)
    packed_backward = getattr(ops, f"{family}_packed_backward")
    assert torch.equal(packed_backward(grad, packed, True, *options)[1], packed_product)
    getattr(ops, f"{family}_backward_product_")(grad, gate, up, *options)
    assert torch.equal(grad, expected)
