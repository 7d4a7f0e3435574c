# SPDX-License-Identifier: BSD-3-Clause
"""Ops and modules with DTensors on a mesh of two dimensions, against one process. Four ranks or more."""

import in_shards
import pytest
import ranks
import torch
from cases import error
from sharded import H, R, T, V, random, targets
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import liger

RANKS = ranks.MESH_WORLD
S0, S1, P = Shard(0), Shard(1), Partial()
# (data parallel, tensor parallel)
SHAPE = (RANKS // 2, 2)
LIMIT = 64 * torch.finfo(torch.float32).eps


def mesh():
    return ranks.mesh_of(*SHAPE, names=("data", "tensor"))


def spread(tensor, *placements):
    """The parts of a tensor that all ranks have, as a leaf."""
    return distribute_tensor(tensor.detach(), mesh(), placements, src_data_rank=None).requires_grad_(
        tensor.is_floating_point()
    )


def flat(tensor):
    """(batch, tokens, ...) as rows."""
    try:
        return tensor.flatten(0, 1)
    except RuntimeError as error:
        if "flatten multiple dimensions" not in str(error):
            raise
        pytest.skip("this torch does not flatten sharded tokens")


def own(tensor):
    """The rows of this rank along the first dimension of the mesh."""
    return tensor.detach().chunk(SHAPE[0])[mesh().get_local_rank("data")].clone()


def layer():
    """(hidden, weight, bias, target), the same on all ranks."""
    hidden, weight, bias = random(4, T, H), random(V, H, seed=1) / 4, random(V, seed=2)
    return [t.requires_grad_() for t in (hidden, weight, bias)], targets(4, T)


def assert_gradients(leaves, whole):
    for name, part, full in zip(("hidden", "weight", "bias"), leaves, whole, strict=True):
        assert error(ranks.whole(part.grad), full.grad) <= LIMIT, name


ROWS = [(S0, S1), (S0, R), (R, S1), (R, R), (S0, S0), (S1, S1)]


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("rows", ROWS, ids=str)
def test_losses_in_shards_of_the_classes(rows, reduction):
    """By the functions of one process. Ranks along the first dimension have tokens of their own: a mean is
    over all."""
    whole, target = layer()
    x, weight, bias = (spread(t, *p) for t, p in zip(whole, (rows, (R, S0), (R, S0)), strict=True))
    given = spread(target, *rows)
    expected = liger.fused_linear_ce(*whole[:2], target, whole[2], reduction=reduction)
    expected.sum().backward()
    loss = liger.fused_linear_ce(x, weight, given, bias, reduction=reduction)
    assert error(loss.full_tensor(), expected) <= LIMIT
    loss.sum().full_tensor().backward()
    assert_gradients((x, weight, bias), whole)
    found = liger.fused_linear_logprobs(x, weight, given, bias)
    assert error(found.full_tensor(), liger.fused_linear_logprobs(*whole[:2], target, whole[2])) <= LIMIT
    logits = torch.nn.functional.linear(*whole).detach()
    part, logits = spread(logits, rows[0], Shard(2)), logits.requires_grad_()
    loss = liger.cross_entropy(part, spread(target, rows[0], R), reduction=reduction)
    assert error(loss.full_tensor(), expected) <= LIMIT
    loss.sum().full_tensor().backward()
    liger.cross_entropy(logits, target, reduction=reduction).sum().backward()
    assert error(part.grad.full_tensor(), logits.grad) <= LIMIT


WEIGHTS = [(R, R), (S0, R), (R, S0), (S0, S0), (S0, S1)]


@pytest.mark.parametrize("weights", WEIGHTS, ids=str)
@pytest.mark.parametrize("rows", ROWS, ids=str)
def test_fused_linear_ce(rows, weights):
    whole, target = layer()
    expected = liger.fused_linear_ce(*whole[:2], target, whole[2], label_smoothing=0.1)
    expected.backward()
    # A bias has no second dimension.
    placements = (rows, weights, [R if p == S1 else p for p in weights])
    leaves = [spread(t, *p) for t, p in zip(whole, placements, strict=True)]
    loss = liger.fused_linear_ce(*leaves[:2], spread(target, *rows), leaves[2], label_smoothing=0.1)
    loss.full_tensor().backward()
    assert error(loss.full_tensor(), expected) <= LIMIT
    assert_gradients(leaves, whole)


@pytest.mark.parametrize("weights", WEIGHTS, ids=str)
@pytest.mark.parametrize("rows", ROWS, ids=str)
def test_fused_linear_logprobs(rows, weights):
    options = {"temperature": 0.7, "metrics": ("entropy", "argmax")}
    whole, target = layer()
    expected = liger.fused_linear_logprobs(*whole[:2], target, whole[2], **options)
    (expected.logprobs.sum() - 0.3 * expected.entropy.sum()).backward()
    placements = (rows, weights, [R if p == S1 else p for p in weights])
    leaves = [spread(t, *p) for t, p in zip(whole, placements, strict=True)]
    found = liger.fused_linear_logprobs(*leaves[:2], spread(target, *rows), leaves[2], **options)
    (found.logprobs.sum() - 0.3 * found.entropy.sum()).full_tensor().backward()
    for ours, other in zip(found[:2], expected[:2], strict=True):
        assert error(ours.full_tensor(), other) <= LIMIT
    assert torch.equal(found.argmax.full_tensor(), expected.argmax)
    assert_gradients(leaves, whole)


# (placements of the rows, or "plain": the rows of this rank alone)
VOCAB_ROWS = ["plain", (S0, R), (S0, S1), (R, R), (R, S0)]


def vocab_arguments(rows, whole, target):
    """(hidden, weight, bias, target) with the vocabulary along the second dimension of the mesh."""
    shards = [spread(t, R, S0) for t in whole[1:]]
    if rows == "plain":
        return [own(whole[0]).requires_grad_(), *shards], own(target)
    return [spread(whole[0], *rows), *shards], spread(target, *rows)


def gathered(value, rows):
    """One value per row, of all rows. The results are plain tensors, of the rows of this rank's group."""
    assert not isinstance(value, DTensor)
    if rows != "plain" and rows[0] == R:
        return value
    return DTensor.from_local(value, mesh(), (S0, R), run_check=False).full_tensor()


def assert_vocab_gradients(leaves, whole, rows):
    """Every process has the gradient of its rows; gradients of weights are sums over processes with other
    rows."""
    hidden = leaves[0]
    grad = hidden.grad.full_tensor() if isinstance(hidden.grad, DTensor) else gathered(hidden.grad, rows)
    assert error(grad, whole[0].grad) <= LIMIT
    for name, part, full in zip(("weight", "bias"), leaves[1:], whole[1:], strict=True):
        assert part.grad.placements == (R if rows in ((R, R), (R, S0)) else P, S0), name
        assert error(part.grad.full_tensor(), full.grad) <= LIMIT, name


@pytest.mark.parametrize("reduction", ["sum", "none"])
@pytest.mark.parametrize("rows", VOCAB_ROWS, ids=str)
def test_vocab_parallel_fused_linear_ce(rows, reduction):
    whole, target = layer()
    expected = liger.fused_linear_ce(*whole[:2], target, whole[2], reduction="none")
    expected.sum().backward()
    leaves, given = vocab_arguments(rows, whole, target)
    loss = in_shards.fused_linear_ce(*leaves[:2], given, leaves[2], reduction=reduction)
    loss.sum().backward()
    if reduction == "none":
        assert error(gathered(loss, rows), expected) <= LIMIT
    assert_vocab_gradients(leaves, whole, rows)


def test_module_with_a_denominator():
    """The mean over all rows of all processes, by their number."""
    whole, target = layer()
    expected = liger.fused_linear_ce(*whole[:2], target, whole[2])
    expected.backward()
    leaves, given = vocab_arguments((S0, R), whole, target)
    head = liger.nn.FusedLinearCrossEntropyLoss(group=mesh().get_group("tensor"))
    loss = head(*leaves[:2], given, leaves[2], denominator=int((target != -100).sum()))
    loss.backward()
    total = DTensor.from_local(loss.detach(), mesh(), (P, R), run_check=False).full_tensor()
    assert error(total, expected) <= LIMIT
    assert_vocab_gradients(leaves, whole, (S0, R))


@pytest.mark.parametrize("rows", VOCAB_ROWS, ids=str)
def test_vocab_parallel_fused_linear_logprobs(rows):
    options = {"temperature": 0.7, "metrics": ("entropy", "argmax")}
    whole, target = layer()
    expected = liger.fused_linear_logprobs(*whole[:2], target, whole[2], **options)
    (expected.logprobs.sum() - 0.3 * expected.entropy.sum()).backward()
    leaves, given = vocab_arguments(rows, whole, target)
    found = in_shards.fused_linear_logprobs(*leaves[:2], given, leaves[2], **options)
    (found.logprobs.sum() - 0.3 * found.entropy.sum()).backward()
    for ours, other in zip(found[:2], expected[:2], strict=True):
        assert error(gathered(ours, rows), other) <= LIMIT
    assert torch.equal(gathered(found.argmax, rows), expected.argmax)
    assert_vocab_gradients(leaves, whole, rows)


def _loss(hidden, weight, target):
    return in_shards.fused_linear_ce(hidden, weight, target, reduction="sum")


def _logprobs(hidden, weight, target):
    return -in_shards.fused_linear_logprobs(hidden, weight, target).sum()


@pytest.mark.parametrize("function", [_loss, _logprobs])
def test_vocab_parallel_tokens_of_a_sharded_sequence(function):
    """Flattened (batch, tokens) with shards of the tokens: the rows of a rank alternate with rows of
    others."""
    hidden, weight, target = random(4, 6, H).requires_grad_(), random(V, H, seed=1) / 4, targets(4, 6)
    weight = weight.requires_grad_()
    expected = liger.fused_linear_ce(hidden, weight, target, reduction="sum")
    expected.backward()
    leaves, given = [spread(hidden, S1, R), spread(weight, R, S0)], spread(target, S1, R)
    function(flat(leaves[0]), leaves[1], flat(given)).backward()
    for part, full in zip(leaves, (hidden, weight), strict=True):
        assert error(part.grad.full_tensor(), full.grad) <= LIMIT


@pytest.mark.parametrize("rows", ["plain", (S0, R), (R, R)], ids=str)
def test_vocab_parallel_cross_entropy(rows):
    logits, target = random(4, T, V).requires_grad_(), targets(4, T)
    expected = liger.cross_entropy(logits, target, reduction="none")
    expected.sum().backward()
    if rows == "plain":
        part = distribute_tensor(own(logits), mesh()["tensor"], [Shard(2)]).requires_grad_()
        given = own(target)
    else:
        part, given = spread(logits, rows[0], Shard(2)), spread(target, *rows)
    loss = in_shards.cross_entropy(part, given, reduction="none")
    loss.sum().backward()
    assert error(gathered(loss, rows), expected) <= LIMIT
    grad = part.grad.full_tensor()
    assert error(gathered(grad, rows) if rows == "plain" else grad, logits.grad) <= LIMIT


def test_weights_that_fully_shard_has_sharded():
    """Outside of the forward of their unit they are refused, with what to do; within it they are the results
    of one dimension."""

    class Head(torch.nn.Linear):
        def forward(self, hidden, target):
            assert self.weight.device_mesh.ndim == 1
            return in_shards.fused_linear_ce(hidden, self.weight, target, reduction="sum")

    whole, target = layer()
    expected = liger.fused_linear_ce(*whole[:2], target, reduction="sum")
    expected.backward()
    head = Head(H, V, bias=False, device=ranks.DEVICE)
    with torch.no_grad():
        head.weight.copy_(whole[1])
    parallelize_module(head, mesh()["tensor"], ColwiseParallel(use_local_output=False))
    # The inputs and outputs of this style are logits.
    for hooks in (head._forward_pre_hooks, head._forward_hooks):
        hooks.clear()
    fully_shard(head, mesh=mesh()["data"])
    hidden = own(whole[0]).requires_grad_()
    with pytest.raises(
        RuntimeError, match="within the forward of the module whose parameters fully_shard gathers"
    ):
        liger.fused_linear_ce(hidden, head.weight, own(target), group=mesh().get_group("tensor"))
    loss = head(hidden, own(target))
    loss.backward()
    # fully_shard averages over its dimension.
    assert error(SHAPE[0] * head.weight.grad.full_tensor(), whole[1].grad) <= LIMIT
    assert error(gathered(hidden.grad, "plain"), whole[0].grad) <= LIMIT


def mlp_weights(biases=True):
    sizes = [(24, H), (24, H), (H, 24), *([(24,), (24,), (H,)] if biases else [])]
    return [random(*size, seed=i) / 4 for i, size in enumerate(sizes)]


@pytest.mark.parametrize("weights", [(R, R), (S0, R), (S0, S0)], ids=str)
@pytest.mark.parametrize("rows", [(S0, S1), (S0, R), (R, R)], ids=str)
def test_tiled_mlp(rows, weights):
    """The op gathers sharded weights."""
    whole = [t.requires_grad_() for t in (random(4, T, H), *mlp_weights(False))]
    expected = liger.tiled_mlp(*whole, num_shards=3)
    upstream = random(4, T, H, seed=9)
    expected.backward(upstream)
    leaves = [spread(t, *p) for t, p in zip(whole, (rows, *[weights] * 3), strict=True)]
    y = liger.tiled_mlp(*leaves, num_shards=3)
    y.backward(spread(upstream, *y.placements).detach())
    assert error(y.full_tensor(), expected) <= LIMIT
    for part, full in zip(leaves, whole, strict=True):
        assert error(part.grad.full_tensor(), full.grad) <= LIMIT


def sharded_module():
    """(a tiled module with shards of the intermediate size along the second dimension of the mesh, the whole
    one)."""
    module, whole = (
        liger.nn.TiledSwiGLUMLP(H, 24, bias=True, num_shards=3, device=ranks.DEVICE) for _ in range(2)
    )
    names = ("gate_proj", "up_proj", "down_proj")
    with torch.no_grad():
        for i, tensor in enumerate(mlp_weights()):
            getattr(getattr(whole, names[i % 3]), "weight" if i < 3 else "bias").copy_(tensor)
    for name, projection in whole.named_children():
        row, sharded = name == "down_proj", getattr(module, name)
        sharded.weight = torch.nn.Parameter(spread(projection.weight, R, S1 if row else S0))
        sharded.bias = torch.nn.Parameter(spread(projection.bias, R, R if row else S0))
    return module, whole


def assert_parameter_gradients(module, whole):
    for (name, part), full in zip(module.named_parameters(), whole.parameters(), strict=True):
        assert error(part.grad.full_tensor(), full.grad) <= LIMIT, name


def test_tiled_module_with_tokens_of_a_sharded_sequence():
    module, whole = sharded_module()
    x, upstream = random(4, 6, H, seed=8).requires_grad_(), random(4, 6, H, seed=9)
    expected = whole(x)
    expected.backward(upstream)
    given = spread(x, S1, R)
    y = module(flat(given))
    (y * flat(spread(upstream, S1, R).detach())).sum().full_tensor().backward()
    assert error(y.full_tensor(), expected.flatten(0, 1)) <= LIMIT
    assert error(given.grad.full_tensor(), x.grad) <= LIMIT
    assert_parameter_gradients(module, whole)


@pytest.mark.parametrize("rows", ["plain", (S0, R), (S0, S1), (R, R)], ids=str)
def test_tiled_module(rows):
    """Shards of the intermediate size along the second dimension, tokens of each rank along the first."""
    module, whole = sharded_module()
    x, upstream = random(4, T, H, seed=8).requires_grad_(), random(4, T, H, seed=9)
    expected = whole(x)
    expected.backward(upstream)
    given = own(x).requires_grad_() if rows == "plain" else spread(x, *rows)
    y = module(given)
    if rows == "plain":
        y.backward(own(upstream))
        y, grad = gathered(y, rows), gathered(given.grad, rows)
    else:
        y.backward(spread(upstream, *y.placements).detach())
        y, grad = y.full_tensor(), given.grad.full_tensor()
    assert error(y, expected) <= LIMIT
    assert error(grad, x.grad) <= LIMIT
    assert_parameter_gradients(module, whole)


def test_tiled_module_refuses_weights_of_fully_shard():
    module = liger.nn.TiledSwiGLUMLP(H, 24, bias=True, device=ranks.DEVICE)
    plan = {"gate_proj": ColwiseParallel(), "up_proj": ColwiseParallel(), "down_proj": RowwiseParallel()}
    parallelize_module(module, mesh()["tensor"], plan)
    for projection in module.children():
        fully_shard(projection, mesh=mesh()["data"])
    with pytest.raises(RuntimeError, match="fully_shard belongs on this module or on a layer around it"):
        module(random(2, H))
