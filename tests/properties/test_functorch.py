# SPDX-License-Identifier: BSD-3-Clause
"""Every public callable under the transforms of torch.func."""

import pytest
import torch
from public_callables import CASES, arguments, outputs, weighted_sum

import liger

BATCH = 3


def _other_values(t):
    """Random, with the scale of t. One element has no standard deviation."""
    return torch.randn_like(t) * (t.std() if t.numel() > 1 else t.abs())


def _problem(name, device):
    """(results of the differentiable arguments, total of these, the arguments)"""
    given = arguments(name, device, requires_grad=False)
    keys = CASES[name].differentiable

    def results(*tensors):
        return outputs(name, given | dict(zip(keys, tensors, strict=True)))

    return results, lambda *tensors: weighted_sum(results(*tensors)), [given[key] for key in keys]


def _gradients(function, tensors):
    leaves = [t.detach().requires_grad_() for t in tensors]
    return torch.autograd.grad(function(*leaves), leaves)


def _assert_close(actual, expected):
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", CASES)
def test_grad(name, device):
    _, total, tensors = _problem(name, device)
    every = tuple(range(len(tensors)))
    grads, value = torch.func.grad_and_value(total, argnums=every)(*tensors)
    _assert_close([*grads, value], [*_gradients(total, tensors), total(*tensors)])


@pytest.mark.parametrize("name", CASES)
def test_pullback_after_its_transform(name, device):
    results, _, tensors = _problem(name, device)
    primals, pullback = torch.func.vjp(results, *tensors)
    upstream = [torch.randn_like(p) for p in primals]
    leaves = [t.detach().requires_grad_() for t in tensors]
    found = [(r, u) for r, u in zip(results(*leaves), upstream, strict=True) if r.requires_grad]
    expected = torch.autograd.grad([r for r, _ in found], leaves, [u for _, u in found])
    _assert_close(pullback(tuple(upstream)), expected)


@pytest.mark.parametrize("name", CASES)
def test_jacobian(name, device):
    results, _, (x, *others) = _problem(name, device)

    def first(x):
        return results(x, *others)[0].reshape(-1)[:4]

    _assert_close([torch.func.jacrev(first)(x)], [torch.autograd.functional.jacobian(first, x)])


@pytest.mark.parametrize("name", CASES)
def test_vmap(name, device):
    """Of the results, and through them of their gradients."""
    results, total, tensors = _problem(name, device)
    samples = [tensors, *([_other_values(t) for t in tensors] for _ in range(BATCH - 1))]
    stacked = [torch.stack(ts) for ts in zip(*samples, strict=True)]
    expected = [results(*sample) for sample in samples]
    _assert_close(torch.vmap(results)(*stacked), [torch.stack(rs) for rs in zip(*expected, strict=True)])
    each = [_gradients(total, sample) for sample in samples]
    expected = [torch.stack(gs) for gs in zip(*each, strict=True)]
    _assert_close(_gradients(lambda *ts: torch.vmap(total)(*ts).sum(), stacked), expected)


@pytest.mark.parametrize("name", CASES)
def test_gradients_per_sample(name, device):
    _, total, tensors = _problem(name, device)
    samples = [tensors, *([_other_values(t) for t in tensors] for _ in range(BATCH - 1))]
    stacked = [torch.stack(ts) for ts in zip(*samples, strict=True)]
    every = tuple(range(len(tensors)))
    per_sample = torch.vmap(torch.func.grad(total, argnums=every))(*stacked)
    mapped_inside = torch.func.grad(lambda *ts: torch.vmap(total)(*ts).sum(), argnums=every)(*stacked)
    each = [_gradients(total, sample) for sample in samples]
    expected = [torch.stack(gs) for gs in zip(*each, strict=True)]
    _assert_close(per_sample, expected)
    _assert_close(mapped_inside, expected)


@pytest.mark.parametrize("name", CASES)
def test_forward_mode(name, device):
    """Refused, or right: without a rule a tangent would be taken for zero."""
    _, total, tensors = _problem(name, device)
    tangents = [torch.randn_like(t) for t in tensors]
    slope = sum((g * t).sum() for g, t in zip(_gradients(total, tensors), tangents, strict=True))
    first = torch.func.grad(total)

    def dual_numbers():
        with torch.autograd.forward_ad.dual_level():
            duals = [
                torch.autograd.forward_ad.make_dual(t, d) for t, d in zip(tensors, tangents, strict=True)
            ]
            return torch.autograd.forward_ad.unpack_dual(total(*duals)).tangent

    _refused_or_close(dual_numbers, slope)
    _refused_or_close(lambda: torch.func.jvp(total, tuple(tensors), tuple(tangents))[1], slope)
    _refused_or_close(lambda: torch.func.jacfwd(total)(*tensors), _gradients(total, tensors)[0])
    # Differentiated forward, a gradient is: refused as any second derivative, or right.
    _refused_or_close(
        lambda: torch.func.jacfwd(first)(*tensors),
        _second_by_jacrev(first, tensors),
        or_second_derivative=True,
    )


def _second_by_jacrev(first, tensors):
    try:
        return torch.func.jacrev(first)(*tensors)
    except RuntimeError as error:
        assert "has no second derivative" in str(error)
        return None


def _refused_or_close(function, expected, or_second_derivative=False):
    try:
        actual = function()
    except NotImplementedError as error:
        with pytest.raises(NotImplementedError, match=r"\w+: forward-mode differentiation .* reverse mode"):
            raise error
        return
    except RuntimeError as error:
        assert or_second_derivative and "has no second derivative" in str(error)
        return
    _assert_close([actual], [expected])


@pytest.mark.parametrize("name", CASES)
def test_without_tangents_nothing_is_refused(name, device):
    results, _, tensors = _problem(name, device)
    with torch.autograd.forward_ad.dual_level():
        inside = results(*tensors)
    _assert_close(inside, results(*tensors))


def test_patched_model_by_functional_call(device):
    """Parameters as arguments: meta-learning, ensembles, influence functions."""
    pytest.importorskip("transformers")
    from tiny_models import batch, make

    model = make("llama", device)
    inputs = batch(device)
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def loss(parameters):
        return torch.func.functional_call(model, parameters, (), inputs).loss

    expected = torch.func.grad(loss)(parameters)
    liger.patch(model)
    actual = torch.func.grad(loss)(parameters)
    for name, grad in expected.items():
        torch.testing.assert_close(actual[name], grad, rtol=1e-4, atol=1e-5)


def test_compiled_transform(device):
    def loss(x, weight):
        return liger.rms_norm(x, weight).square().sum()

    torch._dynamo.reset()
    x, weight = torch.randn(4, 8, device=device), torch.randn(8, device=device)
    compiled = torch.compile(torch.func.grad(loss, argnums=(0, 1)), backend="aot_eager", fullgraph=True)
    _assert_close(compiled(x, weight), torch.func.grad(loss, argnums=(0, 1))(x, weight))


@pytest.mark.parametrize("op", [liger.softmax, liger.swiglu_packed, liger.geglu_packed])
def test_vmap_over_elements(op, device):
    """The op would take the mapped dimension as its own."""
    with pytest.raises(RuntimeError, match=r"x has shape \(\)|gate_up has shape \(\)"):
        torch.vmap(op)(torch.randn(4, device=device))
