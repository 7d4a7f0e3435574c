# SPDX-License-Identifier: BSD-3-Clause
"""A model and its patched copy: one step of both, and whether the results agree."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from liger.transformers.patching import patch

from .inputs import ERRORS

# Loss: relative. Gradients: relative to the largest element of each parameter's gradient.
LOSS_TOLERANCE, GRADIENT_TOLERANCE = 1e-5, 1e-4
# Copies of a model whose weights differ by one rounding.
PERTURBATIONS = 4


class Differs(Exception):
    """The patched model gives other numbers."""


class NotRun(Exception):
    """The model as it is in transformers does not take part in this check."""


def copied(model: nn.Module) -> nn.Module:
    """A deep copy. Raises :class:`NotRun` if the model has a state that cannot be copied."""
    try:
        return copy.deepcopy(model)
    except RuntimeError as error:
        # Tensors with a history, which a recurrent model saves between calls.
        raise NotRun("the model has a state that cannot be copied") from error


def patched_copy(model: nn.Module) -> nn.Module:
    """A patched copy; where nothing can be patched, as for a model without a known part, a plain one."""
    patched = copied(model)
    patch.unpatch(patched)
    patch.apply(patched, patch.Options())
    return patched


def step(
    model: nn.Module, batch: dict[str, Any], seed: int = 0
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """(loss, gradients by parameter name) of one forward and backward with these random numbers."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(seed)
    output = model(**batch)
    loss = output["loss"] if isinstance(output, dict) else output[0]
    if not isinstance(loss, torch.Tensor) or not loss.requires_grad:
        raise NotRun("it returns no loss for these inputs")
    loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return loss.detach(), grads


def compare(actual: Any, expected: Any, factor: float = 1.0) -> None:
    """Raises :class:`Differs` if two results of :func:`step` differ by more than ``factor`` times the
    tolerances."""
    (loss, grads), (expected_loss, expected_grads) = actual, expected
    if not torch.allclose(loss.double(), expected_loss.double(), LOSS_TOLERANCE * factor, 0, equal_nan=True):
        raise Differs(f"the loss is {loss.item():.8g}, not {expected_loss.item():.8g}")
    if grads.keys() != expected_grads.keys():
        names = ", ".join(sorted(grads.keys() ^ expected_grads.keys())[:3])
        raise Differs(f"other parameters have gradients: {names}")
    largest = max((g.abs().max().item() for g in expected_grads.values() if g.numel()), default=0.0)
    for name, grad in grads.items():
        wanted = expected_grads[name]
        if not grad.numel():
            continue
        if not torch.equal(grad.isfinite(), wanted.isfinite()):
            raise Differs(f"the gradient of {name} is finite in other places")
        # Gradients that are zero but for rounding have no scale of their own.
        scale = max(wanted.nan_to_num().abs().max().item(), 1e-4 * largest)
        error = (grad - wanted).nan_to_num().abs().max().item() / max(scale, 1e-30)
        if error > GRADIENT_TOLERANCE * factor:
            raise Differs(f"the gradient of {name} differs by {error:.1g} of its largest element")


def both(
    plain: nn.Module, patched: nn.Module, batch: dict[str, Any], factor: float = 1.0, seed: int = 0
) -> None:
    """One step of both models. What the unpatched model refuses, the check does not run."""
    try:
        expected = step(plain, batch, seed)
    except ERRORS as error:
        raise NotRun(f"the model raises {type(error).__name__}") from error
    actual = step(patched, batch, seed)
    try:
        compare(actual, expected, factor)
    except Differs:
        if _as_near_to_float64(plain, batch, seed, actual, expected, factor):
            return
        try:
            compare(step(plain, batch, seed), expected, factor)
        except Differs as difference:
            raise NotRun("two steps of the model itself differ") from difference
        raise


def _as_near_to_float64(plain, batch, seed, actual, expected, factor):
    """True if a result is at most three times as far from float64 as the unpatched model's results, and the
    loss within ``factor`` times its tolerance.

    Some models amplify every rounding, so that two correct results differ. How much shows in the unpatched
    model with weights that differ by one rounding: its own single result may be near to float64 by luck.
    """
    wide = copied(plain).double()
    if hasattr(wide, "set_experts_implementation"):
        # torch's grouped GEMM takes no float64.
        wide.set_experts_implementation("eager")
    try:
        _, exact = step(wide, {k: v.double() if _is_float(v) else v for k, v in batch.items()}, seed)
    except ERRORS:
        return False
    if actual[1].keys() != exact.keys():
        return False
    if not torch.allclose(actual[0], expected[0], LOSS_TOLERANCE * factor, 0):
        return False
    rounded = [step(_rounded(plain, n), batch, seed)[1] for n in range(PERTURBATIONS)]
    distances = [
        {n: (g - exact[n]).norm().item() for n, g in grads.items()}
        for grads in (actual[1], expected[1], *rounded)
    ]
    allowed = {n: 3 * max(d[n] for d in distances[1:]) + 1e-5 * g.norm().item() for n, g in exact.items()}
    return all(distance <= allowed[n] for n, distance in distances[0].items())


def _rounded(model, seed):
    """A copy whose weights are up to one unit in the last place away."""
    changed = copied(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in changed.parameters():
            p.mul_(1 + torch.finfo(p.dtype).eps * torch.randint(-1, 2, p.shape, generator=generator))
    return changed


def _is_float(value):
    return isinstance(value, torch.Tensor) and value.is_floating_point()
