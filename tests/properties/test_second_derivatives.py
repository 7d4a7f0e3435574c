# SPDX-License-Identifier: BSD-3-Clause
"""Second derivatives of every public callable, in every way of asking: refused by name, or right.

Never silently something else: a gradient that counted as a constant would drop a term of a gradient penalty.
"""

import pytest
import torch
import torch.autograd.functional as functional
from public_callables import CASES, arguments, differentiable_outputs, outputs, weighted_sum

REFUSED = r"the backward of (\w+) is not differentiable, so \1 has no second derivative"


class Problem:
    """A scalar of the first differentiable argument of a case, curved even where the callable is linear."""

    def __init__(self, name, device, dtype):
        self.name, self.given = name, arguments(name, device, dtype)
        self.key = CASES[name].differentiable[0]
        self.x = self.given[self.key]
        self.direction = torch.randn_like(self.x)

    def value(self, x):
        return weighted_sum([r.square() for r in outputs(self.name, {**self.given, self.key: x})])

    def gradient(self, x):
        (grad,) = torch.autograd.grad(self.value(x), x, create_graph=True)
        return grad

    def expected(self):
        """The second derivative along the direction, from differences of first derivatives."""
        step = torch.finfo(self.x.dtype).eps ** (1 / 3)
        ends = [(self.x + sign * step * self.direction).detach().requires_grad_() for sign in (1, -1)]
        first, second = (torch.autograd.grad(self.value(end), end)[0] for end in ends)
        return (first - second) / (2 * step)


def _penalty(problem):
    """A scalar that depends on x twice: by the value, and by the directional derivative."""
    return problem.value(problem.x), (problem.gradient(problem.x) * problem.direction).sum()


def backward(problem):
    _, slope = _penalty(problem)
    slope.backward()
    return problem.x.grad


def backward_with_another_path(problem):
    value, slope = _penalty(problem)
    (value + slope).backward()
    return problem.x.grad - torch.autograd.grad(problem.value(problem.x), problem.x)[0]


def backward_of_inputs(problem):
    value, slope = _penalty(problem)
    (value + slope).backward(inputs=[problem.x])
    return problem.x.grad - torch.autograd.grad(problem.value(problem.x), problem.x)[0]


def grad_of_x(problem):
    value, slope = _penalty(problem)
    both = torch.autograd.grad(value + slope, problem.x)[0]
    return both - torch.autograd.grad(problem.value(problem.x), problem.x)[0]


def grad_through_an_earlier_op(problem):
    scale = torch.ones((), dtype=problem.x.dtype, device=problem.x.device, requires_grad=True)
    x = problem.x.detach() * scale + problem.direction * 0
    slope = (problem.gradient(x) * problem.direction).sum()
    (grad,) = torch.autograd.grad(slope + scale, scale)
    expected = (problem.expected() * problem.x.detach()).sum()
    # The gradient of x that was asked for has the shape of a scalar here: shown to be right, not returned.
    near = {"rtol": 1e-4, "atol": 1e-4} if grad.dtype == torch.float32 else {}
    torch.testing.assert_close(grad - 1, expected, **near)
    return problem.expected()


def hessian_vector_product(problem):
    return functional.hvp(problem.value, problem.x, problem.direction)[1]


def vector_hessian_product(problem):
    return functional.vhp(problem.value, problem.x, problem.direction)[1]


def hessian(problem):
    matrix = functional.hessian(problem.value, problem.x)
    return (matrix * problem.direction).sum(tuple(range(problem.x.dim(), matrix.dim())))


def grad_of_grad_of_func(problem):
    def slope(x):
        return (torch.func.grad(problem.value)(x) * problem.direction).sum()

    return torch.func.grad(slope)(problem.x.detach())


def autograd_of_grad_of_func(problem):
    grad = torch.func.grad(problem.value)(problem.x)
    return torch.autograd.grad((grad * problem.direction).sum(), problem.x)[0]


def jacobian_of_grad_of_func(problem):
    matrix = torch.func.jacrev(torch.func.grad(problem.value))(problem.x.detach())
    return (matrix * problem.direction).sum(tuple(range(problem.x.dim(), matrix.dim())))


WAYS = [
    backward,
    backward_with_another_path,
    backward_of_inputs,
    grad_of_x,
    grad_through_an_earlier_op,
    hessian_vector_product,
    vector_hessian_product,
    hessian,
    grad_of_grad_of_func,
    autograd_of_grad_of_func,
    jacobian_of_grad_of_func,
]


@pytest.fixture
def dtype(backend):
    return torch.float64 if backend == "torch" else torch.float32


def refused_or_right(way, problem):
    try:
        second = way(problem)
    except RuntimeError as error:
        with pytest.raises(RuntimeError, match=REFUSED):
            raise error
        return
    # Differences are exact enough in float64 alone, which only the torch backend has.
    if problem.x.dtype == torch.float64:
        torch.testing.assert_close(second, problem.expected(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", CASES)
def test_second_derivative(name, device, dtype):
    for way in WAYS:
        print(way.__name__)
        refused_or_right(way, Problem(name, device, dtype))


@pytest.mark.parametrize("name", CASES)
def test_derivative_by_every_argument(name, device, dtype):
    """The path to each argument leads through the refusal, whatever the formula has saved."""
    given = arguments(name, device, dtype)
    keys = CASES[name].differentiable
    wanted = [given[key] for key in keys]
    total = weighted_sum([r.square() for r in differentiable_outputs(name, given)])
    grads = torch.autograd.grad(total, wanted, create_graph=True)
    penalty = sum(grad.square().sum() for grad in grads)
    for key, x in zip(keys, wanted, strict=True):
        try:
            (second,) = torch.autograd.grad(total + penalty, x, retain_graph=True)
        except RuntimeError as error:
            with pytest.raises(RuntimeError, match=REFUSED):
                raise error
            continue
        # What is not refused is not zero either.
        assert not torch.equal(second, grads[keys.index(key)]), key


@pytest.mark.parametrize("name", CASES)
def test_derivative_by_the_upstream_gradient(name, device, dtype):
    """Gradients are linear in it, so the derivative of a refusal-free one is known."""
    given = arguments(name, device, dtype)
    wanted = [given[key] for key in CASES[name].differentiable]
    results = differentiable_outputs(name, given)
    upstream = [torch.randn_like(r).requires_grad_() for r in results]
    grads = torch.autograd.grad(results, wanted, upstream, create_graph=True)
    total = sum(grad.sum() for grad in grads)
    try:
        derivatives = torch.autograd.grad(total, upstream)
    except RuntimeError as error:
        with pytest.raises(RuntimeError, match=REFUSED):
            raise error
        return
    linear = sum((d * u).sum() for d, u in zip(derivatives, upstream, strict=True))
    torch.testing.assert_close(linear, total)
