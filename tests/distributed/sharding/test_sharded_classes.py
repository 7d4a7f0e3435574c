# SPDX-License-Identifier: BSD-3-Clause
"""fused_linear_ce, fused_linear_logprobs and cross_entropy of DTensors that shard the classes compute in
shards."""

import itertools

import pytest
import ranks
import torch
from sharded import B, H, R, T, V, compare, distribute, random, targets
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor

import liger

SHARDED = Shard(0)
TOKENS = {"replicated": R, "batch": Shard(0), "tokens": Shard(1), "hidden": Shard(2), "partial": Partial()}
REDUCTIONS = [("mean", None), ("mean", 5.0), ("sum", None), ("none", None)]
OPTIONS = {"label_smoothing": 0.1, "lse_square_scale": 1e-2, "softcap": 20.0}


def placed(tensor, like, dims=2):
    """A tensor with one value per token, sharded as the tokens of ``like``."""
    (p,) = like.placements
    return distribute(tensor, p if p.is_shard() and p.dim < dims else R)


@pytest.mark.parametrize("reduction, denominator", REDUCTIONS)
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("classes", [V, V - 1, 1])
def test_fused_linear_ce(tokens, reduction, denominator, classes):
    """With 1 class one rank has none."""
    target, token_weight = targets(B, T).clamp(max=classes - 1), random(B, T, seed=4).abs()
    class_weight = random(classes, seed=5).abs() + 0.1

    def loss(x, weight, bias):
        given = [target, token_weight, class_weight]
        if isinstance(x, DTensor):
            given = [placed(target, x), placed(token_weight, x), distribute(class_weight, R)]
        keywords = {"token_weight": given[1], "ce_weight": given[2], "reduction": reduction}
        return liger.fused_linear_ce(
            x, weight, given[0], bias, denominator=denominator, **keywords, **OPTIONS
        )

    inputs = [random(B, T, H), random(classes, H, seed=1), random(classes, seed=2)]
    (result,), grads = compare(loss, inputs, [TOKENS[tokens], SHARDED, SHARDED], gathers=True)
    assert all(p.is_replicate() or (reduction == "none" and p.is_shard()) for p in result.placements)
    assert grads[1].placements == grads[2].placements == (SHARDED,)


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("bias", [SHARDED, R, None], ids=str)
def test_fused_linear_logprobs(tokens, bias):
    target = targets(B, T)
    metrics = ("entropy", "log_sum_sq_probs", "mean_logits")

    def run(x, weight, bias):
        given = placed(target, x) if isinstance(x, DTensor) else target
        options = {"temperature": 0.7, "softcap": 9.0, "metrics": metrics}
        return liger.fused_linear_logprobs(x, weight, given, bias, **options)[:2]

    inputs = [random(B, T, H), random(V, H, seed=1), random(V, seed=2) if bias else None]
    _, grads = compare(run, inputs, [TOKENS[tokens], SHARDED, bias], gathers=True)
    assert grads[1].placements == (SHARDED,) and (bias is None or grads[2].placements == (bias,))


@pytest.mark.parametrize("reduction, denominator", REDUCTIONS)
@pytest.mark.parametrize("dims", [2, 3])
def test_cross_entropy(dims, reduction, denominator):
    shape = (B, T) if dims == 3 else (T,)
    target, token_weight = targets(*shape), random(*shape, seed=4).abs()

    def loss(logits):
        given = [target, token_weight]
        if isinstance(logits, DTensor):
            given = [distribute(target, Shard(0)), distribute(token_weight, R)]
        keywords = {"reduction": reduction, "denominator": denominator, "token_weight": given[1]}
        return liger.cross_entropy(logits, given[0], **keywords, **OPTIONS)

    _, grads = compare(loss, [random(*shape, V)], [Shard(dims - 1)], gathers=True)
    assert grads[0].placements == (Shard(dims - 1),)


def test_metrics_and_plain_hidden_states():
    """Plain hidden states have all rows, and so have results; metrics of whole rows take the gathered
    weight."""
    x, weight, target = random(B, T, H), random(V, H, seed=1), targets(B, T)
    sharded = distribute(weight, SHARDED)
    for name in ("z_loss", "logprobs"):
        asked = {"metrics": (name,), "lse_square_scale": 0.1}
        expected = liger.fused_linear_ce(x, weight, target, **asked)
        for given in ((x, target), (distribute(x, Shard(1)), distribute(target, Shard(1)))):
            found = liger.fused_linear_ce(given[0], sharded, given[1], **asked)
            assert isinstance(found.loss, DTensor) == isinstance(given[0], DTensor)
            for mine, other in zip(found, expected, strict=True):
                assert (mine is None) == (other is None)
                if mine is not None:
                    torch.testing.assert_close(ranks.whole(mine), other)
    torch.testing.assert_close(
        liger.fused_linear_logprobs(x, sharded, target), liger.fused_linear_logprobs(x, weight, target)
    )
    with pytest.raises(RuntimeError, match="fused_linear_ce: input is a plain tensor and weight a DTensor"):
        liger.fused_linear_ce(x, sharded, target, metrics=("entropy",))


LARGE = "gathered on every rank in every call"


@pytest.mark.parametrize("placement", [SHARDED, Shard(1)], ids=str)
@pytest.mark.parametrize("name", ["fused_linear_ce", "fused_linear_logprobs"])
def test_gathering_a_weight_warns(name, placement):
    """What cannot be computed in shards is right, and says that it gathers."""
    x, weight, target = random(B, T, H), random(V, H, seed=1), targets(B, T)
    options = (
        {} if placement == Shard(1) else {"lora_a": random(2, H, seed=2), "lora_b": random(V, 2, seed=3)}
    )
    expected = getattr(liger, name)(x, weight, target, **options)
    given = distribute(x, R), distribute(weight, placement), distribute(target, R)
    options = {key: distribute(value, R) for key, value in options.items()}
    with pytest.warns(UserWarning, match=f"liger: {name}: weight has placements .*, and is {LARGE}"):
        found = getattr(liger, name)(*given, **options)
    torch.testing.assert_close(found.full_tensor(), expected)


@pytest.mark.parametrize("name", ["fused_linear_ce", "fused_linear_logprobs", "cross_entropy"])
def test_compiled(name):
    x, weight, target = random(8, H), random(V, H, seed=1), targets(8)

    def run(x, weight, target):
        if name == "cross_entropy":
            return liger.cross_entropy(2 * weight, target)
        return getattr(liger, name)(2 * x, weight, target).sum()

    second = x @ weight.t() if name == "cross_entropy" else weight
    placements = R, Shard(1) if name == "cross_entropy" else SHARDED
    results = []
    for function in (run, torch.compile(run, backend="aot_eager", fullgraph=True)):
        leaves = [distribute(t, p).requires_grad_() for t, p in zip((x, second), placements, strict=True)]
        loss = function(*leaves, distribute(target, R))
        loss.full_tensor().backward()
        results.append([loss, *(leaf.grad for leaf in leaves if leaf.grad is not None)])
    for mine, other in zip(*results, strict=True):
        torch.testing.assert_close(mine.full_tensor(), other.full_tensor())


def test_errors_have_the_name_of_the_function():
    x, weight, target = random(8, H), random(V, H, seed=1), targets(8)
    given = distribute(x, R), distribute(weight, SHARDED), distribute(target, R)
    for wrong, name, words in itertools.chain(
        [(distribute(target, R)[:3], "fused_linear_ce", "target has shape (3,)")],
        [(distribute(target, R)[:3], "fused_linear_logprobs", "target has shape (3,)")],
        [(target, "fused_linear_logprobs", "target is a plain tensor")],
        [(distribute(target.float(), R), "fused_linear_ce", "target has dtype float32")],
    ):
        with pytest.raises(RuntimeError) as raised:
            getattr(liger, name)(*given[:2], wrong)
        assert str(raised.value).startswith(f"{name}: {words}")
    # One rank alone has targets out of range: all of them raise.
    if not ranks.ON_GPU:
        local = torch.full_like(target, V) if ranks.RANK == 1 else target
        odd = DTensor.from_local(local, ranks.mesh(), [R], run_check=False)
        words = "" if ranks.RANK == 1 else f"rank 1 of {ranks.WORLD} raised: "
        with pytest.raises(RuntimeError, match=f"^fused_linear_ce: {words}target at row 0 is {V}"):
            liger.fused_linear_ce(*given[:2], odd)


def test_other_dimensions_of_a_mesh():
    """Ranks of the other dimension have tokens of their own, or the same: means are over all tokens."""
    mesh = torch.distributed.device_mesh.init_device_mesh(ranks.DEVICE.type, (ranks.WORLD, 1))
    x, weight, target = random(B, T, H), random(V, H, seed=1), targets(B, T)
    whole = [t.clone().requires_grad_() for t in (x, weight)]
    for reduction, tokens in itertools.product(("mean", "sum", "none"), (Shard(0), R)):
        expected = liger.fused_linear_ce(*whole, target, reduction=reduction)
        grads = torch.autograd.grad(expected.sum(), whole)
        leaves = [
            distribute_tensor(t, mesh, p, src_data_rank=None).requires_grad_()
            for t, p in ((x, [tokens, Shard(1)]), (weight, [R, SHARDED]))
        ]
        given = distribute_tensor(target, mesh, [tokens, Shard(1)], src_data_rank=None)
        loss = liger.fused_linear_ce(*leaves, given, reduction=reduction)
        torch.testing.assert_close(loss.full_tensor(), expected)
        for mine, other in zip(torch.autograd.grad(loss.sum(), leaves), grads, strict=True):
            torch.testing.assert_close(mine.full_tensor(), other, rtol=1e-4, atol=1e-5)
        logits = (x @ weight.t()).detach()
        part = distribute_tensor(logits, mesh, [tokens, Shard(2)], src_data_rank=None)
        loss = liger.cross_entropy(part, given, reduction=reduction)
        torch.testing.assert_close(loss.full_tensor(), expected)
