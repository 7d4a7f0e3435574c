# SPDX-License-Identifier: BSD-3-Clause
"""The sharding rules: every op on DTensors gives what it gives for the whole tensors, and gathers no
token."""

import pytest
import ranks
import torch
from cases import assert_as_exact_as_torch, error
from declared_calls import DECLARED, DIVISOR, call, is_of_batch, shapes
from sharded import B, H, R, T, V, compare, distribute, random, targets
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor

import liger


@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("op", DECLARED)
def test_declared_ops(op, dim):
    """Each rank works alone along an independent dimension, and its gradients of parameters are partial sums.
    Along any other dimension the tensors are gathered."""
    of_op = shapes(op, (B, 2 * DIVISOR, T) if is_of_batch(op) else (B, T, H))
    of_parameters = [DECLARED[op].is_parameter(name) for name in of_op]
    tensors = [random(*shape, seed=seed) for seed, shape in enumerate(of_op.values())]
    alone = dim < DECLARED[op].independent(tensors[0])
    placements = [R if is_parameter else Shard(dim) for is_parameter in of_parameters]
    results, grads = compare(call(op), tensors, placements, gathers=not alone)
    assert all(r.placements == ((Shard(dim) if alone else R),) for r in results)
    if alone:
        expected = [Partial() if is_parameter else Shard(dim) for is_parameter in of_parameters]
        assert [g.placements for g in grads] == [(p,) for p in expected]


def test_norm_without_a_weight():
    (y,), grads = compare(lambda x: liger.rms_norm(x), [random(B, T, H)], [Shard(1)])
    assert y.placements == grads[0].placements == (Shard(1),)


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("group_size", [None, 4])
def test_gated_norms_of_sharded_tokens(dim, group_size):
    inputs = [random(B, T, H), random(B, T, H, seed=1), random(H, seed=2)]
    (y,), grads = compare(
        lambda x, gate, w: liger.rms_norm_gated(x, gate, w, group_size=group_size, norm_before_gate=dim == 0),
        inputs,
        [Shard(dim), Shard(dim), R],
    )
    assert all(t.placements == (Shard(dim),) for t in (y, *grads[:2])) and grads[2].placements == (Partial(),)
    x, gate = (distribute(t, Shard(dim)) for t in inputs[:2])
    _, rstd = torch.ops.liger.rms_norm_gated(x, gate, None, group_size=group_size)
    assert rstd.placements == (Shard(dim),)
    whole = torch.ops.liger.rms_norm_gated(*inputs[:2], None, group_size=group_size)[1]
    torch.testing.assert_close(rstd.full_tensor(), whole)


def test_norm_of_partial_sums():
    (y,), _ = compare(lambda x, w: liger.rms_norm(x, w), [random(B, T, H), random(H)], [Partial(), R], True)
    assert y.placements == (R,)


def test_rstd_is_that_of_the_tokens():
    """The statistics of a norm are results of the op, and sharded as its tokens are."""
    x = random(B, T, H)
    _, rstd = torch.ops.liger.rms_norm(distribute(x, Shard(1)), None)
    assert rstd.placements == (Shard(1),)
    torch.testing.assert_close(rstd.full_tensor(), torch.ops.liger.rms_norm(x, None)[1])


@pytest.mark.parametrize("name", ["swiglu", "swiglu_packed"])
def test_backward_with_the_product(name):
    """The op that tiled MLPs use: gradients and the product in one pass."""
    inputs = [random(B, T, H), random(B, T, H, seed=1), random(B, T, H, seed=2)]
    inputs = [inputs[0], torch.cat(inputs[1:], -1)] if name == "swiglu_packed" else inputs
    op = getattr(torch.ops.liger, f"{name}_backward")
    for emit in (False, True):
        expected = op(*inputs, emit)
        for ours, whole in zip(op(*(distribute(t, Shard(1)) for t in inputs), emit), expected, strict=True):
            torch.testing.assert_close(ours.full_tensor(), whole)


@pytest.mark.parametrize("table", ["sharded", "replicated", "batched"])
@pytest.mark.parametrize("part", [Shard(0), Shard(1), Shard(2), R], ids=["batch", "heads", "tokens", "whole"])
def test_rope(part, table):
    """q and k of other numbers of heads; only along the tokens can the tables be sharded."""
    q, k = random(B, 4, T, 8), random(B, 2, T, 8, seed=1)
    angles = random(B, T, 8, seed=2) if table == "batched" else random(T, 8, seed=2)
    of_table = Shard(angles.dim() - 2) if table == "sharded" and part == Shard(2) else R
    cos, sin = (distribute(t, of_table) for t in (angles.cos(), angles.sin()))

    def rotate(q, k):
        distributed = isinstance(q, DTensor)
        return liger.rope(q, k, *((cos, sin) if distributed else (angles.cos(), angles.sin())))

    results, grads = compare(rotate, [q, k], [part, part])
    assert {t.placements for t in (*results, *grads)} == {(part,)}


@pytest.mark.parametrize(
    "part", [(Shard(0), Shard(0)), (Shard(1), R), (Shard(2), Shard(2)), (Shard(3), Shard(3))], ids=str
)
def test_qk_norm_rope(part):
    angles = random(B, T, 8, seed=3)
    cos, sin = (distribute(t, R) for t in (angles.cos(), angles.sin()))
    heads = [random(B, 4, T, 8), random(B, 2, T, 8, seed=1)]
    weights = [random(8, seed=2), random(8, seed=4)]

    def call(q, k, v, w):
        distributed = isinstance(q, DTensor)
        return liger.qk_norm_rope(q, k, v, w, *((cos, sin) if distributed else (angles.cos(), angles.sin())))

    _, grads = compare(call, [*heads, *weights], [*part, R, R], part[0] == Shard(3))
    if part[0] != Shard(3):
        assert [g.placements for g in grads[:2]] == [(p,) for p in part]
        assert [g.placements for g in grads[2:]] == [(R if p == R else Partial(),) for p in part]


def test_rope_with_few_heads_of_k():
    """One head of k stays whole on every rank while the heads of q are sharded."""
    angles = random(T, 8, seed=2)
    inputs = [random(B, 4, T, 8), random(B, 1, T, 8, seed=1)]
    cos, sin = (distribute(t, R) for t in (angles.cos(), angles.sin()))
    q, k = liger.rope(distribute(inputs[0], Shard(1)), distribute(inputs[1], R), cos, sin)
    assert (q.placements, k.placements) == ((Shard(1),), (R,))
    for ours, whole in zip((q, k), liger.rope(*inputs, angles.cos(), angles.sin()), strict=True):
        torch.testing.assert_close(ours.full_tensor(), whole)


@pytest.mark.parametrize("packed", [False, True], ids=["separate", "packed"])
def test_tiled_mlp_of_sharded_tokens(packed):
    """Every rank cuts its own tokens into shards."""
    weights = [random(3 * H, H, seed=i) for i in range(2)] + [random(H, 3 * H, seed=3)]
    biases = [random(3 * H, seed=4), random(3 * H, seed=5), random(H, seed=6)]
    if packed:
        weights, biases = [torch.cat(weights[:2]), None, weights[2]], [torch.cat(biases[:2]), None, biases[2]]

    def mlp(*tensors):
        return liger.tiled_mlp(*tensors, num_shards=T)

    tensors = [random(B, T, H), *weights, *biases]
    (y,), grads = compare(mlp, tensors, [Shard(1), *[R] * 6])
    assert y.placements == grads[0].placements == (Shard(1),)
    assert all(g.placements == (Partial(),) for g in grads[1:])


def test_experts_of_sharded_tokens():
    """Every rank routes its own tokens."""
    experts = 4
    weights = [random(experts, 6 * H, H, seed=1), random(experts, H, 3 * H, seed=2)]
    weights += [random(experts, 6 * H, seed=3), random(experts, H, seed=4)]
    index = torch.arange(B * T * 2, device=ranks.DEVICE).view(B, T, 2) * 7 % 5 % experts
    routing = random(B, T, 2, seed=5).abs()

    def run(x, routing, *parameters):
        choices = distribute(index, Shard(1)) if isinstance(x, DTensor) else index
        return liger.grouped_experts(x, choices, routing, *parameters)

    (y,), grads = compare(run, [random(B, T, H), routing, *weights], [Shard(1), Shard(1), *[R] * 4])
    assert y.placements == grads[0].placements == grads[1].placements == (Shard(1),)
    assert all(g.placements == (Partial(),) for g in grads[2:])


def test_inplace_forms():
    """They write each rank's part, and refuse what would have to move first."""
    gate, up, grad = (random(B, T, H, seed=i) for i in range(3))
    expected = torch.ops.liger.swiglu_backward(grad, gate, up)
    parts = [distribute(t, Shard(1)) for t in (grad, gate, up)]
    torch.ops.liger.swiglu_backward_(*parts)
    for ours, whole in zip(parts[1:], expected, strict=False):
        torch.testing.assert_close(ours.full_tensor(), whole)

    angles = random(T, 8)
    q, k = random(B, 4, T, 8), random(B, 2, T, 8, seed=1)
    expected = torch.ops.liger.rope(q, k, angles.cos(), angles.sin())
    table = [distribute(t, R) for t in (angles.cos(), angles.sin())]
    parts = [distribute(t, Shard(2)) for t in (q, k)]
    torch.ops.liger.rope_(*parts, *table)
    for ours, whole in zip(parts, expected, strict=True):
        torch.testing.assert_close(ours.full_tensor(), whole)
    with pytest.raises(RuntimeError, match=r"rope_: q has placements \(Shard\(dim=3\),\)"):
        torch.ops.liger.rope_(*(distribute(t, Shard(3)) for t in (q, k)), *table)

    x = distribute(random(4, 4), Partial())
    expected = x.full_tensor() * 3
    torch.ops.liger.rescale_(x, torch.full((), 3.0, device=ranks.DEVICE))
    assert x.placements == (Partial(),)
    torch.testing.assert_close(x.full_tensor(), expected)

    logits, target = random(9, V), targets(9)
    options = (None, None, None, -100, 0.0, 0.0, None, "mean", False, False, False, False, False)
    *whole, grad = torch.ops.liger.cross_entropy_forward(logits, target, *options, True)
    parts = distribute(logits, Shard(0)), distribute(target, Shard(0))
    ours = torch.ops.liger.cross_entropy_forward_(*parts, *options)
    torch.testing.assert_close(ours[0].full_tensor(), whole[0])
    torch.testing.assert_close(parts[0].full_tensor(), grad)


@pytest.mark.parametrize("plain", ["weight", "target"])
def test_plain_tensors_beside_distributed_ones_are_refused(plain):
    x = distribute(random(B, T, H), Shard(1))
    if plain == "weight":
        with pytest.raises(RuntimeError, match="rms_norm: weight is a plain tensor and x a DTensor"):
            liger.rms_norm(x, random(H))
    else:
        with pytest.raises(RuntimeError, match="cross_entropy: target is a plain tensor"):
            liger.cross_entropy(x, targets(B, T))


def test_two_dimensional_mesh():
    """Tokens sharded over one dimension of the mesh, everything the same over the other."""
    mesh = torch.distributed.device_mesh.init_device_mesh(ranks.DEVICE.type, (1, ranks.WORLD))
    hidden, weight, target = random(B, T, H), random(V, H, seed=1), targets(B, T)
    x = distribute_tensor(hidden, mesh, [Shard(0), Shard(1)], src_data_rank=None).requires_grad_()
    w = distribute_tensor(weight, mesh, [R, R], src_data_rank=None).requires_grad_()
    t = distribute_tensor(target, mesh, [Shard(0), Shard(1)], src_data_rank=None)
    loss = liger.fused_linear_ce(liger.rms_norm(x), w, t)
    loss.backward()
    leaves = hidden.requires_grad_(), weight.requires_grad_()
    whole = liger.fused_linear_ce(liger.rms_norm(leaves[0]), leaves[1], target)
    whole.backward()
    torch.testing.assert_close(loss.full_tensor(), whole)
    for ours, expected in ((x, leaves[0]), (w, leaves[1])):
        assert error(ours.grad.full_tensor(), expected.grad) <= 32 * torch.finfo(torch.float32).eps


def test_compiled():
    """One graph, forward and backward, with the rules traced into it."""
    x, w, t = random(B, 8, H), random(V, H, seed=1), targets(B, 8)
    scale = random(H, seed=2)

    def loss(x, scale, w, t):
        x = liger.swiglu(liger.rms_norm(x, scale), x)
        return liger.fused_linear_ce(x, w, t)

    def run(function, leaves, target):
        result = function(*leaves, target)
        return result, torch.autograd.grad(result, leaves)

    whole, grads = run(loss, [v.requires_grad_() for v in (x, scale, w)], t)
    leaves = [distribute(v.detach(), p).requires_grad_() for v, p in ((x, Shard(1)), (scale, R), (w, R))]
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    ours, their_grads = run(compiled, leaves, distribute(t, Shard(1)))
    torch.testing.assert_close(ours.full_tensor(), whole)
    for grad, expected in zip(their_grads, grads, strict=True):
        assert error(grad.full_tensor(), expected) <= 32 * torch.finfo(torch.float32).eps


def test_bfloat16_weight_gradient():
    """Each rank's share is rounded once, so the sum is as exact as in data parallel training."""
    x, w = random(64, H), random(H, seed=1)
    upstream = random(64, H, seed=2)

    def gradient(x, w, upstream):
        w = w.requires_grad_()
        return torch.autograd.grad(liger.rms_norm(x, w), w, upstream)[0]

    low = [t.bfloat16() for t in (x, w, upstream)]
    with liger.use_backend("torch"):
        exact = gradient(*(t.double() for t in low))
    ours = gradient(*(distribute(t.detach(), p) for t, p in zip(low, (Shard(0), R, Shard(0)), strict=True)))
    assert ours.placements == (Partial(),)
    assert_as_exact_as_torch(ours.full_tensor(), gradient(*low), exact, intermediate=0.0)
