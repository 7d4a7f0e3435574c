# SPDX-License-Identifier: BSD-3-Clause
"""Rows of an lm_head with LoRA for ops/heads.py: the weight is frozen, its low-rank term trains."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

import liger

from ..candidates import Candidate, compiled, ours, providers, selected
from ..harness import FASTEST, normal, training_work
from .inputs import WEIGHT_STD, float32_reference, layer
from .logprobs import head_row

SCALE = 2.0
LEAVES = ("input", "lora_a", "lora_b")


@dataclass(frozen=True)
class LoraHead:
    """The sizes of a head and the rank of its term."""

    model: str
    tokens: int
    hidden: int
    vocabulary: int
    rank: int

    @property
    def name(self):
        return f"heads LoRA {self.model} {self.tokens}x{self.hidden}x{self.vocabulary}, rank {self.rank}"


HEADS = (LoraHead("Llama-3.2-1B", 8192, 2048, 128256, 16),)
TINY = (LoraHead("tiny", 14, 16, 50, 4),)


def _ours(t):
    return liger.fused_linear_ce(
        t["input"], t["weight"], t["target"], lora_a=t["lora_a"], lora_b=t["lora_b"], lora_scale=SCALE
    )


def _merged(t):
    """The loss of a dense weight ``W + s B A``, whose gradient is dense, too."""
    return liger.fused_linear_ce(
        t["input"], torch.addmm(t["weight"], t["lora_b"], t["lora_a"], alpha=SCALE), t["target"]
    )


def _eager(t):
    term = F.linear(F.linear(t["input"], t["lora_a"]), t["lora_b"])
    return F.cross_entropy((F.linear(t["input"], t["weight"]) + SCALE * term).float(), t["target"])


def _row(options, head):
    def inputs():
        return {
            **layer(options, head.tokens, head.hidden, head.vocabulary),
            "lora_a": normal(options, head.rank, head.hidden, std=head.hidden**-0.5),
            "lora_b": normal(options, head.vocabulary, head.rank, std=WEIGHT_STD / 4),
        }

    candidates = [
        *ours(options, _ours),
        *(
            Candidate(f"{c.name}, merged weight", _merged, "op alone", c.context)
            for c in ours(options, _merged)
        ),
        *compiled(options, _eager),
    ]
    contestants = providers(selected(options, candidates), training_work, (), LEAVES)
    return head_row(
        head, inputs, contestants, float32_reference(_eager, LEAVES), contests=(FASTEST,), work="heads LoRA"
    )


def rows(options):
    for head in options.pick(HEADS, (), TINY):
        yield _row(options, head)
