"""Tensors of several devices raise, naming op and argument; meta tensors alone give the shapes of the results."""

import re

import pytest
import torch
from public_callables import CASES, arguments

GPU = torch.cuda.is_available()


def tensor_names(given):
    return [name for name, value in given.items() if isinstance(value, torch.Tensor)]


def one_elsewhere():
    """(case, argument): every tensor of every case whose place another tensor shares."""
    pairs = []
    for name in CASES:
        names = tensor_names(arguments(name))
        pairs += [(name, argument) for argument in names if len(names) > 1]
    return pairs


def refusal(name, given):
    with pytest.raises(RuntimeError) as raised:
        CASES[name].call(**given)
    return str(raised.value)


@pytest.mark.parametrize(("name", "moved"), one_elsewhere())
def test_one_meta_tensor_raises(name, moved, device):
    given = arguments(name, device)
    given[moved] = given[moved].to("meta")
    message = refusal(name, given)
    assert re.search(
        r"^\w+: \w+ is on (meta|cpu|cuda:\d), expected the device of \w+, (meta|cpu|cuda:\d)", message
    ), message


def described(results):
    results = results if isinstance(results, tuple) else (results,)
    return [(r.shape, r.dtype, r.stride()) for r in results if r is not None]


@pytest.mark.parametrize("name", CASES)
def test_meta_tensors_give_the_shapes(name):
    given = arguments(name)
    moved = {k: v.detach().to("meta") if isinstance(v, torch.Tensor) else v for k, v in given.items()}
    for key in CASES[name].differentiable:
        moved[key].requires_grad_()
    results = CASES[name].call(**moved)
    assert all(r.is_meta for r in (results if isinstance(results, tuple) else (results,)))
    assert described(results) == described(CASES[name].call(**given))
