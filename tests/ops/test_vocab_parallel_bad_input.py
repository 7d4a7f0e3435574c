"""What the ops over a vocabulary in parts refuse, with the same words on every process or before they meet."""

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
    with pytest.raises(ValueError, match="metric 'entropy' needs all classes in one process"):
        liger.nn.VocabParallelFusedLinearCrossEntropyLoss(metrics=("entropy",))


@needs_gloo
def test_bad_input(tmp_path):
    on_processes(tmp_path, _bad_input)


def test_without_a_process_group():
    x, weight, _, target = random_layer(9, 8, 34, "cpu")
    with pytest.raises(RuntimeError, match="has no process group: call init_process_group first"):
        liger.vocab_parallel_fused_linear_ce(x, weight, target)
