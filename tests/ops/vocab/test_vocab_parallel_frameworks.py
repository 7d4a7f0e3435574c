# SPDX-License-Identifier: BSD-3-Clause
"""Losses over a vocabulary that is sharded over processes: DTensors, autograd and torch.compile."""

import in_shards
import pytest
import torch
import torch.distributed as dist
from copies import Copies
from cross_entropy_reference import leaves, random_layer
from errors import error_about
from processes import in_processes, part_of
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.functional import linear

import liger


@in_processes(2)
def test_dtensors(rank, world):
    mesh = init_device_mesh("cpu", (world,))
    x, weight, bias, target = random_layer(8, 6, 11, "cpu")
    whole = leaves(x, weight, bias)
    expected = liger.fused_linear_ce(*whole[:2], target, whole[2])
    expected.backward()
    for placement in (Replicate(), Shard(0)):
        made = [
            distribute_tensor(t, mesh, [p]).requires_grad_()
            for t, p in ((x, placement), (weight, Shard(0)), (bias, Shard(0)))
        ]
        loss = in_shards.fused_linear_ce(*made[:2], target, made[2])
        assert not isinstance(loss, DTensor)
        torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-6)
        loss.backward()
        for t, full in zip(made, whole, strict=True):
            assert t.grad.placements == t.placements
            torch.testing.assert_close(t.grad.full_tensor(), full.grad, rtol=1e-5, atol=1e-6)
    logits = distribute_tensor(linear(x, weight), mesh, [Shard(1)]).requires_grad_()
    torch.testing.assert_close(
        in_shards.cross_entropy(logits, target), liger.cross_entropy(linear(x, weight), target)
    )

    def refuses(match, *arguments, **options):
        with pytest.raises(error_about(match), match=match):
            in_shards.fused_linear_ce(*arguments, **options)

    for placement in (Replicate(), Shard(1)):
        refuses(r"weight is a DTensor with placements .*, expected \(Shard\(dim=0\),\)", x,
                distribute_tensor(weight, mesh, [placement]), target)  # fmt: skip
    refuses("vocab_size is 12, expected the classes of weight, a DTensor", x, made[1], target, vocab_size=12)
    two = init_device_mesh("cpu", (world, 1))
    for placements in ([Shard(0), Shard(0)], [Shard(0), Shard(1)], [Replicate(), Replicate()]):
        refuses(r"weight is a DTensor .*, expected Shard\(dim=0\) along one dimension of the mesh and Replicate\(\)",
                x, distribute_tensor(weight, two, placements), target)  # fmt: skip
    shard = distribute_tensor(weight, two, [Shard(0), Replicate()])
    torch.testing.assert_close(in_shards.fused_linear_ce(x, shard, target, made[2].detach()), expected)
    other_way = init_device_mesh("cpu", (1, world))
    across = distribute_tensor(x, other_way, [Shard(0), Replicate()])
    torch.testing.assert_close(in_shards.fused_linear_ce(across, shard, target, made[2].detach()), expected)
    groups = [dist.new_group([r]) for r in range(world)]
    refuses(r"over ranks \[0, 1\], expected the ranks of the group", x, made[1], target, group=groups[rank])


@in_processes(2)
def test_autograd(rank, world):
    x, weight, bias, target = random_layer(9, 8, 34, "cpu")
    for reduction in ("mean", "none"):
        mine = [leaves(x)[0], part_of(weight, rank, world), part_of(bias, rank, world)]
        loss = in_shards.fused_linear_ce(
            mine[0], mine[1], target, mine[2], reduction=reduction, memory_budget=500
        ).sum()
        first = torch.autograd.grad(3 * loss, mine, retain_graph=True)
        kept = [g.clone() for g in first]
        for g in first:
            g.fill_(7)
        for a, b in zip(kept, torch.autograd.grad(3 * loss, mine, create_graph=True), strict=True):
            assert torch.equal(a, b) and a.any()
        (grad, *_) = torch.autograd.grad(loss, mine, create_graph=True)
        with pytest.raises(RuntimeError, match="fused_linear_ce is not differentiable"):
            grad.sum().backward()
    weights = torch.rand(34, requires_grad=True)
    with pytest.raises(RuntimeError, match="ce_weight requires grad"):
        in_shards.fused_linear_ce(mine[0], mine[1], target, ce_weight=weights)
    with torch.autocast("cpu", torch.bfloat16):
        loss = in_shards.fused_linear_ce(mine[0], mine[1], target)
    half = [t.detach().bfloat16() for t in mine[:2]]
    assert torch.equal(loss, in_shards.fused_linear_ce(*half, target))


@in_processes(2)
def test_compiled(rank, world):
    x, weight, bias, target = random_layer(9, 8, 34, "cpu")

    def fused(x, weight, bias):
        return in_shards.fused_linear_ce(2 * x, weight, target, bias, label_smoothing=0.1)

    def plain(x, weight, bias):
        return in_shards.cross_entropy(linear(2 * x, weight, bias), target, label_smoothing=0.1)

    for function in (fused, plain):
        results = []
        for run in (function, torch.compile(function, fullgraph=True, backend="aot_eager")):
            mine = [leaves(x)[0], part_of(weight, rank, world), part_of(bias, rank, world)]
            loss = run(*mine)
            loss.backward()
            results.append((loss, *(t.grad for t in mine)))
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


@in_processes(2)
def test_layouts(rank, world):
    """Megatron-LM's (s, b, h), contiguous and as a view (b, s, h): neither is copied, and results have their
    shape."""
    tokens, batch = 5, 3
    x, weight, bias, target = random_layer(tokens * batch, 6, 11, "cpu")
    x, target = x.view(tokens, batch, 6), target.view(tokens, batch)
    assert (target == -100).any()
    shards = [part_of(t, rank, world) for t in (weight, bias)]

    def ce(x, target, w, b, call=in_shards.fused_linear_ce, **layout):
        return call(x, w, target, b, reduction="none", **layout)

    def logprobs(x, target, w, b, call=in_shards.fused_linear_logprobs, **layout):
        return call(x, w, target, b, **layout)

    def plain(x, target, w, b, call=in_shards.cross_entropy, **layout):
        return call(linear(x, w, b), target, reduction="none", **layout)

    single = liger.fused_linear_ce, liger.fused_linear_logprobs, liger.cross_entropy
    for function, one in zip((ce, logprobs, plain), single, strict=True):
        whole = x.clone().requires_grad_()
        expected = function(whole, target, weight, bias, one)
        expected.square().sum().backward()
        for transposed in (False, True):
            leaf = x.clone().requires_grad_()
            given = (leaf.transpose(0, 1), target.t()) if transposed else (leaf, target)
            found = function(*given, *shards, vocab_size=11)
            assert found.shape == given[1].shape
            found.square().sum().backward()
            grad = leaf.grad
            if function is plain:  # each process has the gradient of its own logits
                dist.all_reduce(grad)
            torch.testing.assert_close(found.t() if transposed else found, expected, rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(grad, whole.grad, rtol=1e-5, atol=1e-6)
            if function is not plain:
                with torch.no_grad(), Copies() as copies:
                    function(*(t.detach() for t in given), *(s.detach() for s in shards), vocab_size=11)
                assert all(size < x.numel() for size in copies.sizes), copies.sizes
