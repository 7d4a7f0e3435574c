# SPDX-License-Identifier: BSD-3-Clause
"""Cross entropy of a vocabulary in parts, on processes that talk through gloo, against float64 and the whole
op.

A test starts its processes once and goes over its cases in them.
"""

import itertools

import in_shards
import pytest
import torch
import torch.distributed as dist
from cases import assert_as_exact_as_torch
from cross_entropy_reference import (
    LARGEST_LSE,
    OPTIONS,
    leaves,
    logit_rounding,
    options,
    random_layer,
    reference,
    rows_per_chunk,
)
from processes import assert_same_bits, in_processes, part_of
from torch.nn.functional import linear

import liger


def check(rank, world, what, tensors, target, bounds=None, layout=None, **chosen):
    """Losses and gradients of the op in parts are as exact as of the whole op, and the same
    everywhere."""
    layout = {"vocab_size": tensors[1].shape[0]} if layout is None else layout
    plan = {k: chosen.pop(k) for k in ("memory_budget", "accum_dtype") if k in chosen}
    parts = [leaves(tensors[0])[0], *(part_of(t, rank, world, bounds) for t in tensors[1:])]
    whole, exact = leaves(*tensors), leaves(*(t.double() for t in tensors))
    loss = in_shards.fused_linear_ce(*parts[:2], target, *parts[2:], **layout, **plan, **chosen)
    losses = (
        loss,
        liger.fused_linear_ce(*whole[:2], target, *whole[2:], **plan, **chosen),
        reference(linear(*exact), target, **chosen)["loss"],
    )
    upstream = torch.rand(loss.shape) + 0.5
    rounding = max(2 * LARGEST_LSE, logit_rounding(tensors[0].dtype))
    assert_as_exact_as_torch(*losses, f"{what}: loss", rounding)
    assert_same_bits(loss, f"{what}: loss")
    for value in losses:
        value.backward(upstream.to(value.dtype))
    assert_same_bits(parts[0].grad, f"{what}: gradient of input")
    assert_as_exact_as_torch(parts[0].grad, whole[0].grad, exact[0].grad, f"{what}: input", rounding)
    for i, name in ((1, "weight"), (2, "bias"))[: len(tensors) - 1]:
        mine, other, best = (
            parts[i].grad,
            *(part_of(t.grad, rank, world, bounds) for t in (whole[i], exact[i])),
        )
        # Relative to the largest gradient of all parts, as an error in any of them would be.
        scale = exact[i].grad.abs().max().clamp_min(1e-30)
        pad = torch.full_like(best[:1], scale.item())
        assert_as_exact_as_torch(
            *(torch.cat([t, pad.to(t.dtype)]) for t in (mine, other, best)), f"{what}: {name}", rounding
        )


# --- equal to the whole op ----------------------------------------------------------------------------------


@in_processes(2)
def test_every_option(rank, world):
    """Two parts of 65 and 64 classes, in several chunks."""
    cases = itertools.product(OPTIONS, ("mean", "sum", "none"), (torch.float32, torch.bfloat16))
    for i, (name, reduction, dtype) in enumerate(cases):
        torch.manual_seed(i)
        chosen = options(name, 13, 129, "cpu", reduction)
        *tensors, target = random_layer(
            13, 24, 129, "cpu", dtype, ignore_index=chosen.get("ignore_index", -100)
        )
        budget = rows_per_chunk(4, tensors[1]) // world
        what = f"{name}, {reduction}, {dtype}"
        check(rank, world, what, tensors[: 2 + i % 2], target, memory_budget=budget, **chosen)


@in_processes(2)
def test_every_option_over_given_logits(rank, world):
    for i, (name, reduction) in enumerate(itertools.product(OPTIONS, ("mean", "sum", "none"))):
        torch.manual_seed(i)
        for dtype in (torch.float32, torch.bfloat16):
            chosen = options(name, 13, 129, "cpu", reduction)
            x, weight, _, target = random_layer(
                13, 24, 129, "cpu", dtype, ignore_index=chosen.get("ignore_index", -100)
            )
            logits = x @ weight.t()
            mine, whole = part_of(logits, rank, world, dim=1), leaves(logits)[0]
            exact = leaves(logits.double())[0]
            losses = (
                in_shards.cross_entropy(mine, target, vocab_size=129, **chosen),
                liger.cross_entropy(whole, target, **chosen),
                reference(exact, target, **chosen)["loss"],
            )
            what = f"{name}, {reduction}, {dtype}"
            assert_as_exact_as_torch(*losses, what, 2 * LARGEST_LSE)
            assert_same_bits(losses[0], what)
            upstream = torch.rand(losses[0].shape) + 0.5
            for value in losses:
                value.backward(upstream.to(value.dtype))
            grads = (mine.grad, *(part_of(t.grad, rank, world, dim=1) for t in (whole, exact)))
            assert_as_exact_as_torch(*grads, f"{what}: gradient", 2 * LARGEST_LSE)


@in_processes(3)
def test_uneven_parts_and_other_groups(rank, world):
    *tensors, target = random_layer(11, 8, 10, "cpu")
    check(rank, world, "4, 4 and 2 classes", tensors, target)
    bounds = (0, 1, 8, 10)
    first = {"vocab_start": bounds[rank], "vocab_size": 10}
    check(rank, world, "1, 7 and 2 classes", tensors, target, bounds, first, memory_budget=200)
    *tensors, target = random_layer(11, 8, 9, "cpu")
    check(rank, world, "3 classes each", tensors, target, layout={})
    # A group that does not hold this process: refused there, and the others need not wait.
    pair = dist.new_group([0, 2])
    if rank == 1:
        with pytest.raises(RuntimeError, match=r"this process is no member of the group of ranks \[0, 2\]"):
            in_shards.fused_linear_ce(tensors[0], tensors[1], target, group=pair)
    else:
        weight = part_of(tensors[1][:8], rank // 2, 2)
        loss = in_shards.fused_linear_ce(tensors[0], weight, target.clamp(max=7), group=pair)
        whole = liger.fused_linear_ce(tensors[0], tensors[1][:8], target.clamp(max=7))
        torch.testing.assert_close(loss, whole, rtol=1e-6, atol=1e-6)


@in_processes(1)
def test_a_group_of_one_process(rank, world):
    *tensors, target = random_layer(11, 8, 33, "cpu")
    for dtype in (torch.float32, torch.bfloat16):
        cast = [t.to(dtype) for t in tensors]
        check(rank, world, f"one process, {dtype}", cast, target, layout={}, memory_budget=300)


@in_processes(2)
def test_chunks(rank, world):
    from liger.distributed.vocab import cross_entropy

    # Halves of a chunk take turns: from twice the rows of full speed on.
    quarters = [slice(0, 2251), slice(2251, 4502), slice(4502, 6753), slice(6753, 9001)]
    assert cross_entropy._chunks(9001, 4501, 2) == (quarters, 2)
    assert cross_entropy._chunks(6000, 3000, 2) == ([slice(0, 3000), slice(3000, 6000)], 1)
    assert cross_entropy._chunks(0, 0, 0) == ([], 1)
    for dtype in (torch.float32, torch.bfloat16):
        *tensors, target = random_layer(9001, 6, 10, "cpu", dtype)
        budget = 4600 * 16 * (2 if dtype == torch.float32 else 1)
        check(rank, world, f"two in flight, {dtype}", tensors, target, memory_budget=budget)
    *tensors, target = random_layer(300, 6, 10, "cpu", torch.bfloat16)
    for accum_dtype in (torch.float32, torch.bfloat16):
        plan = {"memory_budget": 1600, "accum_dtype": accum_dtype}
        check(rank, world, f"summed in {accum_dtype}", tensors, target, **plan)
    # Logits in the memory of the weight gradient, whose sum is a separate buffer.
    *tensors, target = random_layer(5000, 2304, 10, "cpu", torch.bfloat16)
    check(rank, world, "logits in grad_weight", tensors, target, memory_budget=4096)


@in_processes(2)
def test_ignored_and_empty_batches(rank, world):
    x, weight, _, target = random_layer(7, 8, 12, "cpu")
    ignored = torch.full_like(target, -100)
    for reduction, expected in (("sum", 0.0), ("none", 0.0), ("mean", torch.nan)):
        mine = [leaves(x)[0], part_of(weight, rank, world)]
        loss = in_shards.fused_linear_ce(*mine, ignored, reduction=reduction)
        assert torch.equal(loss.nan_to_num(7.0), torch.full_like(loss, expected).nan_to_num(7.0))
        loss.sum().backward()
        assert not mine[0].grad.any() and not mine[1].grad.any()
    # Targets of one part only, and no rows at all.
    check(rank, world, "targets of rank 0", [x, weight], target.clamp(-100, 5))
    mine = [x[:0].clone().requires_grad_(), part_of(weight, rank, world)]
    loss = in_shards.fused_linear_ce(*mine, target[:0], reduction="sum")
    loss.backward()
    assert loss == 0 and mine[0].grad.shape == (0, 8) and not mine[1].grad.any()
    # Frozen tensors get no gradient, the others the same one.
    for trained in ((True, False), (False, True)):
        mine = [x.clone().requires_grad_(trained[0]), part_of(weight, rank, world).requires_grad_(trained[1])]
        in_shards.fused_linear_ce(*mine, target, memory_budget=200).backward()
        full = leaves(x, weight)
        liger.fused_linear_ce(*full, target).backward()
        for t, want, value in zip(
            mine, trained, (full[0].grad, part_of(full[1].grad, rank, world)), strict=True
        ):
            if want:
                torch.testing.assert_close(t.grad, value, rtol=1e-5, atol=1e-6)
            else:
                assert t.grad is None
    # Classes whose logits are -inf on a whole process.
    logits = x @ weight.t()
    logits[:, :6] = -torch.inf
    mine, whole = part_of(logits, rank, world, dim=1), leaves(logits)[0]
    for values, function in ((mine, in_shards.cross_entropy), (whole, liger.cross_entropy)):
        function(values, target.clamp(min=6)).backward()
    torch.testing.assert_close(mine.grad, part_of(whole.grad, rank, world, dim=1).detach())


@in_processes(2)
def test_metrics_and_module(rank, world):
    chosen = options("all", 12, 40, "cpu")
    x, weight, bias, target = random_layer(12, 8, 40, "cpu", ignore_index=2)
    exact = reference(linear(x.double(), weight.double(), bias.double()), target, **chosen)
    shape = {"target": target.view(3, 4), "input": x.view(3, 4, 8)}
    chosen["token_weight"] = chosen["token_weight"].view(3, 4)
    mine = {"weight": part_of(weight, rank, world), "bias": part_of(bias, rank, world)}
    asked = {"metrics": ("z_loss", "logprobs")}
    output = in_shards.fused_linear_ce(**shape, **mine, **chosen, **asked)
    given = linear(shape["input"], mine["weight"], mine["bias"])
    for made in (output, in_shards.cross_entropy(given, shape["target"], **chosen, **asked)):
        assert made.token_accuracy is made.argmax is made.entropy is None
        assert made.logprobs.shape == (3, 4) and not made.logprobs.requires_grad
        for name in ("loss", "z_loss", "logprobs"):
            value = getattr(made, name)
            assert_same_bits(value, name)
            torch.testing.assert_close(value.double().view(-1), exact[name].view(-1), rtol=1e-5, atol=1e-5)
    module = liger.nn.FusedLinearCrossEntropyLoss(
        chosen["ce_weight"], group=dist.group.WORLD, ignore_index=2, label_smoothing=0.1, lse_square_scale=1e-2,
        softcap=8.0, metrics=("logprobs",),
    )  # fmt: skip
    arguments = (shape["input"], mine["weight"], shape["target"], mine["bias"])
    again = module(*arguments, token_weight=chosen["token_weight"])
    assert torch.equal(again.loss, output.loss) and torch.equal(again.logprobs, output.logprobs)


# --- processes without a class ------------------------------------------------------------------------------


@in_processes(2, 4)
def test_processes_without_a_class(rank, world):
    """A process may have no class: results and gradients agree with the whole op, whatever the option."""
    classes, rows = 9, 13
    first = (0, *(classes,) * world), {"vocab_size": classes, "vocab_start": 0 if rank == 0 else classes}
    chunks = (0, 3, 6, 9, 9), {"vocab_size": classes}
    layouts = [first, chunks] if world == 4 else [first]
    for (bound, layout), dtype in itertools.product(layouts, (torch.float32, torch.bfloat16)):
        for i, (name, reduction) in enumerate(itertools.product(OPTIONS, ("mean", "none"))):
            torch.manual_seed(i)
            chosen = options(name, rows, classes, "cpu", reduction)
            *tensors, target = random_layer(
                rows, 24, classes, "cpu", dtype, ignore_index=chosen.get("ignore_index", -100)
            )
            what = f"{name}, {reduction}, {dtype}, {layout}"
            check(rank, world, what, tensors[: 2 + i % 2], target, bound, layout, memory_budget=300, **chosen)
            logits = (tensors[0] @ tensors[1].t()).detach()
            mine, whole = part_of(logits, rank, world, bound, dim=1), leaves(logits)[0]
            losses = (
                in_shards.cross_entropy(mine, target, **layout, **chosen).sum(),
                liger.cross_entropy(whole, target, **chosen).sum(),
            )
            torch.testing.assert_close(*losses, rtol=1e-5, atol=1e-6)
            torch.autograd.backward(losses)
            expected = part_of(whole.grad, rank, world, bound, dim=1)
            torch.testing.assert_close(mine.grad, expected.detach(), rtol=2e-2, atol=1e-5)
        for logits_dtype, biased in itertools.product((None, torch.float32), (False, True)):
            *tensors, target = random_layer(rows, 24, classes, "cpu", dtype)
            tensors = tensors[: 2 + biased]
            flags = {"metrics": ("entropy", "argmax", "log_sum_sq_probs", "mean_logits")}
            whole = leaves(*tensors)
            mine = [leaves(tensors[0])[0], *(part_of(t, rank, world, bound) for t in tensors[1:])]
            calls = (
                in_shards.fused_linear_logprobs(
                    *mine[:2],
                    target,
                    *mine[2:],
                    logits_dtype=logits_dtype,
                    memory_budget=300,
                    **layout,
                    **flags,
                ),
                liger.fused_linear_logprobs(
                    *whole[:2], target, *whole[2:], logits_dtype=logits_dtype, **flags
                ),
            )
            tolerance = 1e-5 if dtype == torch.float32 or logits_dtype else 3e-2
            for actual, expected in zip(*calls, strict=True):
                torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)
            for found in calls:
                (found.logprobs.square().sum() + found.entropy.square().sum()).backward()
            wanted = [whole[0].grad, *(part_of(t.grad, rank, world, bound).detach() for t in whole[1:])]
            for actual, expected in zip((t.grad for t in mine), wanted, strict=True):
                torch.testing.assert_close(
                    actual, expected, rtol=3e-2, atol=3e-2 if dtype != torch.float32 else 1e-5
                )
