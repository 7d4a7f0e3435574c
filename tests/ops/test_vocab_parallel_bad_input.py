"""What the ops over a vocabulary in parts refuse, with the same words on every process or before they meet."""

import re

import pytest
import torch
from cross_entropy_reference import random_layer
from processes import needs_gloo, on_processes, part_of

import liger


def _bad_input(rank, world):
    x, weight, bias, target = random_layer(9, 8, 34, "cpu")
    mine = part_of(weight, rank, world)

    def refuses(match, *arguments, function=liger.vocab_parallel_fused_linear_ce, **options):
        with pytest.raises(RuntimeError, match=match):
            function(*arguments, **options)

    expected = 18 if rank == 0 else 17
    refuses(f"weight has 17 classes, expected {expected} on rank {rank} of 2 for a vocab_size of 35" if rank == 0
            else "target at row", x, mine, target.clamp(min=40), vocab_size=35 if rank == 0 else None)  # fmt: skip
    refuses("which leaves no class to the last of 2", x, mine[:1], target, vocab_size=1)
    refuses("vocab_start was given without vocab_size", x, mine, target, vocab_start=0)
    refuses("vocab_start is 20, expected weight with its 17 classes", x, mine, target, vocab_start=20,
            vocab_size=34)  # fmt: skip
    refuses("target at row 0 is 34, expected 0 <= target < 34", x, mine, torch.full_like(target, 34))
    refuses(r"ce_weight has shape \(17,\), expected \(34,\)", x, mine, target, ce_weight=torch.ones(17))
    refuses("ce_weight has dtype torch.int64", x, mine, target, ce_weight=torch.ones(34).long())
    refuses(r"bias has shape \(34,\), expected \(17,\)", x, mine, target, bias)
    refuses(r"weight has shape \(17,\)", x, mine[:, 0], target)
    refuses("reduction is 'max'", x, mine, target, reduction="max")
    refuses("logits has 17 classes, expected", x @ mine.t(), target, vocab_size=30,
            function=liger.vocab_parallel_cross_entropy)  # fmt: skip
    _names_in_messages(x, mine, bias, target)
    with pytest.raises(ValueError, match="metric 'entropy' needs all classes in one process"):
        liger.nn.VocabParallelFusedLinearCrossEntropyLoss(metrics=("entropy",))


def _names_in_messages(x, weight, bias, target):
    """Each op appears under the name by which it was called, and not under that of its form for one process."""
    logits, wide = x @ weight.t(), {"ignore_index": 2**32 + 3}
    meta, no_class = torch.empty(9, device="meta"), "has no classes, expected at least one"
    ops = {
        liger.vocab_parallel_fused_linear_ce: [
            ("weight has shape (17, 7)", (x, weight[:, :7], target), {}),
            (f"weight {no_class}", (x, weight[:0], target), {}),
            (f"weight {no_class}", (x, weight[:0], target), {"vocab_start": 3, "vocab_size": 34}),
            ("weight has dtype float64", (x, weight.double(), target), {}),
            ("weight is on meta", (x, weight.to("meta"), target), {}),
            ("target has shape (8,)", (x, weight, target[:8]), {}),
            ("target has dtype float32", (x, weight, target.float()), {}),
            ("bias has shape (34,)", (x, weight, target, bias), {}),
            ("accum_dtype is float16", (x, weight, target), {"accum_dtype": torch.float16}),
            ("token_weight has shape (3,)", (x, weight, target), {"token_weight": torch.ones(3)}),
            ("token_weight is on meta", (x, weight, target), {"token_weight": meta}),
            ("denominator has shape (2,)", (x, weight, target), {"denominator": torch.ones(2)}),
            ("denominator was given", (x, weight, target), {"denominator": 2.0, "reduction": "none"}),
            ("ignore_index is 4294967299, expected a value of int32", (x, weight, target.int()), wide),
        ],
        liger.vocab_parallel_cross_entropy: [
            (f"logits {no_class}", (logits[:, :0], target), {}),
            ("target has shape (8,)", (logits, target[:8]), {}),
            ("target is on cpu", (logits.to("meta"), target), {}),
            ("token_weight is on meta", (logits, target), {"token_weight": meta}),
            ("ignore_index is 4294967299, expected a value of int32", (logits, target.int()), wide),
        ],
        liger.vocab_parallel_fused_linear_logprobs: [
            ("weight has shape (17, 7)", (x, weight[:, :7], target), {}),
            (f"weight {no_class}", (x, weight[:0], target), {}),
            ("weight is on meta", (x, weight.to("meta"), target), {}),
            ("targets has shape (8,)", (x, weight, target[:8]), {}),
            ("ignore_index is 4294967299, expected a value of int32", (x, weight, target.int()), wide),
        ],
    }  # fmt: skip
    for function, calls in ops.items():
        for words, arguments, options in calls:
            with pytest.raises(RuntimeError, match=f"^{re.escape(f'{function.__name__}: {words}')}"):
                function(*arguments, **options)
        with pytest.raises(
            TypeError, match=f"^{function.__name__}: group is 3, expected a process group or None$"
        ):
            function(*calls[0][1], group=3)


@needs_gloo
def test_bad_input(tmp_path):
    on_processes(tmp_path, _bad_input)


def test_without_a_process_group():
    x, weight, _, target = random_layer(9, 8, 34, "cpu")
    with pytest.raises(RuntimeError, match="has no process group: call init_process_group first"):
        liger.vocab_parallel_fused_linear_ce(x, weight, target)
