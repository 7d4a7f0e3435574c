# SPDX-License-Identifier: BSD-3-Clause
"""liger.tiled on modules of several kinds."""

import copy
import functools
import weakref

import pytest
import torch
import torch.nn.functional as F
from cases import DTYPES, assert_as_exact_as_torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import liger

HIDDEN = 12


class Expert(nn.Module):
    """A plain MLP with dropout, a weight per token and a table that all tokens share."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.first, self.second = nn.Linear(HIDDEN, 20), nn.Linear(20, 7)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x, weight=None, table=None):
        h = self.dropout(F.silu(self.first(x)))
        if table is not None:
            h = h * table
        y = self.second(h)
        return y if weight is None else y * weight


def expert(device, dtype=torch.float32, dropout=0.0):
    return Expert(dropout).to(device, dtype)


def grads(output, wanted, upstream):
    return torch.autograd.grad(output, wanted, upstream.to(output.dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("leading", [(), (13,), (2, 6), (2, 3, 2), (0,)], ids=str)
def test_against_float64(device, dtype, leading):
    module = expert(device, dtype)
    exact = copy.deepcopy(module).double()
    x = torch.randn(*leading, HIDDEN, device=device).to(dtype)
    shards = 5 if x.numel() > 5 * HIDDEN else 1
    upstream = torch.randn(*leading, 7, device=device)
    results = []
    for function, used in (
        (lambda x: liger.tiled(module, x, num_shards=shards), module),
        (module, module),
        (exact, exact),
    ):
        start = x.to(next(used.parameters()).dtype).requires_grad_()
        y = function(start)
        results.append([y, *grads(y, [start, *used.parameters()], upstream)])
    for i, values in enumerate(zip(*results, strict=True)):
        assert_as_exact_as_torch(*values, f"result {i}")


def test_arguments_of_tokens_and_shared_ones(device):
    module = expert(device)
    tensors = [torch.randn(s, device=device, requires_grad=True) for s in ((2, 5, HIDDEN), (2, 5, 1), (20,))]
    x, weight, table = tensors
    upstream = torch.randn(2, 5, 7, device=device)
    wanted = [*tensors, *module.parameters()]
    y = liger.tiled(module, x, weight, table=table, num_shards=3)
    expected = module(x, weight, table)
    torch.testing.assert_close(y, expected)
    for a, b in zip(grads(y, wanted, upstream), grads(expected, wanted, upstream), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_the_default_number_of_shards(device):
    calls = []

    def function(x):
        calls.append(tuple(x.shape))
        return x * 2

    liger.tiled(function, torch.ones(2, 1500, HIDDEN, device=device))
    assert calls == [(1, 1000, HIDDEN)] * 3


def test_x_without_gradient_still_trains(device):
    module = expert(device)
    x = torch.randn(9, HIDDEN, device=device)
    y = liger.tiled(module, x, num_shards=3)
    assert y.requires_grad
    y.sum().backward()
    expected = torch.autograd.grad(module(x).sum(), list(module.parameters()))
    for parameter, grad in zip(module.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, grad, rtol=1e-5, atol=1e-5)


def test_frozen_parameters_and_no_gradients_at_all(device):
    module = expert(device)
    module.first.requires_grad_(False)
    x = torch.randn(9, HIDDEN, device=device)
    liger.tiled(module, x, num_shards=3).sum().backward()
    assert module.first.weight.grad is None and module.second.weight.grad is not None
    assert not liger.tiled(module.requires_grad_(False), x, num_shards=3).requires_grad
    with torch.no_grad():
        assert not liger.tiled(module.requires_grad_(True), x, num_shards=3).requires_grad


def test_every_parameter_gets_one_gradient(device):
    module = expert(device)
    fired = []
    for name, parameter in module.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: fired.append(name))
    liger.tiled(module, torch.randn(9, HIDDEN, device=device), num_shards=4).sum().backward()
    assert sorted(fired) == sorted(name for name, _ in module.named_parameters())


def test_gradients_are_summed_in_float32(device):
    dtype = DTYPES[-1]
    module = expert(device, dtype)
    exact = copy.deepcopy(module).double()
    x, upstream = (torch.randn(200, n, device=device).to(dtype) for n in (HIDDEN, 7))
    got = grads(liger.tiled(module, x, num_shards=200), list(module.parameters()), upstream)
    whole = grads(module(x), list(module.parameters()), upstream)
    want = grads(exact(x.double()), list(exact.parameters()), upstream)
    for values in zip(got, whole, want, strict=True):
        ours, theirs = (((v.double() - values[2]).norm() / values[2].norm()).item() for v in values[:2])
        assert ours <= 1.2 * theirs


def test_dropout_has_the_same_mask_in_forward_and_recomputation(device):
    """The gradient of x of a dropout is its mask."""
    x = torch.ones(64, HIDDEN, device=device, requires_grad=True)
    dropout = nn.Dropout(0.5)
    generator = torch.cuda if device.type == "cuda" else torch
    y = liger.tiled(dropout, x, num_shards=7)
    after_forward = generator.get_rng_state()
    torch.rand(5, device=device)
    state = generator.get_rng_state()
    (grad,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(grad, y) and 0 < torch.count_nonzero(y) < y.numel()
    # The backward leaves the generator where it was.
    assert torch.equal(generator.get_rng_state(), state) and not torch.equal(after_forward, state)
    # Every shard has its own mask.
    assert not torch.equal(y[:9], y[10:19])


def test_a_second_backward(device):
    module = expert(device, dropout=0.3)
    x = torch.randn(9, HIDDEN, device=device, requires_grad=True)
    y = liger.tiled(module, x, num_shards=3)
    wanted = [x, *module.parameters()]
    first = torch.autograd.grad(y.sum(), wanted, retain_graph=True)
    assert all(torch.equal(a, b) for a, b in zip(first, torch.autograd.grad(y.sum(), wanted), strict=True))


def test_hooks_on_saved_tensors_see_the_inputs_alone(device):
    """Not the activations of a shard, also where the backward runs under the same hooks: they would be
    offloaded."""
    seen = []
    x = torch.randn(9, HIDDEN, device=device, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (seen.append(t.shape), t)[1], lambda t: t):
        liger.tiled(expert(device), x, num_shards=3).sum().backward()
    assert seen == [x.shape]


def test_arguments_of_tokens_are_freed_by_the_backward(device):
    x = torch.randn(9, HIDDEN, device=device, requires_grad=True)
    other = torch.randn(9, HIDDEN, device=device)
    y = liger.tiled(lambda x, other: x * other, x, other, num_shards=3)
    reference = weakref.ref(other)
    del other
    y.sum().backward()
    assert reference() is None


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_inside_a_checkpoint(device, use_reentrant):
    module = expert(device, dropout=0.3)
    x = torch.randn(9, HIDDEN, device=device, requires_grad=True)
    results = []
    for outer in (False, True):
        torch.manual_seed(1)
        module.zero_grad()
        x.grad = None
        call = functools.partial(liger.tiled, module, num_shards=3)
        y = checkpoint(call, x, use_reentrant=use_reentrant) if outer else call(x)
        y.square().sum().backward()
        results.append([y, x.grad, *(p.grad for p in module.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_autocast_is_that_of_the_forward(device):
    module, dtype = expert(device), DTYPES[-1]
    x = torch.randn(9, HIDDEN, device=device, requires_grad=True)
    with torch.autocast(device.type, dtype):
        y = liger.tiled(module, x, num_shards=3)
        expected = module(x)
    assert y.dtype == dtype
    wanted = [x, *module.parameters()]
    for a, b in zip(grads(y, wanted, y), grads(expected, wanted, y), strict=True):
        assert a.dtype == torch.float32
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)


CALLABLES = {
    "method": lambda module: module.forward,
    "partial": lambda module: functools.partial(module, table=torch.ones(20)),
    "partial of a method": lambda module: functools.partial(module.forward, table=None),
    "partial over the module": lambda module: functools.partial(lambda inner, x: inner(x), module),
}


@pytest.mark.parametrize("kind", CALLABLES)
def test_parameters_are_found(kind):
    module = expert("cpu")
    x = torch.randn(9, HIDDEN)
    liger.tiled(CALLABLES[kind](module), x, num_shards=3).sum().backward()
    assert all(p.grad is not None for p in module.parameters())


def test_a_closure_names_its_parameters_or_raises():
    module = expert("cpu")
    x = torch.randn(9, HIDDEN, requires_grad=True)
    y = liger.tiled(lambda x: module(x), x, num_shards=3)
    with pytest.raises(RuntimeError, match="that requires grad and is neither an argument nor"):
        y.sum().backward()
    liger.tiled(lambda x: module(x), x, num_shards=3, parameters=module.parameters()).sum().backward()
    assert all(p.grad is not None for p in module.parameters())
    # One that is no leaf.
    scale = module.second.bias.sum() * 2
    y = liger.tiled(lambda x: x * scale, x, num_shards=3, parameters=[scale])
    (grad,) = torch.autograd.grad(y.sum(), scale, retain_graph=True)
    torch.testing.assert_close(grad, x.sum().detach())


def test_an_unused_input_has_gradient_zero():
    x = torch.randn(9, HIDDEN, requires_grad=True)
    module = expert("cpu")
    for function, known in ((lambda x: module(x.detach()), module.parameters()), (lambda x: x.detach(), ())):
        y = liger.tiled(function, x, num_shards=3, parameters=known)
        (grad,) = torch.autograd.grad(y.sum(), x)
        assert torch.count_nonzero(grad) == 0


def test_the_result_is_a_tensor_of_its_own():
    x = torch.randn(4, HIDDEN, requires_grad=True)
    y = liger.tiled(nn.Identity(), x, num_shards=1)
    assert y.data_ptr() != x.data_ptr()


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (
            lambda m, x: liger.tiled(m, x, num_shards=0),
            ValueError,
            "tiled: num_shards is 0, expected at least 1",
        ),
        (lambda m, x: liger.tiled(m, x, num_shards=11), ValueError, "at most the number of tokens, 10"),
        (lambda m, x: liger.tiled(m, torch.tensor(1.0)), RuntimeError, "tiled: x has shape ()"),
        (
            lambda m, x: liger.tiled(m, x, torch.ones(4, 1), num_shards=2),
            ValueError,
            "tiled: argument 2 has shape (4, 1), expected the leading shape of x, (2, 5)",
        ),
        (
            lambda m, x: liger.tiled(lambda x: x.sum(-2), x, num_shards=2),
            ValueError,
            "tiled: a shard of shape (1, 5, 12) gave an output of shape (1, 12), expected (1, 5, '*')",
        ),
        (
            lambda m, x: liger.tiled(lambda x: x[:, :3], x, num_shards=2),
            ValueError,
            "does not treat every token alone",
        ),
        (lambda m, x: liger.tiled(lambda x: (x, x), x), TypeError, "tiled: the module returned tuple"),
    ],
    ids=range(7),
)
def test_bad_input(call, error, words):
    with pytest.raises(error) as caught:
        call(expert("cpu"), torch.randn(2, 5, HIDDEN))
    assert words in str(caught.value)


def test_parameters_frozen_between_forward_and_backward():
    module = expert("cpu")
    y = liger.tiled(module, torch.randn(9, HIDDEN), num_shards=3)
    module.first.requires_grad_(False)
    with pytest.raises(RuntimeError, match="2 parameters require grad in the backward, 4 did in the forward"):
        y.sum().backward()
