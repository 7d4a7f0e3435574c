# SPDX-License-Identifier: BSD-3-Clause
"""tiled_mlp against float64, its shards and what it keeps, in every backend that runs here."""

import gc
import re

import pytest
import torch
import torch.nn.functional as F
from cases import DTYPES, check_op, strided_like
from errors import error_about
from torch.multiprocessing.reductions import StorageWeakRef

import liger
from liger._core.runtime.environment import triton_interpreted
from liger.ops.tiled_mlp.op import _forward_op
from liger.ops.tiled_mlp.plan import Problem, block_columns, plan_tiles
from liger.ops.tiled_mlp.shards import ParameterGradient, Projections

HIDDEN, INTERMEDIATE = 24, 40
ACTIVATIONS = {"silu": F.silu, "gelu": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh")}
FEW, MANY = 10, 400
# Tokens and options. Shards are joined in the backward where that takes no more memory: of few tokens.
HOW = {
    "one shard, kept": (FEW, {}),
    "one shard": (FEW, {"num_shards": 1}),
    "shards, joined": (FEW, {"num_shards": 2}),
    "shards": (MANY, {"num_shards": 25}),
    "shards, all kept": (MANY, {"num_shards": 25, "memory_budget": 1 << 30}),
}


def make(device, leading=(2, 5), dtype=torch.float32, packed=False, bias=False, intermediate=INTERMEDIATE):
    """The tensor arguments of tiled_mlp, None where there is none."""

    def randn(*shape, fan=1):
        return (torch.randn(shape, device=device) / fan**0.5).to(dtype)

    inner = 2 * intermediate if packed else intermediate
    weights = [randn(inner, HIDDEN, fan=HIDDEN), None if packed else randn(inner, HIDDEN, fan=HIDDEN)]
    biases = [randn(inner), None if packed else randn(inner), randn(HIDDEN)] if bias else [None] * 3
    return [randn(*leading, HIDDEN), *weights, randn(HIDDEN, intermediate, fan=intermediate), *biases]


def plain(x, gate, up, down, gate_bias, up_bias, down_bias, activation="silu"):
    g = F.linear(x, gate, gate_bias)
    g, u = g.chunk(2, -1) if up is None else (g, F.linear(x, up, up_bias))
    return F.linear(ACTIVATIONS[activation](g) * u, down, down_bias)


def leaves(tensors, *frozen):
    return [
        None if t is None else t.detach().clone().requires_grad_(i not in frozen)
        for i, t in enumerate(tensors)
    ]


def grads_of(function, tensors, upstream, **how):
    wanted = [t for t in tensors if t is not None and t.requires_grad]
    return torch.autograd.grad(function(*tensors), wanted, upstream, **how)


@pytest.mark.covering(2)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("packed", [False, True], ids=["separate", "packed"])
@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
def test_against_float64(device, dtype, how, packed, bias):
    rows, options = HOW[how]
    check_op(lambda *t: liger.tiled_mlp(*t, **options), plain, make(device, (rows,), dtype, packed, bias))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("packed", [False, True], ids=["separate", "packed"])
def test_what_is_tested(dtype, packed):
    """The plans are those that the names in HOW say."""

    def plan(how):
        rows, options = HOW[how]
        return tuple(plan_tiles(Problem(rows, HIDDEN, INTERMEDIATE, dtype.itemsize, packed), **options))[:3]

    assert plan("one shard, kept") == (FEW, FEW, FEW)
    assert plan("one shard") == (FEW, FEW, 0)
    # In float32 there is nothing to win, and one weight's gate and up stay until the end.
    assert plan("shards, joined") == (5, 5 if packed and dtype == torch.float32 else FEW, 0)
    assert plan("shards") == (16, 16, 0)
    assert plan("shards, all kept") == (16, 16, MANY)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("packed", [False, True], ids=["separate", "packed"])
@pytest.mark.parametrize("num_shards", [None, 2])
def test_blocks_of_the_hidden_gradient(device, dtype, packed, num_shards):
    """One shard of a wide MLP has no more than some columns of it at a time."""
    rows, wide = 200, 700
    assert block_columns(Problem(rows, HIDDEN, wide, dtype.itemsize, packed)) == (128 if packed else 100)
    tensors = make(device, (rows,), dtype, packed, True, wide)
    check_op(lambda *t: liger.tiled_mlp(*t, num_shards=num_shards), plain, tensors)


# Of so many tokens, the least budget keeps a part.
LONG = 1000


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("packed", [False, True], ids=["separate", "packed"])
@pytest.mark.parametrize("num_shards", [None, 7])
def test_a_part_kept(device, dtype, packed, num_shards):
    tensors = make(device, (2, LONG // 2), dtype, packed, bias=True)
    how = {"num_shards": num_shards, "memory_budget": 1}
    _, kept, kept_up = torch.ops.liger.tiled_mlp_forward(*tensors, "silu", *how.values(), True)
    assert 0 < kept.shape[0] < LONG / 2 and kept_up.numel() == 0
    # Sums over tokens are summed over shards: a rounding for each.
    check_op(lambda *t: liger.tiled_mlp(*t, **how), plain, tensors, intermediate=8)


def test_the_gradient_of_x_takes_the_place_of_what_was_kept(device):
    """In a backward that uses the graph up, and with the same bits as in one that does not."""
    tensors = leaves(make(device, (LONG,)))
    y, kept, _ = torch.ops.liger.tiled_mlp_forward(*tensors, "silu", None, 1, True)
    wanted = [t for t in tensors if t is not None]
    first = torch.autograd.grad(y.sum(), wanted, retain_graph=True)
    second = torch.autograd.grad(y.sum(), wanted)
    assert first[0].untyped_storage().data_ptr() != kept.untyped_storage().data_ptr()
    assert second[0].untyped_storage().data_ptr() == kept.untyped_storage().data_ptr()
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    frozen = leaves(make(device, (LONG,)), 0)
    grads = grads_of(lambda *t: liger.tiled_mlp(*t, memory_budget=1), frozen, torch.ones_like(y))
    expected = grads_of(plain, frozen, torch.ones_like(y))
    for a, b in zip(grads, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("leading", [(), (1,), (2, 7), (2, 3, 3)], ids=str)
def test_activations_and_shapes(device, dtype, activation, leading):
    shards = 1 if leading in ((), (1,)) else 4
    check_op(
        lambda *t: liger.tiled_mlp(*t, activation=activation, num_shards=shards),
        lambda *t: plain(*t, activation=activation),
        make(device, leading, dtype, bias=True),
    )


@pytest.mark.parametrize("how", HOW)
def test_weight_gradients_are_rounded_once(device, how):
    """As exact as one product of all tokens: a sum in bfloat16 would lose digits with every shard."""
    dtype, (rows, options) = DTYPES[-1], HOW[how]
    if rows == MANY:
        options = options | {"num_shards": rows}
    rows = max(rows, 100)  # enough gradients of biases for a mean error
    tensors = make(device, (rows,), dtype, bias=True)
    upstream = torch.randn(rows, HIDDEN, device=device).to(dtype)
    got = grads_of(lambda *t: liger.tiled_mlp(*t, **options), leaves(tensors), upstream)
    whole = grads_of(plain, leaves(tensors), upstream)
    exact = grads_of(plain, leaves([t.double() for t in tensors]), upstream.double())
    for name, *values in zip(("x", "gate", "up", "down", "gb", "ub", "db"), got, whole, exact, strict=True):
        ours, theirs = (((v.double() - values[2]).norm() / values[2].norm()).item() for v in values[:2])
        assert ours <= 1.1 * theirs + torch.finfo(torch.float32).eps, f"{name}: {ours:.3g}, {theirs:.3g}"


@pytest.mark.parametrize("how", HOW)
def test_frozen_parts(device, how):
    """Each subset of x and the weights: no gradient for the frozen, the same for the others."""
    rows, options = HOW[how]
    tensors = make(device, (rows,), bias=True)
    upstream = torch.randn(rows, HIDDEN, device=device)
    everything = grads_of(lambda *t: liger.tiled_mlp(*t, **options), leaves(tensors), upstream)
    frozen_sets = [(0,), (1, 2, 3, 4, 5, 6), (0, 1, 2, 4, 5, 6), (0, 1, 2, 3, 4, 5), (3,), (1,), (0, 3, 4, 6)]
    for frozen in frozen_sets:
        arguments = leaves(tensors, *frozen)
        liger.tiled_mlp(*arguments, **options).backward(upstream)
        for i, (tensor, expected) in enumerate(zip(arguments, everything, strict=True)):
            assert (tensor.grad is None) == (i in frozen)
            if i not in frozen:
                torch.testing.assert_close(tensor.grad, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("options", [{}, {"memory_budget": 1}], ids=["default", "budget"])
@pytest.mark.parametrize("packed", [False, True], ids=["separate", "packed"])
def test_empty(device, options, packed):
    tensors = leaves(make(device, (2, 0), packed=packed, bias=True))
    y = liger.tiled_mlp(*tensors, **options)
    assert y.shape == (2, 0, HIDDEN)
    y.sum().backward()
    wanted = [t for t in tensors if t is not None]
    assert all(t.grad.shape == t.shape and torch.count_nonzero(t.grad) == 0 for t in wanted)


@pytest.mark.parametrize("how", HOW)
def test_strided_inputs_and_gradients(device, how):
    rows, options = HOW[how]
    tensors = make(device, (2, rows // 2))
    upstream = torch.randn(2, rows // 2, HIDDEN, device=device)
    expected = grads_of(lambda *t: liger.tiled_mlp(*t, **options), leaves(tensors), upstream)
    strided = [None if t is None else strided_like(t).detach().requires_grad_() for t in tensors]
    strided[1] = tensors[1].t().contiguous().t().detach().requires_grad_()
    strided[0] = tensors[0].transpose(0, 1).contiguous().transpose(0, 1).detach().requires_grad_()
    actual = grads_of(lambda *t: liger.tiled_mlp(*t, **options), strided, strided_like(upstream))
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("how", HOW)
def test_second_backward_and_inputs_untouched(device, how):
    rows, options = HOW[how]
    tensors = leaves(make(device, (rows,), bias=True))
    before = [t.detach().clone() for t in tensors]
    y = liger.tiled_mlp(*tensors, **options)
    upstream = torch.randn_like(y)
    first = torch.autograd.grad(y, tensors, upstream, retain_graph=True)
    second = torch.autograd.grad(y, tensors, upstream)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert all(torch.equal(a, b) and a._version == 0 for a, b in zip(tensors, before, strict=True))
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(y, tensors, upstream)


def test_every_parameter_gets_one_gradient(device):
    """What the hooks of DDP, FSDP2 and ZeRO rely on."""
    tensors = leaves(make(device, (12,), bias=True))
    fired = []
    for i, tensor in enumerate(tensors):
        tensor.register_post_accumulate_grad_hook(lambda _, i=i: fired.append(i))
    liger.tiled_mlp(*tensors, num_shards=4).sum().backward()
    assert sorted(fired) == list(range(7))


def test_nothing_of_all_tokens_is_saved_but_x(device):
    saved = []
    tensors = leaves(make(device, (12,)))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        liger.tiled_mlp(*tensors, num_shards=4)
    inputs = {t.data_ptr() for t in tensors if t is not None}
    assert all(t.numel() == 0 or t.data_ptr() in inputs for t in saved)


@pytest.mark.parametrize("how", ["one shard, kept", "shards, all kept"])
def test_a_used_up_graph_writes_only_over_what_it_kept(device, how):
    rows, options = HOW[how]
    tensors = leaves(make(device, (rows,)))
    options = options.get("num_shards"), options.get("memory_budget")
    y, *kept = torch.ops.liger.tiled_mlp_forward(*tensors, "silu", *options, True)
    x, gate, up = tensors[:3]
    expected = [x @ gate.t(), x @ up.t()]
    if how == "one shard, kept":
        torch.testing.assert_close(kept, [t.detach() for t in expected])
    else:
        torch.testing.assert_close(kept[0], torch.cat(expected, -1).detach())
        assert kept[1].numel() == 0
    assert not any(t.requires_grad for t in kept)
    versions = [t._version for t in kept]
    y.sum().backward(retain_graph=True)
    assert [t._version for t in kept] == versions
    y.sum().backward()
    assert all(t._version > version for t, version in zip(kept, versions, strict=True))


@pytest.mark.parametrize("op", [_forward_op, torch.ops.liger.tiled_mlp_forward], ids=["eager", "dispatcher"])
@pytest.mark.parametrize("again", [False, True], ids=["once", "again"])
def test_gate_goes_before_the_gradient_of_up_weight(device, op, again, monkeypatch):
    """What one shard kept of two weights is let go of when it is done with, unless another backward will need
    it."""
    tensors = leaves(make(device))
    y, *kept = op(*tensors, "silu", None, None, True)
    memory = [StorageWeakRef(t.untyped_storage()) for t in kept]
    del kept
    gone, add_product = [], ParameterGradient.add_product

    def watched(*arguments):
        if triton_interpreted():
            gc.collect()  # its frames refer to each other and to what kernels got
        gone.append([m.expired() for m in memory])
        add_product(*arguments)

    monkeypatch.setattr(ParameterGradient, "add_product", watched)
    y.sum().backward(retain_graph=again)
    before_gate_weight, before_up_weight = gone
    assert before_gate_weight == [False, False] and before_up_weight == [not again, False]
    assert [m.expired() for m in memory] == [not again, not again]


def test_autocast_of_float32_weights(device):
    tensors, dtype = leaves(make(device, (10,), bias=True)), DTYPES[-1]
    with torch.autocast(device.type, dtype):
        y = liger.tiled_mlp(*tensors, num_shards=3)
    assert y.dtype == dtype
    y.float().sum().backward()
    assert all(t.grad.dtype == torch.float32 for t in tensors)


# --- bad input ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_shards": 11}, "num_shards is 11, expected at least 1 and at most the number of tokens, 10"),
        ({"up_weight": None, "gate_weight": (41, 24)}, "gate_weight has 41 rows, expected an even number"),
        ({"up_weight": None}, "down_weight has shape (24, 40), expected (24, 20)"),
        ({"gate_bias": (24,)}, "gate_bias has shape (24,), expected (40,), the rows of gate_weight"),
        ({"down_bias": (40,)}, "down_bias has shape (40,), expected (24,), the rows of down_weight"),
        (
            {"up_weight": None, "gate_weight": (80, 24), "up_bias": (40,)},
            "up_bias was given without up_weight",
        ),
    ],
    ids=str,
)
def test_bad_input(device, change, words):
    names = ("x", "gate_weight", "up_weight", "down_weight", "gate_bias", "up_bias", "down_bias")
    arguments = dict(zip(names, make(device), strict=True))
    for name, value in change.items():
        arguments[name] = torch.ones(value, device=device) if isinstance(value, tuple) else value
    with pytest.raises(error_about(words), match=re.escape(f"tiled_mlp: {words}")):
        liger.tiled_mlp(**arguments)


@pytest.mark.parametrize("bad", ["0", "many"])
def test_bad_budget_in_the_environment(device, bad, monkeypatch):
    monkeypatch.setenv("LIGER_MEMORY_BUDGET", bad)
    with pytest.raises(ValueError, match="LIGER_MEMORY_BUDGET: expected a positive number of bytes"):
        liger.tiled_mlp(*make(device))


def test_the_second_gemm_adds_the_gradients_of_gate_and_up(device):
    """To the first one's result: on a CPU with one rounding less than autograd's sum of two results. cuBLAS
    rounds the product before it adds, as autograd does."""
    grads = [torch.randn(1024, 192, device=device, dtype=torch.bfloat16) for _ in range(2)]
    weights = [torch.randn(192, 1024, device=device, dtype=torch.bfloat16) for _ in range(2)]
    out = torch.empty(1024, 1024, device=device, dtype=torch.bfloat16)
    Projections(*weights, None, None, 192).write_grad_x(grads, out)
    exact = sum(grad.double() @ weight.double() for grad, weight in zip(grads, weights, strict=True))
    added = sum(grad @ weight for grad, weight in zip(grads, weights, strict=True))
    error, twice = ((found.double() - exact).norm() / exact.norm() for found in (out, added))
    assert error <= twice if device.type == "cuda" else error < 2.2e-3 < twice
