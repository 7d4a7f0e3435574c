"""A head whose classes are spread over the ranks: losses and gradients are those of the whole head."""

import pytest
import ranks
import torch
from torch.distributed.tensor import Shard, distribute_tensor

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
    loss = liger.vocab_parallel_fused_linear_ce(
        x, parts[0], target, bias=parts[1], memory_budget=budget, **options
    )
    loss.sum().backward()
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(loss, expected, rtol=tolerance, atol=tolerance)
    for name, part, wanted in zip(
        ("input", "weight", "bias"), (x, *parts), (t.grad for t in whole), strict=True
    ):
        error = (ranks.whole(part.grad) - wanted).norm() / wanted.norm()
        assert error <= tolerance, f"gradient of {name}: error {error.item():.3g}"
    assert torch.equal(ranks.total(loss.detach()), ranks.WORLD * loss.detach())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("budget", [None, 1])
def test_fused_linear_logprobs(dtype, temperature, budget):
    options = {"temperature": temperature, "softcap": 5.0, "return_entropy": True, "return_argmax": True}

    def backward(found):
        (found.logprobs.sum() - 0.3 * found.entropy.square().sum()).backward()

    whole, target = tensors(dtype)
    expected = liger.fused_linear_logprobs(whole[0], whole[1], target, whole[2], **options)
    backward(expected)
    (x, weight, bias), _ = tensors(dtype)
    parts = [distribute_tensor(t.detach(), ranks.mesh(), [Shard(0)]).requires_grad_() for t in (weight, bias)]
    found = liger.vocab_parallel_fused_linear_logprobs(
        x, parts[0], target, parts[1], memory_budget=budget, **options
    )
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
        assert torch.equal(ranks.total(result.detach()), ranks.WORLD * result.detach())
