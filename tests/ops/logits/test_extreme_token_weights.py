# SPDX-License-Identifier: BSD-3-Clause
"""Token weights of 0, infinity and NaN: a weight multiplies the loss of its row and the gradient of the row's
logits.

The reference is this product in float64. Where the product is infinite, a gradient may be infinite or NaN:
torch's log_softmax, and the compiled kernels, subtract infinity from infinity at the target.
"""

import math

import pytest
import torch
import torch.nn.functional as F
from cases import DTYPES

import liger

ROWS, HIDDEN, VOCAB = 6, 8, 11
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 5e-2, torch.float16: 1e-2}
OPTIONS = [
    {},
    {"label_smoothing": 0.1},
    {"lse_square_scale": 1e-2},
    {"softcap": 5.0},
    {"denominator": 3.0},
    {"ce_weight": True},
]


def rows_of(z, y, label_smoothing=0.0, lse_square_scale=0.0, softcap=None, ce_weight=None, denominator=None):
    """The unweighted loss of each row."""
    z = z if softcap is None else softcap * torch.tanh(z / softcap)
    loss = F.cross_entropy(z, y, ce_weight, reduction="none", label_smoothing=label_smoothing)
    return loss + lse_square_scale * torch.where(y < 0, 0.0, z.logsumexp(-1) ** 2)


def expected(z, y, token_weight, reduction, options):
    """(loss, gradient of the logits z) in float64."""
    rows = rows_of(z, y, **options)
    (dz,) = torch.autograd.grad(rows.sum(), z)
    divisor = 1.0
    if reduction != "none" and "denominator" in options:
        divisor = options["denominator"]
    elif reduction == "mean":
        weights = options.get("ce_weight", torch.ones(VOCAB, dtype=z.dtype, device=z.device))
        divisor = torch.where(y < 0, 0.0, weights[y.clamp(min=0)]).sum()
    loss = torch.where(y < 0, 0.0, rows.detach() * token_weight)
    dz = torch.where(y.unsqueeze(1) < 0, 0.0, dz * (token_weight / divisor).unsqueeze(1))
    return loss if reduction == "none" else loss.sum() / divisor, dz


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: next(iter(options), "plain"))
@pytest.mark.parametrize("weight_of_rows", [0.0, math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.covering(2)
def test_extreme_token_weights(device, dtype, reduction, weight_of_rows, options):
    sizes = (ROWS, HIDDEN), (VOCAB, HIDDEN), (VOCAB,)
    x, w, b = (torch.randn(size, device=device).div(3).to(dtype) for size in sizes)
    y = torch.randint(VOCAB, (ROWS,), device=device)
    y[1] = -100
    options = dict(options)
    if reduction == "none":
        options.pop("denominator", None)
    if "ce_weight" in options:
        options["ce_weight"] = torch.rand(VOCAB, device=device)
    wide = {k: v.double() if isinstance(v, torch.Tensor) else v for k, v in options.items()}

    def same(found, wanted):
        torch.testing.assert_close(
            found.double(), wanted, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype], equal_nan=True
        )

    def same_where_finite(found, wanted):
        finite = wanted.isfinite()
        assert torch.equal(found.isfinite(), finite)
        same(found[finite], wanted[finite])

    # One row, the ignored row, several, all.
    for rows in ([2], [1], [0, 1, 5], range(ROWS)):
        token_weight = torch.rand(ROWS, device=device) + 0.5
        token_weight[list(rows)] = weight_of_rows
        given = {"token_weight": token_weight, "reduction": reduction, **options}
        z = F.linear(x.double(), w.double(), b.double()).requires_grad_()
        loss, dz = expected(z, y, token_weight.double(), reduction, wide)
        for bias in (b, None) if rows == [2] else (b,):
            leaves = [t.clone().requires_grad_() for t in (x, w, b)][: 2 if bias is None else 3]
            found = liger.fused_linear_ce(leaves[0], leaves[1], y, *leaves[2:], **given)
            if bias is None:
                z = F.linear(x.double(), w.double()).requires_grad_()
                loss, dz = expected(z, y, token_weight.double(), reduction, wide)
            same(found.detach(), loss)
            wanted = (dz @ w.double(), dz.t() @ x.double(), dz.sum(0))
            for gradient, right in zip(torch.autograd.grad(found.sum(), leaves), wanted, strict=False):
                same_where_finite(gradient, right)
        logits = z.detach().to(dtype).requires_grad_()
        loss, dz = expected(
            logits.detach().double().requires_grad_(), y, token_weight.double(), reduction, wide
        )
        found = liger.cross_entropy(logits, y, **given)
        same(found.detach(), loss)
        same_where_finite(torch.autograd.grad(found.sum(), logits)[0], dz)
