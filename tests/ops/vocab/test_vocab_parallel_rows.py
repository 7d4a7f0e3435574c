# SPDX-License-Identifier: BSD-3-Clause
"""Rows of the ops over a sharded vocabulary: ignored rows cost no GEMM, and the tokens may have any
layout."""

import contextlib
import itertools
from functools import partial

import in_shards
import pytest
import torch
from cross_entropy_reference import leaves, random_layer
from processes import assert_same_bits, in_processes, needs_gloo, of_the_torch_backend, on_processes, part_of
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import liger
from liger._core.head.lm_head import LMHead
from liger.distributed.vocab import cross_entropy

# --- ignored rows -------------------------------------------------------------------------------------------


@contextlib.contextmanager
def counted_rows(logits):
    """A list to which the rows of every product are appended: of the logits, and of the gradients of a
    chunk. ``logits``: (owner of the function that writes them, its name, position of the hidden states)."""
    rows, before = [], []
    for owner, name, place in (logits, (cross_entropy.Gradients, "add", 2)):
        real = getattr(owner, name)
        before.append((owner, name, real))

        def counting(*arguments, real=real, place=place):
            rows.append(len(arguments[place]))
            real(*arguments)

        setattr(owner, name, counting)
    try:
        yield rows
    finally:
        for owner, name, real in before:
            setattr(owner, name, real)


PATTERNS = {
    "a prompt": lambda target: torch.arange(len(target)) >= 30,
    "every third": lambda target: torch.arange(len(target)) % 3 != 0,
    "all but one": lambda target: torch.arange(len(target)) == 17,
    "all": lambda target: torch.zeros_like(target, dtype=torch.bool),
}


OF_LOSS = {
    "label_smoothing": 0.1,
    "lse_square_scale": 1e-2,
    "softcap": 3.0,
    "metrics": ("z_loss", "logprobs"),
}
LINEAR, LOGITS = (cross_entropy, "write_linear", 0), (LMHead, "write_logits", 1)
# (function, what writes the logits, products of each row, options). Where a gradient belongs to single rows,
# the backward computes the logits of the forward again.
FREE = [
    (in_shards.fused_linear_ce, LINEAR, 2, {"reduction": "sum", **OF_LOSS}),
    (in_shards.fused_linear_ce, LINEAR, 3, {"reduction": "none", **OF_LOSS}),
    (in_shards.fused_linear_logprobs, LOGITS, 3, {"metrics": ("entropy", "argmax")}),
]


@in_processes(1, 2)
def test_ignored_rows_are_free(rank, world):
    """No product has a row of theirs, results and gradients are as for the other rows alone, and hidden
    states and token weights of theirs may be anything."""
    x, weight, bias, target = random_layer(40, 8, 34, "cpu")
    target[:] = torch.arange(40) % 34
    token_weight = torch.rand(40) + 0.5
    for (name, valid_of), (function, logits, times, options) in itertools.product(PATTERNS.items(), FREE):
        kept = valid_of(target)
        inputs = (
            (x.masked_fill(~kept.unsqueeze(1), torch.nan), torch.where(kept, target, -100),
             token_weight.masked_fill(~kept, torch.nan)),
            (x[kept], target[kept], token_weight[kept]),
        )  # fmt: skip
        runs = []
        for hidden, labels, weights in inputs:
            leaf = [leaves(hidden)[0], part_of(weight, rank, world), part_of(bias, rank, world)]
            given = {"token_weight": weights} if function is in_shards.fused_linear_ce else {}
            with counted_rows(logits) as rows:
                found = function(
                    *leaf[:2], labels, leaf[2], vocab_size=34, memory_budget=4 * 17 * 4, **options, **given
                )
                sum(value.sum() for value in found if value is not None and value.requires_grad).backward()
            runs.append((found, leaf, rows))
        (found, mine, rows), (one, alone, _) = runs
        assert sum(rows) == times * kept.sum() and (kept.sum() < 4 or len(rows) > times), (name, rows)
        for what, values, others in zip(found._fields, found, one, strict=True):
            if values is None:
                continue
            if values.shape == kept.shape:
                assert (values[~kept] == (-1 if what == "argmax" else 0)).all(), (name, what)
                values = values[kept]
            torch.testing.assert_close(values, others)
        assert not mine[0].grad[~kept].any()
        torch.testing.assert_close(mine[0].grad[kept], alone[0].grad)
        assert_same_bits(mine[0].grad, name)
        for ours, other in zip(mine[1:], alone[1:], strict=True):
            assert ours.grad.any() == kept.any()
            torch.testing.assert_close(ours.grad, other.grad)


# --- layouts of the tokens ----------------------------------------------------------------------------------

BATCH, LENGTH, HIDDEN, VOCAB = 3, 7, 16, 35
# Name -> (order in memory, sharded dimension or None, whether it is passed as a view (b, s, h)).
LAYOUTS = {
    "tokens": ("rows", None, False),
    "sharded tokens": ("rows", 0, False),
    "sharded batch of (b, s, h)": ("bsh", 0, False),
    "sharded sequence of (b, s, h)": ("bsh", 1, False),
    "(s, b, h)": ("sbh", None, False),
    "sharded sequence of (s, b, h)": ("sbh", 0, False),
    "(s, b, h) as a view (b, s, h)": ("sbh", None, True),
    "sharded sequence of (s, b, h) as a view (b, s, h)": ("sbh", 0, True),
}


def _in_memory(tensor, order):
    """(b, s, ...) as a new tensor in another order."""
    if order == "sbh":
        tensor = tensor.transpose(0, 1)
    return (tensor.flatten(0, 1) if order == "rows" else tensor).clone(memory_format=torch.contiguous_format)


def _of_memory(tensor, order):
    """Inverse of :func:`_in_memory`."""
    if order == "rows":
        return tensor.unflatten(0, (BATCH, LENGTH))
    return tensor.transpose(0, 1) if order == "sbh" else tensor


def _loss(reduction, options, call, hidden, weight, target, bias, **more):
    given = {"label_smoothing": 0.1, "softcap": 4.0, "reduction": reduction, "metrics": ("logprobs",)}
    found = call(hidden, weight, target, bias, **given, **options, **more)
    per_row = {"logprobs": found.logprobs} | ({"loss": found.loss} if reduction == "none" else {})
    return found.loss.square().sum(), per_row


def _policy(temperature, softcap, options, call, hidden, weight, target, bias, **more):
    found = call(
        hidden, weight, target, bias, temperature=temperature, softcap=softcap, metrics=("entropy", "argmax"),
        **options, **more,
    )  # fmt: skip
    results = {name: value for name, value in found._asdict().items() if value is not None}
    return found.logprobs.sum() - 0.3 * found.entropy.square().sum(), results


CE = liger.fused_linear_ce, in_shards.fused_linear_ce
LOGPROBS = liger.fused_linear_logprobs, in_shards.fused_linear_logprobs
FLOAT32 = {"logits_dtype": torch.float32}
WORK = {
    **{f"loss, {r}": (CE, partial(_loss, r, {})) for r in ("mean", "sum", "none")},
    **{
        f"log-probabilities, temperature {t}, softcap {s}": (LOGPROBS, partial(_policy, t, s, {}))
        for t, s in itertools.product((1.0, 0.7), (None, 3.0))
    },
    "log-probabilities, float32 logits": (LOGPROBS, partial(_policy, 0.7, 3.0, FLOAT32)),
}


def _ignored(target):
    """No row; some; those that the first process has of every sharded layout."""
    yield "no row", target
    some = target.clone()
    some[0, :2] = some[1, 5] = some[2] = -100
    yield "some rows", some
    first = target.clone()
    first[:2], first[:, :4] = -100, -100
    yield "the rows of a process", first


def _check(layout, work, dtype, whole, target, mesh, budget):
    """Results and gradients agree with the op of one process on (b, s, h)."""
    (one, parallel), run = WORK[work]
    order, dim, as_view = LAYOUTS[layout]
    full = leaves(*whole)
    expected_loss, expected = run(one, *full[:2], target, full[2])
    expected_loss.backward()
    parts = [distribute_tensor(t, mesh, [Shard(0)]).requires_grad_() for t in whole[1:]]
    hidden, labels = _in_memory(whole[0], order), _in_memory(target, order)
    leaf = hidden if dim is None else distribute_tensor(hidden, mesh, [Shard(dim)])
    given = leaf.requires_grad_()
    if as_view:
        given, labels = given.transpose(0, 1), target
    loss, found = run(parallel, given, parts[0], labels, parts[1], memory_budget=budget)
    loss.backward()
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    what = f"{layout}, {work}, {dtype}"
    assert found.keys() == expected.keys()
    for name, value in found.items():
        assert not isinstance(value, DTensor) and value.shape == labels.shape, f"{what}: {name}"
        actual = value if as_view else _of_memory(value, order)
        if name == "argmax":
            assert torch.equal(actual, expected[name]) or dtype != torch.float32, what
        else:
            torch.testing.assert_close(actual, expected[name], rtol=tolerance, atol=tolerance)
    # Up to 2.11 torch replicates the gradient of a transposed DTensor with shards of different sizes.
    if dim is not None and not (as_view and tuple(map(int, torch.__version__.split(".")[:2])) < (2, 12)):
        assert leaf.grad.placements == (Shard(dim),), what
    grad = leaf.grad.full_tensor() if dim is not None else leaf.grad
    grads = [_of_memory(grad, order), *(p.grad.full_tensor() for p in parts)]
    for name, actual, wanted in zip(("hidden", "weight", "bias"), grads, full, strict=True):
        error = (actual.float() - wanted.grad.float()).norm() / wanted.grad.float().norm()
        assert error <= tolerance, f"{what}: gradient of {name}, error {error:.3g}"
    ignored = target == -100
    assert not grads[0][ignored].any(), what
    assert_same_bits(grads[0], what)


def _layouts(works, rank, world):
    mesh = init_device_mesh("cpu", (world,))
    for dtype in (torch.float32, torch.bfloat16):
        x, weight, bias, target = random_layer(BATCH * LENGTH, HIDDEN, VOCAB, "cpu", dtype)
        target = target.clamp(min=0).view(BATCH, LENGTH)
        whole = x.view(BATCH, LENGTH, HIDDEN), weight, bias
        for (_, labels), layout, work in itertools.product(_ignored(target), LAYOUTS, works):
            budget = 5 * -(-VOCAB // world) * dtype.itemsize
            _check(layout, work, dtype, whole, labels, mesh, budget)


@pytest.mark.slow
@needs_gloo
@of_the_torch_backend
@pytest.mark.parametrize("work", WORK)
def test_layouts(work, tmp_path):
    """Sequences of 7 tokens on two processes: shards of different sizes; several chunks."""
    on_processes(tmp_path, partial(_layouts, [work]))
