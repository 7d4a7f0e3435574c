# SPDX-License-Identifier: BSD-3-Clause
"""Of every op of rows: the same bits in every run, also of sums over several blocks; calls without rows, with
rows that are all ignored, and with rows in several dimensions."""

import pytest
import torch
from cross_entropy_reference import ALL_METRICS, rows_per_chunk
from declared_calls import DECLARED, call, is_of_batch, shapes
from public_callables import CASES, arguments, interpretable, results, weighted_sum

import liger
from liger._core.runtime.environment import triton_interpreted

TOKENS = 130


def rotated(function):
    """An op of queries and keys (batch, heads, tokens, dim), with tables."""

    def call(q, k, *weights):
        angle = torch.linspace(0, 3, q.shape[2] * q.shape[3] // 2, device=q.device)
        angle = angle.view(1, q.shape[2], -1).repeat(1, 1, 2)
        return function(q, k, *weights, angle.cos(), angle.sin())

    return call


def target_of(x, classes, ignored):
    target = torch.arange(len(x), device=x.device) % classes
    target[: int(ignored * len(x))] = -100
    return target


def cross_entropy(logits):
    target = target_of(logits, logits.shape[1], 0.1)
    return liger.cross_entropy(logits, target, label_smoothing=0.1, lse_square_scale=1e-3, **ALL_METRICS)


def linear_ce(ignored):
    def call(x, weight, bias):
        target = target_of(x, len(weight), ignored)
        return liger.fused_linear_ce(
            x, weight, target, bias, memory_budget=rows_per_chunk(32, weight), **ALL_METRICS
        )

    return call


def gated_norm(group_size):
    return lambda x, gate, weight: liger.rms_norm_gated(x, gate, weight, group_size=group_size)


ROW, LAYER = (TOKENS, 512), [(TOKENS, 16), (300, 16), (300,)]
BITS = {
    "softmax of one warp": (liger.softmax, [(9, 64)]),
    "softmax of one block": (liger.softmax, [(9, 1000)]),
    "softmax of long rows": (liger.softmax, [(9, 70000)]),
    **{op: (call(op), list(shapes(op, (9, 32, 50) if is_of_batch(op) else ROW).values())) for op in DECLARED},
    "rms_norm_gated of groups": (gated_norm(128), [ROW, ROW, (512,)]),
    "rope": (rotated(liger.rope), [(2, 4, 9, 64), (2, 2, 9, 64)]),
    "qk_norm_rope": (rotated(liger.qk_norm_rope), [(2, 6, 70, 128), (2, 2, 70, 128), (128,), (128,)]),
    "cross_entropy": (cross_entropy, [(TOKENS, 1000)]),
    "fused_linear_ce": (linear_ce(0.0), LAYER),
    "fused_linear_ce, half ignored": (linear_ce(0.5), LAYER),
}


def floats(results):
    results = results if isinstance(results, tuple) else (results,)
    return [r for r in results if r is not None and r.is_floating_point()]


@pytest.mark.skipif(triton_interpreted(), reason="the interpreter runs one block after the other")
@pytest.mark.parametrize("name", BITS)
def test_same_bits_twice_and_inputs_untouched(name, device):
    function, of_inputs = BITS[name]
    inputs = [torch.randn(shape, device=device, requires_grad=True) for shape in of_inputs]
    before, versions = [t.detach().clone() for t in inputs], [t._version for t in inputs]
    runs, upstream = [], None
    for _ in range(2):
        results = floats(function(*inputs))
        trained = [r for r in results if r.requires_grad]
        upstream = upstream or [torch.randn_like(r) for r in trained]
        for keep in (True, False):
            runs.append([*results, *torch.autograd.grad(trained, inputs, upstream, retain_graph=keep)])
    for first, *others in zip(*runs, strict=True):
        assert all(torch.equal(first, other) for other in others)
    assert all(map(torch.equal, inputs, before)) and [t._version for t in inputs] == versions


def written(function):
    return lambda *inputs: function(*(t * 1 for t in inputs), inplace=True)


# Without rows and without columns.
NO_ROWS, NO_BATCH = ((0, 16), (2, 0, 16), (3, 0)), ((0, 4, 3), (2, 4, 0), (2, 0, 3))
EMPTY = [
    *((call(op), op, main) for op in DECLARED for main in (NO_BATCH if is_of_batch(op) else NO_ROWS)),
    *((gated_norm(4), "rms_norm_gated", main) for main in NO_ROWS),
]
for _op in ("swiglu", "geglu", "swiglu_packed", "geglu_packed"):
    EMPTY += [(written(getattr(liger, _op)), _op, main) for main in NO_ROWS]
    EMPTY += [(getattr(liger, _op), _op, (0,))]


@pytest.mark.parametrize(("function", "op", "main"), EMPTY)
def test_without_rows(function, op, main, device):
    x, *_ = inputs = [
        torch.randn(shape, device=device, requires_grad=True) for shape in shapes(op, main).values()
    ]
    y, *_ = found = floats(function(*inputs))
    assert y.shape == (x.shape if not op.endswith("_packed") else (*x.shape[:-1], x.shape[-1] // 2))
    sum(result.sum() for result in found).backward()
    for tensor in inputs:
        assert torch.equal(tensor.grad, torch.zeros_like(tensor))


# --- functions of rows with a target ------------------------------------------------------------------------

ROWS = 7
OF_TARGETS = [
    name for name in interpretable() if CASES[name].ignored and arguments(name)["target"].shape == (ROWS,)
]


def of_all_rows(change, given):
    """The arguments with a change of every tensor that has a number, a vector or a class for each row."""
    return {
        key: change(t.detach()).requires_grad_(t.requires_grad)
        if isinstance(t, torch.Tensor) and t.shape[:1] == (ROWS,)
        else t
        for key, t in given.items()
    }


# With an option that CASES have not, whose tensors may be float64.
WITHOUT_COUNT = [
    (name, options)
    for name in OF_TARGETS
    for options in ({}, {"logits_dtype": torch.float32})
    if not options or "logprobs" in name
]


@pytest.mark.parametrize("kind", ["no rows", "ignored rows"])
@pytest.mark.parametrize(
    ("name", "options"), WITHOUT_COUNT, ids=lambda v: v if isinstance(v, str) else "-".join(v)
)
def test_nothing_that_counts(name, options, kind, device):
    """A mean is NaN, as of torch, and no class is the most probable one; any other result is zero, and so are
    gradients."""
    given = arguments(name, device) | options
    if kind == "no rows":
        given = of_all_rows(lambda t: t[:0], given)
    given["target"] = torch.full_like(given["target"], -100)
    loss, *others = found = results(name, given)
    mean = "logprobs" not in name and given.get("reduction", "mean") == "mean"
    assert loss.isnan() if mean else not loss.any()
    for other in others:
        assert (other == -1).all() if other.dtype == torch.int64 else not other.nan_to_num().any()
    leaves = [given[key] for key in CASES[name].differentiable]
    total = weighted_sum([r for r in found if r.requires_grad])
    for leaf, grad in zip(leaves, torch.autograd.grad(total, leaves), strict=True):
        assert torch.equal(grad, torch.zeros_like(leaf))


@pytest.mark.parametrize("shape", [(), (2, 3), (2, 1, 3)], ids=str)
@pytest.mark.parametrize("name", OF_TARGETS)
def test_rows_in_several_dimensions(name, shape, device, backend):
    """And targets of 32 bits: the same bits, but in Triton, which compiles a kernel for each type."""
    given = of_all_rows(lambda t: t[1:][: torch.Size(shape).numel()], arguments(name, device))
    shaped = {
        key: t.detach().view((*shape, *t.shape[1:])).requires_grad_(t.requires_grad)
        if isinstance(t, torch.Tensor) and t.shape[:1] == given["target"].shape
        else t
        for key, t in given.items()
    }
    runs = []
    for tensors in (given, shaped | {"target": shaped["target"].int()}):
        found = results(name, tensors)
        total = weighted_sum([r for r in found if r.requires_grad])
        grads = torch.autograd.grad(total, [tensors[key] for key in CASES[name].differentiable])
        runs.append([*found, *grads])
    rows = len(given["target"])
    for flat, other in zip(*runs, strict=True):
        per_row = flat.shape[:1] == (rows,)
        assert other.shape == ((*shape, *flat.shape[1:]) if per_row else flat.shape)
        rtol = 1e-6 if torch.cuda.is_available() and backend == "triton" else 0
        torch.testing.assert_close(flat, other.reshape(flat.shape), rtol=rtol, atol=rtol / 10)
