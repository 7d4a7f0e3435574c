# SPDX-License-Identifier: BSD-3-Clause
"""Log-probabilities over a vocabulary that is sharded over processes, against float64 and the op on one
process.

A test starts its processes once and goes over its cases in them.
"""

import itertools

import in_shards
import pytest
import torch
from cases import assert_as_exact_as_torch
from cross_entropy_reference import LARGEST_LSE, leaves, logit_rounding, random_layer, rows_per_chunk
from processes import assert_same_bits, in_processes, part_of
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.functional import linear

import liger

EVERYTHING = {"metrics": ("entropy", "argmax", "log_sum_sq_probs", "mean_logits")}


def exact_of(x, weight, target, bias, temperature=1.0, softcap=None, ignore_index=-100):
    """The fields of LogProbs in float64."""
    logits = linear(x, weight, bias)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logp = (logits / temperature).log_softmax(-1)
    ignored = target == ignore_index
    found = logp.gather(1, target.long().masked_fill(ignored, 0).unsqueeze(1)).squeeze(1)
    entropy = -(logp.exp() * logp.clamp(min=-1e30)).sum(-1)
    squares, means = (2 * logp).logsumexp(-1).masked_fill(ignored, 0.0), (logits / temperature).mean(-1)
    entropy, means = entropy.masked_fill(ignored, 0.0), means.masked_fill(ignored, 0.0)
    return found.masked_fill(ignored, 0.0), entropy, logits.argmax(-1), squares, means


def check(rank, world, what, tensors, target, bounds=None, layout=None, memory_budget=None, **chosen):
    """All results and gradients are as exact as on one process, and the same bits on every process."""
    layout = {"vocab_size": tensors[1].shape[0]} if layout is None else layout
    parts = [leaves(tensors[0])[0], *(part_of(t, rank, world, bounds) for t in tensors[1:])]
    whole, exact = leaves(*tensors), leaves(*(t.double() for t in tensors))
    options = {**EVERYTHING, **chosen, "memory_budget": memory_budget}
    mine = in_shards.fused_linear_logprobs(*parts[:2], target, *parts[2:], **layout, **options)
    one = liger.fused_linear_logprobs(*whole[:2], target, *whole[2:], **options)
    best = exact_of(*exact[:2], target, exact[2] if len(exact) > 2 else None, **chosen)
    rounding = max(2 * LARGEST_LSE, logit_rounding(tensors[0].dtype)) / chosen.get("temperature", 1.0)
    fields = (*zip(mine, one, best, mine._fields, strict=True),)
    for value, other, expected, name in (*fields[:2], *fields[3:]):
        assert value.dtype == other.dtype and value.shape == target.shape
        assert_as_exact_as_torch(value, other, expected, f"{what}: {name}", rounding)
        assert_same_bits(value, f"{what}: {name}")
    assert torch.equal(mine.argmax, one.argmax), f"{what}: argmax"
    upstream = torch.randn(2, *target.shape)
    for logprobs, entropy, *_ in (mine, one, best):
        wide = upstream.to(logprobs.dtype)
        ((wide[0] * logprobs).sum() + (wide[1] * entropy).sum()).backward()
    assert_same_bits(parts[0].grad, f"{what}: gradient of hidden")
    assert_as_exact_as_torch(parts[0].grad, whole[0].grad, exact[0].grad, f"{what}: hidden", rounding)
    for i, name in ((1, "weight"), (2, "bias"))[: len(tensors) - 1]:
        pieces = (parts[i].grad, *(part_of(t.grad, rank, world, bounds) for t in (whole[i], exact[i])))
        # Relative to the largest gradient of all shards, as an error in any of them would be.
        pad = torch.full_like(pieces[2][:1], exact[i].grad.abs().max().clamp_min(1e-30).item())
        assert_as_exact_as_torch(
            *(torch.cat([t, pad.to(t.dtype)]) for t in pieces), f"{what}: {name}", rounding
        )


@in_processes(2)
def test_every_option(rank, world):
    """Shards of 65 and 64 classes, in several chunks."""
    cases = itertools.product((1.0, 0.7, 3.0), (None, 2.5), (torch.float32, torch.bfloat16, torch.float16))
    for i, (temperature, softcap, dtype) in enumerate(cases):
        torch.manual_seed(i)
        *tensors, target = random_layer(13, 24, 129, "cpu", dtype)
        what = f"temperature {temperature}, softcap {softcap}, {dtype}"
        budget = rows_per_chunk(4, tensors[1]) // world
        chosen = {"temperature": temperature, "softcap": softcap, "memory_budget": budget}
        check(rank, world, what, tensors[: 2 + i % 2], target, **chosen)


@in_processes(3)
def test_uneven_shards(rank, world):
    *tensors, target = random_layer(11, 8, 10, "cpu")
    check(rank, world, "4, 4 and 2 classes", tensors, target)
    bounds = (0, 1, 8, 10)
    first = {"vocab_start": bounds[rank], "vocab_size": 10}
    check(rank, world, "1, 7 and 2 classes", tensors, target, bounds, first, memory_budget=200)
    check(rank, world, "int32 targets", tensors, target.int())
    # An ignored target that is a class, of another process than the first.
    target[3:5] = 7
    check(rank, world, "a class is ignored", tensors, target.clamp(min=0), ignore_index=7)
    *tensors, target = random_layer(11, 8, 9, "cpu")
    check(rank, world, "3 classes each", tensors, target, layout={})


@in_processes(1)
def test_a_group_of_one_process(rank, world):
    for dtype in (torch.float32, torch.bfloat16):
        *tensors, target = random_layer(11, 8, 33, "cpu", dtype)
        check(rank, world, f"one process, {dtype}", tensors, target, layout={}, memory_budget=300)


@in_processes(2)
def test_chunks_in_flight(rank, world):
    *tensors, target = random_layer(9001, 6, 10, "cpu")
    check(rank, world, "two chunks in flight", tensors, target, memory_budget=4600 * 32)


@in_processes(2)
def test_unusual_rows(rank, world):
    x, weight, bias, target = random_layer(11, 8, 12, "cpu")
    call = in_shards.fused_linear_logprobs
    # Rows that are all ignored, and none at all.
    for given, y in ((x, torch.full_like(target, -100)), (x[:0], target[:0])):
        mine = [leaves(given)[0], part_of(weight, rank, world)]
        found = call(*mine, y, **EVERYTHING)
        assert not found.logprobs.any() and not found.entropy.any() and (found.argmax == -1).all()
        (found.logprobs.sum() + found.entropy.sum()).backward()
        assert not mine[0].grad.any() and not mine[1].grad.any()
    target[1::3] = -100
    # A row of NaN is NaN on every process, wherever it comes from.
    broken = x.clone()
    broken[0, 0] = torch.nan
    valid = target.clamp(min=0)
    found = call(broken, part_of(weight, rank, world), valid, **EVERYTHING)
    assert found.logprobs[0].isnan() and found.entropy[0].isnan() and found.logprobs[1:].isfinite().all()
    # Classes without probability on a whole process.
    masked = bias.clone()
    masked[:6] = -torch.inf
    mine = (x, part_of(weight, rank, world), valid.clamp(min=6), part_of(masked, rank, world))
    found, one = (
        call(*mine, **EVERYTHING),
        liger.fused_linear_logprobs(x, weight, mine[2], masked, **EVERYTHING),
    )
    for a, b in zip(found, one, strict=True):
        torch.testing.assert_close(a, b)
    # Equal logits: the lowest class.
    same = torch.ones(12, 8)
    assert not call(x, part_of(same, rank, world), valid, metrics=("argmax",)).argmax.any()
    # Frozen tensors get no gradient, the others the same one; a result alone has gradients too.
    for trained, name in itertools.product(((True, False), (False, True)), ("logprobs", "entropy")):
        mine = [x.clone().requires_grad_(trained[0]), part_of(weight, rank, world).requires_grad_(trained[1])]
        getattr(call(*mine, target, **EVERYTHING, memory_budget=200), name).sum().backward()
        whole = leaves(x, weight)
        getattr(liger.fused_linear_logprobs(*whole, target, **EVERYTHING), name).sum().backward()
        grads = whole[0].grad, part_of(whole[1].grad, rank, world)
        for t, want, grad in zip(mine, trained, grads, strict=True):
            assert (t.grad is None) == (not want)
            if want:
                torch.testing.assert_close(t.grad, grad.detach(), rtol=1e-5, atol=1e-6)


@in_processes(2)
def test_dtensors_and_compile(rank, world):
    mesh = init_device_mesh("cpu", (world,))
    x, weight, bias, target = random_layer(8, 6, 11, "cpu")
    call, shape = in_shards.fused_linear_logprobs, (2, 4)
    whole = leaves(x, weight, bias)
    expected = liger.fused_linear_logprobs(*whole[:2], target, whole[2])
    expected.sum().backward()
    for placement in (Replicate(), Shard(0)):
        made = [
            distribute_tensor(t, mesh, [p]).requires_grad_()
            for t, p in ((x, placement), (weight, Shard(0)), (bias, Shard(0)))
        ]
        logprobs = call(*made[:2], target, made[2])
        assert not isinstance(logprobs, DTensor)
        torch.testing.assert_close(logprobs, expected, rtol=1e-6, atol=1e-6)
        logprobs.sum().backward()
        for t, full in zip(made, whole, strict=True):
            assert t.grad.placements == t.placements
            torch.testing.assert_close(t.grad.full_tensor(), full.grad, rtol=1e-5, atol=1e-6)
    parts = [part_of(t, rank, world) for t in (weight, bias)]
    found = call(
        x.view(*shape, 6), parts[0], target.view(shape), parts[1], vocab_size=11, metrics=("argmax",)
    )
    assert found.logprobs.shape == found.argmax.shape == shape and found.entropy is None
    torch.testing.assert_close(found.logprobs.flatten(), expected, rtol=1e-6, atol=1e-6)

    def loss(x, w):
        found = call(x, w, target, vocab_size=11, temperature=0.5, metrics=("entropy",))
        return found.logprobs.sum() + found.entropy.square().sum()

    results = []
    for function in (loss, torch.compile(loss, backend="aot_eager", fullgraph=True)):
        mine = [leaves(x)[0], part_of(weight, rank, world)]
        value = function(*mine)
        results.append([value, *torch.autograd.grad(value, mine)])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)
    mine = [leaves(x)[0], part_of(weight, rank, world)]
    (grad, _) = torch.autograd.grad(loss(*mine), mine, create_graph=True)
    with pytest.raises(RuntimeError, match="fused_linear_logprobs is not differentiable"):
        grad.sum().backward()
    with torch.autocast("cpu", torch.bfloat16):
        assert call(x, parts[0], target, vocab_size=11).dtype == torch.float32


@in_processes(2)
def test_float32_logits(rank, world):
    """Errors of float32 arithmetic for operands of any dtype, as of the op on one process; the backward,
    too."""
    call = in_shards.fused_linear_logprobs
    kinds = [
        (torch.bfloat16,) * 2,
        (torch.float16,) * 2,
        (torch.bfloat16, torch.float32),
        (torch.float32,) * 2,
    ]
    for narrow, wide in kinds:
        x, weight, bias, target = random_layer(40, 16, 34, "cpu")
        x, weight, bias = x.to(narrow), weight.to(wide), bias.to(wide)
        options = {"temperature": 0.7, "metrics": ("entropy",)}
        exact = exact_of(x.double(), weight.double(), target, bias.double(), temperature=0.7)
        whole = leaves(x, weight, bias)
        one = liger.fused_linear_logprobs(*whole[:2], target, whole[2], logits_dtype=torch.float32, **options)
        mine = [leaves(x)[0], part_of(weight, rank, world), part_of(bias, rank, world)]
        for budget in (None, 4000):
            found = call(
                *mine[:2],
                target,
                mine[2],
                vocab_size=34,
                logits_dtype=torch.float32,
                memory_budget=budget,
                **options,
            )
            for ours, best in zip(found[:2], exact[:2], strict=True):
                assert (ours - best).abs().max() < 1e-5, (narrow, wide)
        if wide == narrow == torch.bfloat16:
            rounded = call(*mine[:2], target, mine[2], vocab_size=34, **options)
            assert (rounded.logprobs - exact[0]).abs().max() > 1e-3
        for result in (one, found):
            (result.logprobs.sum() - 0.3 * result.entropy.square().sum()).backward()
        expected = [whole[0].grad, *(part_of(t.grad, rank, world).detach() for t in whole[1:])]
        for leaf, wanted in zip(mine, expected, strict=True):
            assert leaf.grad.dtype == wanted.dtype == leaf.dtype
            error = (leaf.grad.double() - wanted.double()).norm() / wanted.double().norm()
            # Two roundings: of the gradient of the logits, and of the result.
            assert error <= 4 * torch.finfo(narrow).eps, (narrow, wide, error)
    with pytest.raises(ValueError, match="logits_dtype is float16, expected float32 or None"):
        call(mine[0], mine[1], target, vocab_size=34, logits_dtype=torch.float16)
    with pytest.raises(RuntimeError, match="weight has dtype float32"):
        call(x.bfloat16(), mine[1], target, vocab_size=34)

    def loss(x, w):
        return call(x, w, target, vocab_size=34, logits_dtype=torch.float32).sum()

    values = [
        function(x, mine[1]) for function in (loss, torch.compile(loss, backend="aot_eager", fullgraph=True))
    ]
    torch.testing.assert_close(*values)
