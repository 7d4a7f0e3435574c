# SPDX-License-Identifier: BSD-3-Clause
"""What the ops over a vocabulary in parts refuse, with the same words on every process or before they
meet."""

import re

import in_shards
import pytest
import torch
from cross_entropy_reference import random_layer
from errors import error_about
from processes import in_processes, part_of
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import liger


@in_processes(2, slow=False)
def test_bad_input(rank, world):
    x, weight, bias, target = random_layer(9, 8, 34, "cpu")
    mine = part_of(weight, rank, world)

    def refuses(match, *arguments, function=in_shards.fused_linear_ce, **options):
        with pytest.raises(error_about(match), match=match):
            function(*arguments, **options)

    expected = 18 if rank == 0 else 17
    refuses(f"weight has 17 classes, expected {expected} on rank {rank} of 2 for a vocab_size of 35" if rank == 0
            else "target at row", x, mine, target.clamp(min=40), vocab_size=35 if rank == 0 else None)  # fmt: skip
    refuses("rank 1 of 2 raised: weight has 1 classes, expected 0 on rank 1" if rank == 0 else
            "weight has 1 classes, expected 0 on rank 1 of 2", x, mine[:1], target * 0, vocab_size=1)  # fmt: skip
    refuses("vocab_size is 0, expected at least 1", x, mine[:0], target, vocab_size=0)
    refuses("vocab_start was given without vocab_size", x, mine, target, vocab_start=0)
    refuses("vocab_start is 20, expected weight with its 17 classes", x, mine, target, vocab_start=20,
            vocab_size=34)  # fmt: skip
    refuses("ce_weight has dtype int64", x, mine, target, ce_weight=torch.ones(34).long())
    refuses(r"bias has shape \(34,\), expected \(17,\)", x, mine, target, bias)
    refuses("logits has 17 classes, expected", x @ mine.t(), target, vocab_size=30,
            function=in_shards.cross_entropy)  # fmt: skip
    _names_in_messages(x, mine, bias, target)
    with pytest.raises(ValueError, match="metrics has 'entropy', which needs all classes in one process"):
        in_shards.fused_linear_ce(x, mine, target, metrics=("entropy",))
    for option in ({"accumulate_grad_weight": True}, {"lora_a": mine, "lora_b": mine}):
        with pytest.raises(ValueError, match=f"fused_linear_ce: {next(iter(option))} was given with a group"):
            in_shards.fused_linear_ce(x, mine, target, **option)
    with pytest.raises(ValueError, match="fused_linear_logprobs: recompute was given with a group"):
        in_shards.fused_linear_logprobs(x, mine, target, recompute=True)


def _bad_calls(x, weight, bias, target):
    """{function: (a valid call, [(what the message begins with, arguments, options)])} of a process with 17
    of 34 classes."""
    logits, wide = x @ weight.t(), {"ignore_index": 2**32 + 3}
    meta, no_class = torch.empty(9, device="meta"), "has no classes, expected at least one without vocab_size"
    return {
        in_shards.fused_linear_ce: ((x, weight, target), [
            ("weight has shape (17, 7)", (x, weight[:, :7], target), {}),
            (f"weight {no_class}", (x, weight[:0], target), {}),
            ("weight has dtype float64", (x, weight.double(), target), {}),
            ("weight is on meta", (x, weight.to("meta"), target), {}),
            ("target has shape (8,)", (x, weight, target[:8]), {}),
            ("target has dtype float32", (x, weight, target.float()), {}),
            ("target at row 0 is 34", (x, weight, torch.full_like(target, 34)), {}),
            ("bias has shape (5,)", (x, weight, target, bias[:5]), {}),
            ("accum_dtype is float16", (x, weight, target), {"accum_dtype": torch.float16}),
            ("ce_weight has shape (17,)", (x, weight, target), {"ce_weight": torch.ones(17)}),
            ("token_weight has shape (3,)", (x, weight, target), {"token_weight": torch.ones(3)}),
            ("token_weight is on meta", (x, weight, target), {"token_weight": meta}),
            ("denominator has shape (2,)", (x, weight, target), {"denominator": torch.ones(2)}),
            ("denominator was given", (x, weight, target), {"denominator": 2.0, "reduction": "none"}),
            ("ignore_index is 4294967299, expected a value of int32", (x, weight, target.int()), wide),
        ]),
        in_shards.cross_entropy: ((logits, target), [
            (f"logits {no_class}", (logits[:, :0], target), {}),
            ("target has shape (8,)", (logits, target[:8]), {}),
            ("target at row 0 is 34", (logits, torch.full_like(target, 34)), {}),
            ("target is on cpu", (logits.to("meta"), target), {}),
            ("token_weight is on meta", (logits, target), {"token_weight": meta}),
            ("ignore_index is 4294967299, expected a value of int32", (logits, target.int()), wide),
        ]),
        in_shards.fused_linear_logprobs: ((x, weight, target), [
            ("weight has shape (17, 7)", (x, weight[:, :7], target), {}),
            (f"weight {no_class}", (x, weight[:0], target), {}),
            ("weight is on meta", (x, weight.to("meta"), target), {}),
            ("target has shape (8,)", (x, weight, target[:8]), {}),
            ("target at row 0 is 34", (x, weight, torch.full_like(target, 34)), {}),
            ("ignore_index is 4294967299, expected a value of int32", (x, weight, target.int()), wide),
        ]),
    }  # fmt: skip


def _names_in_messages(x, weight, bias, target):
    """Each op appears under the name by which it was called, and not under the name of its form for one
    process."""
    for function, (valid, calls) in _bad_calls(x, weight, bias, target).items():
        for words, arguments, options in calls:
            with pytest.raises(error_about(words), match=f"^{re.escape(f'{function.__name__}: {words}')}"):
                function(*arguments, **options)
        with pytest.raises(
            TypeError, match=f"^{function.__name__}: group is 3, expected a process group or None$"
        ):
            function(*valid, group=3)


def test_without_a_process_group():
    x, weight, _, target = random_layer(9, 8, 34, "cpu")
    with pytest.raises(RuntimeError, match="has no process group: call init_process_group first"):
        in_shards.fused_linear_ce(x, weight, target, vocab_size=34)


# --- an error on one process --------------------------------------------------------------------------------


def _fails_on_one(rank, world):
    """An error on one process is one on all of them, which name it, and none of them waits."""
    x, weight, bias, target = random_layer(9, 8, 17 * world, "cpu")
    weight, target = part_of(weight, rank, world), target.clamp(max=33)
    for function, (valid, calls) in _bad_calls(x, weight, bias, target).items():
        name, expected = function.__name__, function(*valid)
        calls = [
            *calls,
            ("softcap is 'soft', expected", valid, {"softcap": "soft"}),
            ("target", (*valid[:-1], 3), {}),
        ]
        for number, (words, arguments, options) in enumerate(calls):
            wrong = number % world
            text = words if rank == wrong else f"rank {wrong} of {world} raised: {words}"
            if "target at row" in words:
                arguments = *arguments[:-1], torch.full_like(target, 17 * world)
                text = re.sub("34$", str(17 * world), text)
            error = error_about(words) if rank == wrong else RuntimeError
            with pytest.raises((error, TypeError), match=f"^{re.escape(f'{name}: {text}')}"):
                function(*(arguments if rank == wrong else valid), **(options if rank == wrong else {}))
            assert torch.equal(function(*valid), expected)
    # The same with a DTensor, and by the module.
    sharded = distribute_tensor(bias.new_zeros(17 * world, 8), init_device_mesh("cpu", (world,)), [Shard(0)])
    module = liger.nn.FusedLinearCrossEntropyLoss()
    for call in (in_shards.fused_linear_ce, in_shards.fused_linear_logprobs, module):
        wrong = world - 1
        with pytest.raises(
            RuntimeError, match=".*" if rank == wrong else f"rank {wrong} of {world} raised: "
        ):
            call(x[:, :7] if rank == wrong else x, sharded, target)


def _differ(rank, world):
    """What has to be the same on all processes is not: all of them say what."""
    x, weight, _, target = random_layer(9, 8, 17 * world, "cpu")
    weight, last = part_of(weight, rank, world), rank == world - 1
    frozen, ignored = weight.detach(), torch.where(target == target[3], -100, target)
    logits, start = x @ frozen.t(), 17 * rank
    ce, plain, logprobs = in_shards.fused_linear_ce, in_shards.cross_entropy, in_shards.fused_linear_logprobs
    sizes = f"vocab_size is {17 * world} on rank 0 and {18 * world} on rank {world - 1} of {world}, expected the same"
    same, V = {"vocab_start": start, "vocab_size": 17 * world}, 17 * world
    for words, function, usual, odd, usual_options, odd_options in [
        (sizes, ce, (x, weight, target), (x, torch.cat([weight, weight[:1]]), target), {}, {}),
        (sizes, logprobs, (x, weight, target), (x, torch.cat([weight, weight[:1]]), target), {}, {}),
        (sizes, plain, (logits, target), (torch.cat([logits, logits[:, :1]], 1), target), {}, {}),
        ("the processes have the classes", ce, (x, weight, target), (x, weight[1:], target), same,
         same | {"vocab_start": start + 1}),
        ("the processes have the classes", plain, (logits, target), (logits, target), same, same | {"vocab_start": 0}),
        (f"vocab_size is {V} on rank 0 and {V + 1} on", ce, (x, weight, target), (x, weight, target), same,
         same | {"vocab_size": V + 1}),
        ("number of rows is 9 on rank 0 and 8", ce, (x, weight, target), (x[:8], weight, target[:8]), {}, {}),
        ("number of rows that are not ignored is", logprobs, (x, weight, target), (x, weight, ignored), {}, {}),
        ("dtype is torch.float32", logprobs, (x, weight, target), (x.half(), weight.half(), target), {}, {}),
        ("weight requires grad is True", ce, (x, weight, target), (x, frozen, target), {}, {}),
        ("reduction is mean on rank 0 and sum", plain, (logits, target), (logits, target), {}, {"reduction": "sum"}),
        ("softcap is None on rank 0 and 3.0", ce, (x, weight, target), (x, weight, target), {}, {"softcap": 3.0}),
        ("memory_budget is ", ce, (x, weight, target), (x, weight, target), {}, {"memory_budget": 1}),
        ("entropy is False on rank 0 and True", logprobs, (x, weight, target), (x, weight, target), {},
         {"metrics": ("entropy",)}),
    ]:  # fmt: skip
        with pytest.raises(RuntimeError, match=f"^{function.__name__}: {re.escape(words)}"):
            function(*(odd if last else usual), **(odd_options if last else usual_options))
    with pytest.raises(RuntimeError, match=": function is fused_linear_ce on rank 0 and "):
        (logprobs if last else ce)(x, weight, target)


@in_processes(2, pytest.param(4, marks=pytest.mark.slow), slow=False, timeout=120)
def test_errors_on_one_process(rank, world):
    _fails_on_one(rank, world)
    _differ(rank, world)
