# SPDX-License-Identifier: BSD-3-Clause
"""Views that begin anywhere, through every width of vectors: each op against plain torch."""

import pytest
import torch
import torch.nn.functional as F
from cases import DTYPES, assert_as_exact_as_torch, compiled

import liger

COLUMNS = (1, 7, 64, 1000, 4096, 33000)


def _cross_entropy(x, other):
    # Of the first column: the op is asked where rows begin, and not for classes.
    return torch.zeros(x.shape[0], dtype=torch.int64, device=x.device)


OPS = {
    "rms_norm": (lambda x, _: liger.rms_norm(x), lambda x, _: F.rms_norm(x, x.shape[-1:], None, 1e-6)),
    "rms_norm_gated": (
        liger.rms_norm_gated,
        lambda x, other: F.rms_norm(x, x.shape[-1:], None, 1e-6) * F.silu(other),
    ),
    "layer_norm": (lambda x, _: liger.layer_norm(x), lambda x, _: F.layer_norm(x, x.shape[-1:])),
    "softmax": (lambda x, _: liger.softmax(x), lambda x, _: x.softmax(-1)),
    "swiglu": (liger.swiglu, lambda x, other: F.silu(x) * other),
    "relu_squared": (lambda x, _: liger.relu_squared(x), lambda x, _: x.relu().square()),
    "cross_entropy": (
        lambda x, other: liger.cross_entropy(x, _cross_entropy(x, other), reduction="none"),
        lambda x, other: F.cross_entropy(x, _cross_entropy(x, other), reduction="none"),
    ),
    "kl_div": (
        lambda x, other: liger.kl_div(x, other, reduction="none"),
        lambda x, other: F.kl_div(
            x.log_softmax(-1), other.log_softmax(-1), reduction="none", log_target=True
        ).sum(-1),
    ),
}  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", OPS)
def test_views_off_16_bytes(name, dtype):
    function, plain = OPS[name]
    with compiled():
        check_views(function, plain, dtype)


def check_views(function, plain, dtype):
    for columns in COLUMNS:
        memory = torch.randn(6, columns + 13, device="cuda").to(dtype)
        for offset in (1, 3, 5):
            x, other = (memory[:, first : first + columns] for first in (offset, 13 - offset))
            exact = plain(x.double(), other.double())
            # A layer norm of one column and a loss of one class are exactly 0, whatever is rounded.
            intermediate = 20.0 if exact.dim() == 1 else 0.0
            assert_as_exact_as_torch(
                function(x, other), plain(x, other), exact, f"{columns} columns from {offset}", intermediate
            )
