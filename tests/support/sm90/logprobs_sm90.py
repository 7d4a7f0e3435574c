# SPDX-License-Identifier: BSD-3-Clause
"""What the tests of fused_linear_logprobs on the engine for compute capability 9.0 share."""

import pytest
import torch
from cases import poison_memory
from sm90_engine import BFLOAT16, FLOAT16, ROWS, assert_observed, gradient_tolerance
from torch.nn.functional import linear

import liger

# With a gradient of entropies: three roundings to bfloat16 (exponentials, their product with a logarithm, the
# scaled rows) instead of two. Simulated: 4.8e-3 at most.
WITH_ENTROPY = 6e-3
# For float16 beyond one rounding of the exact gradient; emulated: 4.1e-4 at most
# (tests/engine/test_float16_rule.py).
WITH_ENTROPY_FLOAT16 = 7e-4
KEPT = pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
ENTROPY = pytest.mark.parametrize("entropy", [False, True], ids=["logprobs", "entropy"])


def engine_calls(monkeypatch):
    """A list that fills with the calls of this engine: ("forward" or "backward", whether with kept
    exponentials)."""
    seen = []
    forward, backward = torch.ops.liger_sm90.logprobs_forward, torch.ops.liger_sm90.logprobs_backward

    # torch asks every op for its overloads when it imports the inductor.
    class Forward:
        overloads = list

        def default(*arguments):
            seen.append(("forward", arguments[8]))
            return forward.default(*arguments)

    class Backward:
        overloads = list

        def default(*arguments):
            seen.append(("backward", arguments[2].numel() > 0))
            return backward.default(*arguments)

    monkeypatch.setattr(torch.ops.liger_sm90, "logprobs_forward", Forward)
    monkeypatch.setattr(torch.ops.liger_sm90, "logprobs_backward", Backward)
    return seen


def upstream(shape, device, entropy):
    """Gradients of both signs for log-probabilities, and for entropies if they have one."""
    grads = [torch.randn(shape.rows, device=device)]
    return [*grads, torch.rand(shape.rows, device=device)] if entropy else grads


def run(shape, x, weight, target, grads, trained=(True, True), temperature=1.0, **options):
    """(results, gradients)"""
    poison_memory()
    x, weight = (t.detach().requires_grad_(want) for t, want in zip((x, weight), trained, strict=True))
    found = liger.fused_linear_logprobs(
        x, weight, target, temperature=temperature, memory_budget=shape.budget, metrics=("entropy", "argmax"),
        **options,
    )  # fmt: skip
    poison_memory()
    leaves = [t for t in (x, weight) if t.requires_grad]
    return found, list(torch.autograd.grad(found[: len(grads)], leaves, grads))


def exact(x, weight, target, grads, trained=(True, True), temperature=1.0):
    """(log-probabilities, gradients) in float64"""
    x, weight = (
        t.detach().double().requires_grad_(want) for t, want in zip((x, weight), trained, strict=True)
    )
    live = target != -100
    # Ignored rows may have NaN.
    logp = (linear(x.where(live[:, None], 0.0), weight) / temperature).log_softmax(-1)
    chosen = logp.gather(1, target.clamp_min(0)[:, None])[:, 0].where(live, 0.0)
    results = chosen, -(logp.exp() * logp).sum(-1).where(live, 0.0)
    leaves = [t for t in (x, weight) if t.requires_grad]
    doubles = [g.double() for g in grads]
    return chosen.detach(), torch.autograd.grad(results[: len(grads)], leaves, doubles)


def tolerance_of(expected, dtype, entropy):
    """The largest error of a gradient, relative to its norm; with ``entropy`` of a result that has one of
    entropies."""
    if not entropy:
        return gradient_tolerance(expected, dtype)
    if dtype == BFLOAT16:
        return WITH_ENTROPY
    rounding = (expected.to(FLOAT16).double() - expected).norm() / expected.norm()
    return WITH_ENTROPY_FLOAT16 + rounding.item()


def check(
    shape, x, weight, target, entropy=False, trained=(True, True), temperature=1.0, tolerance=None, **options
):
    grads = upstream(shape, x.device, entropy)
    found, actual = run(shape, x, weight, target, grads, trained, temperature, **options)
    logprobs, expected = exact(x, weight, target, grads, trained, temperature)
    ignored = target == -100
    assert (found.logprobs - logprobs).abs().max() <= ROWS * logprobs.abs().max()
    assert not found.logprobs[ignored].any()
    clean = x.where(~ignored[:, None], 0.0)
    assert_observed(clean, weight, target, found.entropy, found.argmax, temperature)
    tolerances = [tolerance or tolerance_of(e, x.dtype, entropy) for e in expected]
    assert_gradients(actual, expected, ignored, trained, tolerances, x.dtype)


def assert_gradients(actual, expected, ignored, trained, tolerance, dtype=BFLOAT16):
    """``tolerance``: a number, or one for each gradient."""
    tolerances = tolerance if isinstance(tolerance, list) else [tolerance] * len(expected)
    names = [name for name, want in zip(("hidden", "weight"), trained, strict=True) if want]
    for name, a, b, tolerance in zip(names, actual, expected, tolerances, strict=True):
        assert a.dtype == dtype and a.isfinite().all(), name
        error = ((a.double() - b).norm() / b.norm()).item()
        assert error <= tolerance, f"gradient of {name}: error {error:.3g}, allowed {tolerance:.3g}"
        if name == "hidden":
            assert not a[ignored].any()
            # No row has the gradient of another, however small it is. In float16 small rows have an absolute
            # error: elements below 2^-14, and small differences of rounded exponentials.
            live, size = b.count_nonzero(-1) > 0, b.norm(dim=-1)
            least = 1e-30 if dtype == BFLOAT16 else 3e-2 * size[live].median().item()
            rows = (a.double() - b).norm(dim=-1) / size.clamp_min(least)
            assert rows[live].max() < 5e-2
