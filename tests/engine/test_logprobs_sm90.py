# SPDX-License-Identifier: BSD-3-Clause
"""fused_linear_logprobs on the engine of compute capability 9.0, with kept exponentials and without: against
float64."""

import math

import pytest
import torch
from logprobs_sm90 import ENTROPY, KEPT, WITH_ENTROPY, check, exact, run, upstream
from sm90_engine import BESIDE, BFLOAT16, DTYPES, FLOAT16, GRADIENT, KINDS, ROWS, SHAPES, SUMS

pytestmark = pytest.mark.gpu

TRAINED = pytest.mark.parametrize("trained", [(True, True), (True, False), (False, True)], ids=str)


@KEPT
@ENTROPY
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("name", SHAPES)
@DTYPES
def test_every_kind_of_plan(sm90, dtype, calls, name, temperature, entropy, recompute):
    """One chunk and several, partial tiles, split-K; the budget of the shape cuts gradients of entropies."""
    shape = SHAPES[name]
    check(shape, *shape.layer(sm90, dtype=dtype), entropy, temperature=temperature, recompute=recompute)
    # At temperature 1, log-probabilities that are computed again take the path of fused_linear_ce.
    plain = temperature == 1.0 and recompute
    own = [("forward", False)] if not plain else []
    own += [("backward", False)] if not plain or entropy else []
    assert calls == ([("forward", True), ("backward", True)] if not recompute else own)


@KEPT
@TRAINED
@ENTROPY
@KINDS
@DTYPES
def test_only_what_is_trained(sm90, dtype, shape, entropy, trained, recompute):
    check(shape, *shape.layer(sm90, dtype=dtype), entropy, trained, 0.7, recompute=recompute)


@KEPT
@ENTROPY
@KINDS
@DTYPES
def test_frequent_classes(sm90, dtype, shape, entropy, recompute):
    """The one-hot terms of all rows but the first of a class are in their exponentials, and may be the
    largest."""
    x, weight, target = shape.layer(sm90, dtype=dtype)
    # Three roundings to bfloat16 of about 1.66e-3: of these terms, of the scaled rows, and of the result.
    options = {"tolerance": 3.3e-3} if dtype == BFLOAT16 and not entropy else {}
    if dtype == FLOAT16:
        options["temperature"] = 0.7
    for classes in (3, 1) if dtype == FLOAT16 else (3,):
        few = target.where(target < 0, target % classes)
        check(shape, x, weight, few, entropy, recompute=recompute, **options)


@KEPT
@ENTROPY
@KINDS
@DTYPES
def test_ignored_rows_may_hold_anything(sm90, dtype, shape, entropy, recompute):
    x, weight, target = shape.layer(sm90, dtype=dtype, ignored=0.6)
    x[target == -100] = math.nan
    check(shape, x, weight, target, entropy, temperature=0.7, recompute=recompute)


@KEPT
@pytest.mark.parametrize("valid", [0, 1, 63, 64, 65, 129])
@DTYPES
def test_few_valid_rows(sm90, dtype, valid, recompute):
    x, weight, target = BESIDE.layer(sm90, dtype=dtype, ignored=0.0)
    target[torch.randperm(BESIDE.rows, device=sm90)[valid:]] = -100
    if valid:
        check(BESIDE, x, weight, target, True, temperature=0.7, recompute=recompute)
        return
    grads = upstream(BESIDE, sm90, True)
    found, actual = run(BESIDE, x, weight, target, grads, temperature=0.7, recompute=recompute)
    assert not any(t.any() for t in (found.logprobs, found.entropy, *actual)) and (found.argmax == -1).all()


@KEPT
@ENTROPY
@KINDS
def test_targets_far_below_the_largest_logit(sm90, shape, entropy, recompute):
    """Sums of exponentials from the target's overflow, and tiles are recomputed from row maxima."""
    x, weight, target = shape.layer(sm90, scale=30.0)
    grads = upstream(shape, sm90, entropy)
    found, actual = run(shape, x, weight, target, grads, temperature=0.7, recompute=recompute)
    logprobs, expected = exact(x, weight, target, grads, temperature=0.7)
    assert logprobs.min() < -41
    assert (found.logprobs - logprobs).abs().max() <= ROWS * logprobs.abs().max()
    tolerance = 2 * WITH_ENTROPY if entropy else GRADIENT
    for a, b in zip(actual, expected, strict=True):
        assert a.isfinite().all() and (a.double() - b).norm() <= tolerance * b.norm()


@KEPT
@pytest.mark.parametrize("bad", [-1, "classes"])
@DTYPES
def test_targets_out_of_range(sm90, dtype, bad, recompute):
    """Their rows are NaN, and the gradient of the weight."""
    x, weight, target = BESIDE.layer(sm90, dtype=dtype)
    live = torch.nonzero(target != -100)[:, 0]
    target[live[5]] = BESIDE.vocab if bad == "classes" else bad
    grads = upstream(BESIDE, sm90, True)
    found, (grad_x, grad_weight) = run(BESIDE, x, weight, target, grads, temperature=0.7, recompute=recompute)
    assert grad_x[live[5]].isnan().all() and found.logprobs[live[5]].isnan()
    assert grad_x[live[6:]].isfinite().all() and grad_weight.isnan().any()


STRIDED = {
    "rows apart": lambda x: torch.cat([x, x], -1)[:, : x.shape[-1]],
    "rows not on 16 bytes": lambda x: torch.nn.functional.pad(x, (0, 3))[:, : x.shape[-1]],
    "columns apart": lambda x: torch.stack([x, x], -1)[..., 0],
}


@KEPT
@pytest.mark.parametrize("strides", STRIDED)
def test_strides_and_int32_targets(sm90, strides, recompute):
    x, weight, target = SUMS.layer(sm90)
    grads = upstream(SUMS, sm90, True)
    arguments = {"temperature": 0.7, "recompute": recompute}
    found, expected = run(SUMS, x, weight, target, grads, **arguments)
    others, actual = run(SUMS, STRIDED[strides](x), weight, target.int(), grads, **arguments)
    assert torch.equal(found.logprobs, others.logprobs)
    for a, b in zip(expected, actual, strict=True):
        assert torch.equal(a, b)
