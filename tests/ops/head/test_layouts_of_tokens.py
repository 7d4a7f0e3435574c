# SPDX-License-Identifier: BSD-3-Clause
"""Tokens in another order than their dimensions: Megatron-LM's (s, b, h) as a view (b, s, h), and
others.

Results have the order of the dimensions; no copy of the hidden states or logits is made.
"""

import pytest
import torch
from copies import Copies

import liger

S, B, H, V = 5, 3, 8, 13
IGNORED = -100


def random(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)


def transposed(shape, seed):
    """(b, s, ...) whose memory is (s, b, ...)."""
    return random(S, B, *shape, seed=seed).transpose(0, 1)


def labels():
    target = torch.randint(V, (B, S), generator=torch.Generator().manual_seed(5))
    target[1, 1:3] = IGNORED
    return target


WEIGHT, BIAS, TOKEN_WEIGHT = random(V, H, seed=1), random(V, seed=2), random(B, S, seed=3).abs()
TEACHER_WEIGHT = random(V, H, seed=6)


def fused_linear_ce(x, **options):
    return liger.fused_linear_ce(x, WEIGHT, labels(), BIAS, token_weight=TOKEN_WEIGHT, **options)


def logprobs(x, **options):
    found = liger.fused_linear_logprobs(x, WEIGHT, labels(), BIAS, metrics=("entropy", "argmax"), **options)
    return tuple(found)


def metrics(x):
    return tuple(
        liger.fused_linear_ce(
            x, WEIGHT, labels(), reduction="none", metrics=("z_loss", "argmax", "logprobs", "entropy"),
        )
    )  # fmt: skip


def cross_entropy(x, **options):
    return liger.cross_entropy(x, labels(), token_weight=TOKEN_WEIGHT, **options)


def kl_div(x, **options):
    return liger.kl_div(x, transposed((V,), 7), labels(), token_weight=TOKEN_WEIGHT, **options)


def fused_linear_kl_div(x, **options):
    return liger.fused_linear_kl_div(
        x, WEIGHT, labels(), teacher_input=transposed((H,), 7), teacher_weight=TEACHER_WEIGHT,
        token_weight=TOKEN_WEIGHT, **options,
    )  # fmt: skip


CALLS = {
    "fused_linear_ce": (H, fused_linear_ce),
    "fused_linear_ce none": (H, lambda x: fused_linear_ce(x, reduction="none")),
    "metrics": (H, metrics),
    "fused_linear_logprobs": (H, logprobs),
    "fused_linear_logprobs recompute": (H, lambda x: logprobs(x, recompute=True)),
    "cross_entropy": (V, cross_entropy),
    "cross_entropy none": (V, lambda x: cross_entropy(x, reduction="none")),
    "kl_div": (V, kl_div),
    "kl_div none": (V, lambda x: kl_div(x, reduction="none")),
    "fused_linear_kl_div": (H, fused_linear_kl_div),
    "fused_linear_kl_div none": (H, lambda x: fused_linear_kl_div(x, reduction="none")),
}


def evaluated(call, x):
    """(results, gradient of x) of differentiable results with unequal upstream gradients."""
    x = x.detach().requires_grad_()
    results = call(x)
    results = results if isinstance(results, tuple) else (results,)
    used = [r for r in results if r is not None and r.requires_grad]
    upstream = [random(*r.shape, seed=9).to(r.dtype) for r in used]
    return results, torch.autograd.grad(used, x, upstream)[0]


@pytest.mark.parametrize("name", CALLS)
def test_equal_to_a_contiguous_tensor(name):
    features, call = CALLS[name]
    x = transposed((features,), 4)
    ours, grad = evaluated(call, x)
    expected, wanted = evaluated(call, x.contiguous())
    for a, b in zip(ours, expected, strict=True):
        if b is not None:
            torch.testing.assert_close(a, b)
    torch.testing.assert_close(grad, wanted)


@pytest.mark.parametrize("name", CALLS)
def test_no_copy(name):
    """The rows of a view are the rows of its memory. A tensor that is no view of rows is copied: the test can
    see it."""
    features, call = CALLS[name]
    with torch.no_grad():
        # The teachers of the calls are transposed, too.
        x = transposed((features,), 4)
        with Copies() as copies:
            call(x)
        assert all(size < x.numel() for size in copies.sizes), copies.sizes
        sliced = random(S, B, features + 2, seed=4)[..., :features].transpose(0, 1)[:, : S - 1]
        assert sliced.shape[1] == S - 1
        with Copies() as copies:
            liger._core.op.loss_rows.Tokens(sliced.select(-1, 0), None).flatten(sliced)
        assert sliced.numel() in copies.sizes


@pytest.mark.parametrize(
    "view, order",
    [
        (random(S, B, H, seed=1), None),
        (random(S, B, H, seed=1).transpose(0, 1), (1, 0)),
        (random(4, S, B, H, seed=1).permute(2, 1, 0, 3), (2, 1, 0)),
        (random(4, S, B, H, seed=1).permute(1, 2, 0, 3), (2, 0, 1)),
        (random(S, 1, B, H, seed=1).permute(2, 1, 0, 3), (2, 0, 1)),
        # Rows that start at multiples of more than their length.
        (random(S, B, H + 8, seed=1)[..., :H].transpose(0, 1), (1, 0)),
        # No order makes these dense.
        (random(S, B, H, seed=1)[:, : B - 1].transpose(0, 1), None),
        (random(B, 1, H, seed=1).expand(B, S, H), None),
        (random(S, H, seed=1), None),
        (random(1, S, H, seed=1), None),
        (random(0, B, H, seed=1).transpose(0, 1), None),
    ],
)
def test_memory_order(view, order):
    from liger._core.op.loss_rows import Tokens, memory_order

    assert memory_order(view) == order
    tokens = Tokens(view.select(-1, 0), order)
    rows = tokens.flatten(view)
    if order is not None:
        assert rows.data_ptr() == view.data_ptr()
    torch.testing.assert_close(tokens.restore(rows[:, 0]), view.select(-1, 0))


def test_results_of_rows_can_be_flattened_by_view():
    x = transposed((H,), 0)
    for result in (
        *(t for t in logprobs(x) if t is not None),
        fused_linear_ce(x, reduction="none"),
        kl_div(transposed((V,), 0), reduction="none"),
    ):
        assert result.shape == (B, S)
        result.view(-1)


def test_inplace_gradient():
    """The gradient overwrites the logits of the view, not a copy of them."""
    base = random(S, B, V, seed=4)
    grads = []
    for inplace in (True, False):
        memory = base.clone().requires_grad_()
        logits = (memory * 1).transpose(0, 1)
        kept = logits.detach()
        liger.cross_entropy(logits, labels(), inplace=inplace).backward()
        grads.append(memory.grad)
        assert torch.equal(kept, base.transpose(0, 1)) != inplace
    torch.testing.assert_close(*grads)
