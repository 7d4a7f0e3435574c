# SPDX-License-Identifier: BSD-3-Clause
"""One comparison with plain torch for each callable of liger_kernel: what it computes, and the formula."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

IGNORED = -100
CASES: dict[tuple[str, str], "Case"] = {}


@dataclass
class Case:
    """``ours(*tensors)`` and ``formula(*tensors)`` return equal tensors, tuples or lists of them, or None;
    their sums have equal gradients in the tensors that require grad."""

    ours: Callable
    formula: Callable
    tensors: tuple


def compare(source, names, ours, formula, *tensors):
    """Adds a case for some names of a module of liger.compat. ``ours`` takes the attribute before the
    tensors."""
    for name in names.split():
        assert (source, name) not in CASES, name
        CASES[source, name] = Case(ours, formula, tensors)


def random(*shape, seed=0, grad=True):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator).requires_grad_(grad)


def classes(*shape, seed=0, vocab=11, ignored=2):
    """Random classes, some ignored, the first never."""
    generator = torch.Generator().manual_seed(seed)
    target = torch.randint(0, vocab, shape, generator=generator)
    flat = target.view(-1)
    flat[torch.randperm(flat.numel() - 1, generator=generator)[:ignored] + 1] = IGNORED
    return target


class Config:
    """A model configuration with the fields that MLPs read."""

    def __init__(self, **fields):
        self.hidden_size, self.intermediate_size, self.hidden_act = 8, 12, "silu"
        self.__dict__.update(fields)


def differentiable(results):
    """The tensors among results that have a gradient."""
    if isinstance(results, torch.Tensor):
        results = [results]
    elif not isinstance(results, (list, tuple)):
        results = vars(results).values()
    return [t for t in results if isinstance(t, torch.Tensor)]


def gradients(results, tensors):
    wanted = [t for t in tensors if isinstance(t, torch.Tensor) and t.requires_grad]
    total = sum(
        (t.float() * torch.arange(1, t.numel() + 1).view(t.shape)).sum() for t in results if t.requires_grad
    )
    if not isinstance(total, torch.Tensor):
        return []
    return torch.autograd.grad(total, wanted, allow_unused=True)
