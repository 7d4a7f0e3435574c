# SPDX-License-Identifier: BSD-3-Clause
"""A case of a public callable, the registry of all cases, and the tensors that several families share."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

ROWS, LENGTH, HIDDEN, VOCAB = 4, 5, 16, 29
IGNORED = -100
X = (2, 3, HIDDEN)


@dataclass(frozen=True)
class Case:
    """One way to call a public callable.

    Attributes:
        public: the dotted public name, without ``liger.``.
        call: takes the arguments by name; returns a tensor or a tuple of tensors.
        make: (device, dtype) -> arguments by name: tensors, and options that are not tensors.
        differentiable: names of the tensors that get a gradient.
        ignored: arguments by name -> {name: boolean mask}: elements that have no influence on anything.
        loss: whether the result is a loss of rows, computed in at least float32.
    """

    public: str
    call: Callable
    make: Callable
    differentiable: tuple = ()
    ignored: Callable | None = None
    loss: bool = False


CASES: dict[str, Case] = {}


def add(name, call, make, differentiable, *, public=None, **more):
    CASES[name] = Case(public or name, call, make, tuple(differentiable.split()), **more)


def cases(**conditions):
    """Names of the cases whose attributes are true (or false) as asked:
    ``cases(loss=True, ignored=True)``."""
    return [
        name
        for name, case in CASES.items()
        if all(bool(getattr(case, attribute)) == wanted for attribute, wanted in conditions.items())
    ]


def arguments(name, device="cpu", dtype=torch.float32, requires_grad=True):
    """The arguments of a case; its differentiable tensors are leaves that require grad."""
    case = CASES[name]
    made = case.make(torch.device(device), dtype)
    if requires_grad:
        for key in case.differentiable:
            made[key].requires_grad_()
    return made


def results(name, given):
    """The results that there are of a case, as a tuple."""
    found = CASES[name].call(**given)
    return tuple(r for r in (found if isinstance(found, tuple) else (found,)) if r is not None)


def outputs(name, given):
    """The results of a case that float, as a tuple."""
    return tuple(r for r in results(name, given) if r.is_floating_point())


def differentiable_outputs(name, given):
    return tuple(r for r in outputs(name, given) if r.requires_grad)


def weighted_sum(results):
    """A scalar whose gradient differs from element to element."""
    return sum(
        (r.to(torch.promote_types(r.dtype, torch.float32)) * torch.linspace(
            1, 2, r.numel(), device=r.device, dtype=torch.promote_types(r.dtype, torch.float32)
        ).view(r.shape)).sum()
        for r in results
    )  # fmt: skip


# --- tensors ------------------------------------------------------------------------------------------------


def normal(device, dtype, *shape, scale=1.0):
    return (scale * torch.randn(shape, dtype=torch.float64)).to(device, dtype)


def random_target(device, *shape):
    """Class indices, of which the first and the last are ignored."""
    target = torch.randint(VOCAB, shape)
    target.view(-1)[0] = target.view(-1)[-1] = IGNORED
    return target.to(device)


def tensors(**shapes):
    """``make`` of tensors of given shapes, normally distributed."""

    def make(device, dtype):
        return {name: normal(device, dtype, *shape) for name, shape in shapes.items()}

    return make


def with_options(make, **options):
    return lambda device, dtype: make(device, dtype) | options
