# SPDX-License-Identifier: BSD-3-Clause
"""A head whose classes are spread over the ranks: losses and gradients agree with the whole head."""

import in_shards
import pytest
import ranks
import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import liger

ROWS, HIDDEN, VOCAB = 70, 32, 130


def tensors(dtype):
    generator = torch.Generator().manual_seed(4)
    x, weight, bias = (
        torch.randn(s, generator=generator) for s in ((ROWS, HIDDEN), (VOCAB, HIDDEN), (VOCAB,))
    )
    target = torch.randint(VOCAB, (ROWS,), generator=generator)
    target[::7] = -100
    return [t.to(ranks.DEVICE, dtype).requires_grad_() for t in (x, weight / 4, bias)], target.to(
        ranks.DEVICE
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("budget", [None, 1])
def test_fused_linear_ce(dtype, reduction, budget):
    whole, target = tensors(dtype)
    options = {"reduction": reduction, "label_smoothing": 0.1, "lse_square_scale": 1e-3}
    expected = liger.fused_linear_ce(whole[0], whole[1], target, whole[2], **options)
    expected.sum().backward()

    (x, weight, bias), _ = tensors(dtype)
    parts = [distribute_tensor(t.detach(), ranks.mesh(), [Shard(0)]).requires_grad_() for t in (weight, bias)]
    loss = in_shards.fused_linear_ce(x, parts[0], target, bias=parts[1], memory_budget=budget, **options)
    loss.sum().backward()
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(loss, expected, rtol=tolerance, atol=tolerance)
    for name, part, wanted in zip(
        ("input", "weight", "bias"), (x, *parts), (t.grad for t in whole), strict=True
    ):
        error = (ranks.whole(part.grad) - wanted).norm() / wanted.norm()
        assert error <= tolerance, f"gradient of {name}: error {error.item():.3g}"
    ranks.assert_same_on_all(loss)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("budget", [None, 1])
def test_fused_linear_logprobs(dtype, temperature, budget):
    options = {"temperature": temperature, "softcap": 5.0, "metrics": ("entropy", "argmax")}

    def backward(found):
        (found.logprobs.sum() - 0.3 * found.entropy.square().sum()).backward()

    whole, target = tensors(dtype)
    expected = liger.fused_linear_logprobs(whole[0], whole[1], target, whole[2], **options)
    backward(expected)
    (x, weight, bias), _ = tensors(dtype)
    parts = [distribute_tensor(t.detach(), ranks.mesh(), [Shard(0)]).requires_grad_() for t in (weight, bias)]
    found = in_shards.fused_linear_logprobs(x, parts[0], target, parts[1], memory_budget=budget, **options)
    backward(found)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(found.logprobs, expected.logprobs, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(found.entropy, expected.entropy, rtol=tolerance, atol=tolerance)
    # Where two logits are nearly equal, GEMMs of other sizes may order them differently.
    assert (found.argmax == expected.argmax).float().mean() > 0.95
    for name, part, wanted in zip(
        ("hidden", "weight", "bias"), (x, *parts), (t.grad for t in whole), strict=True
    ):
        error = (ranks.whole(part.grad) - wanted).norm() / wanted.norm()
        assert error <= tolerance, f"gradient of {name}: error {error.item():.3g}"
    for result in found[:2]:
        ranks.assert_same_on_all(result)


@pytest.mark.parametrize("name", ["fused_linear_ce", "cross_entropy"])
def test_distributed_options(name):
    """Class weights, token weights and a denominator may be DTensors, such as a count that each rank has a
    part of."""
    (x, weight, bias), target = tensors(torch.float32)
    logits = torch.nn.functional.linear(x, weight, bias)
    generator = torch.Generator().manual_seed(5)
    class_weight, token_weight = (torch.rand(n, generator=generator).to(ranks.DEVICE) for n in (VOCAB, ROWS))
    count = torch.tensor(float(ranks.WORLD * 20), device=ranks.DEVICE)
    expected = liger.cross_entropy(
        logits, target, ce_weight=class_weight, token_weight=token_weight, denominator=count
    )

    mesh = ranks.mesh()

    def sharded(tensor, dim=0):
        return distribute_tensor(tensor.detach(), mesh, [Shard(dim)])

    def loss_of(denominator, **options):
        if name == "cross_entropy":
            return in_shards.cross_entropy(sharded(logits, 1), target, denominator=denominator, **options)
        return in_shards.fused_linear_ce(
            x, sharded(weight), target, sharded(bias), denominator=denominator, **options
        )

    of_rank = DTensor.from_local(torch.full_like(count, 20.0), mesh, [Partial()])
    replicated = distribute_tensor(count.reshape(1), mesh, [Replicate()])
    for denominator in (of_rank, replicated):
        loss = loss_of(denominator, ce_weight=sharded(class_weight), token_weight=sharded(token_weight))
        torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
    with pytest.raises(RuntimeError, match=f"{name}: denominator requires grad"):
        loss_of(replicated.requires_grad_())
