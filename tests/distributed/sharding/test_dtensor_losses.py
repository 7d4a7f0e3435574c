# SPDX-License-Identifier: BSD-3-Clause
"""The sharding rules of the losses: on DTensors they give what they give for the whole tensors."""

import pytest
import torch
from sharded import B, H, R, T, V, compare, distribute, random, targets
from torch.distributed.tensor import DTensor, Partial, Shard

import liger

REDUCTIONS = [("mean", None), ("mean", 5.0), ("sum", None), ("sum", 5.0), ("none", None)]
OPTIONS = {"label_smoothing": 0.1, "lse_square_scale": 1e-2, "softcap": 20.0}


@pytest.mark.parametrize("reduction, denominator", REDUCTIONS)
@pytest.mark.parametrize(
    "shape, dim", [((13,), 0), ((B, T), 0), ((B, T), 1)], ids=["rows", "batch", "tokens"]
)
@pytest.mark.parametrize("op", ["cross_entropy", "fused_linear_ce"])
def test_losses_of_sharded_tokens(op, shape, dim, reduction, denominator):
    """The denominator of a mean covers all ranks, whose shares of ignored tokens differ."""
    target, token_weight = targets(*shape), random(*shape, seed=4).abs()
    class_weight = random(V, seed=5).abs()
    part, fused = Shard(dim), op == "fused_linear_ce"

    def loss(x, *weights):
        distributed = isinstance(x, DTensor)
        t, w, c = (
            (distribute(target, part), distribute(token_weight, part), distribute(class_weight, R))
            if distributed
            else (target, token_weight, class_weight)
        )
        keywords = {"token_weight": w, "ce_weight": c, "reduction": reduction, "denominator": denominator}
        return getattr(liger, op)(x, *weights[:1], t, *weights[1:], **keywords, **OPTIONS)

    inputs = [random(*shape, H), random(V, H, seed=1), random(V, seed=2)] if fused else [random(*shape, V)]
    (result,), grads = compare(loss, inputs, [part, R, R][: len(inputs)])
    assert result.placements == ((part,) if reduction == "none" else (Partial(),))
    assert grads[0].placements == (part,)
    assert all(g.placements == (Partial(),) for g in grads[1:])


@pytest.mark.parametrize("op", ["cross_entropy", "fused_linear_ce"])
def test_metrics_of_sharded_tokens(op):
    target = targets(B, T)
    weights = [random(V, H, seed=1)] if op == "fused_linear_ce" else []
    x = random(B, T, H if weights else V)
    asked = "z_loss", "token_accuracy", "argmax", "logprobs", "entropy"
    for names in (asked, asked[1:2]):
        keywords = {"metrics": names, "lse_square_scale": 1e-2}
        whole = getattr(liger, op)(x, *weights, target, **keywords)
        parts = [distribute(x, Shard(1)), *(distribute(w, R) for w in weights), distribute(target, Shard(1))]
        ours = getattr(liger, op)(*parts, **keywords)
        for name, expected in whole._asdict().items():
            actual = getattr(ours, name)
            assert (actual is None) == (expected is None), name
            if expected is not None:
                torch.testing.assert_close(actual.full_tensor(), expected, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("dims", [2, 3])
@pytest.mark.parametrize("placement", ["vocabulary", "partial"])
def test_logits_that_are_sharded_otherwise(placement, dims):
    """Exact, and no rank ever holds all logits: they become sharded tokens."""
    shape = (B, T)[: dims - 1] if dims == 3 else (T,)
    placement = Partial() if placement == "partial" else Shard(dims - 1)
    target = targets(*shape)

    def loss(x):
        return liger.cross_entropy(x, distribute(target, R) if isinstance(x, DTensor) else target)

    compare(loss, [random(*shape, V)], [placement], gathers=True)


def test_ignored_by_a_whole_rank():
    """A rank with no token that counts still takes its part, and adds nothing."""
    target = targets(8)
    target[4:] = -100

    def loss(x, w):
        return liger.fused_linear_ce(x, w, distribute(target, Shard(0)) if isinstance(x, DTensor) else target)

    compare(loss, [random(8, H), random(V, H, seed=1)], [Shard(0), R])


@pytest.mark.parametrize("dims", [2, 3])
def test_logprobs_of_sharded_tokens(dims):
    shape = (B, T) if dims == 3 else (T,)
    target, part = targets(*shape), Shard(dims - 2)

    def run(x, w, b):
        given = distribute(target, part) if isinstance(x, DTensor) else target
        return liger.fused_linear_logprobs(x, w, given, b, temperature=0.7, metrics=metrics)[:2]

    metrics = ("entropy", "log_sum_sq_probs", "mean_logits") if dims == 3 else ("entropy",)
    tensors, placements = [random(*shape, H), random(V, H, seed=1), random(V, seed=2)], [part, R, R]
    _, grads = compare(run, tensors, placements)
    assert grads[0].placements == (part,)
    assert all(grad.placements == (Partial(),) for grad in grads[1:])


@pytest.mark.parametrize("name", ["fused_linear_ce", "fused_linear_logprobs"])
def test_low_rank_terms_of_sharded_tokens(name):
    target, part = targets(B, T), Shard(1)

    def run(x, w, a, b):
        given = distribute(target, part) if isinstance(x, DTensor) else target
        factors = {"lora_a": a, "lora_b": b, "lora_scale": 0.7}
        if name == "fused_linear_ce":
            return liger.fused_linear_ce(x, w, given, **factors)
        return liger.fused_linear_logprobs(x, w, given, temperature=0.7, metrics=("entropy",), **factors)[:2]

    tensors = [random(B, T, H), random(V, H, seed=1), random(3, H, seed=2), random(V, 3, seed=3)]
    _, grads = compare(run, tensors, [part, R, R, R])
    assert grads[0].placements == (part,)
    assert all(grad.placements == (Partial(),) for grad in grads[1:])


@pytest.mark.parametrize("name", ["log_sum_sq_probs", "mean_logits"])
def test_metrics_of_logprobs_of_sharded_tokens(name):
    x, w, target = random(B, T, H), random(V, H, seed=1), targets(B, T)
    expected = liger.fused_linear_logprobs(x, w, target, softcap=3.0, metrics=(name,))
    part = Shard(1)
    given = distribute(x, part), distribute(w, R), distribute(target, part)
    found = liger.fused_linear_logprobs(*given, softcap=3.0, metrics=(name,))
    assert getattr(found, name).placements == (part,)
    for mine, other in zip(found, expected, strict=True):
        assert (mine is None) == (other is None)
        if mine is not None:
            torch.testing.assert_close(mine.full_tensor(), other)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("name", ["kl_div", "jsd", "tvd"])
def test_divergences_of_sharded_tokens(name, reduction):
    """A mean is over the tokens of all ranks that are not ignored; so is what each rank makes of its
    gradient."""
    target, token_weight, teacher = targets(B, T), random(B, T, seed=4).abs(), random(B, T, V, seed=5)
    part = Shard(1)

    def loss(student):
        rest = teacher, target, token_weight
        if isinstance(student, DTensor):
            rest = [distribute(t, part) for t in rest]
        weighted = getattr(liger, name)(student, *rest[:2], token_weight=rest[2], reduction=reduction)
        return weighted, getattr(liger, name)(student, rest[0], reduction=reduction)

    _, grads = compare(loss, [random(B, T, V)], [part])
    assert grads[0].placements == (part,)
