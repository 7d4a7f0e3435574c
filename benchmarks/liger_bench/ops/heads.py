# SPDX-License-Identifier: BSD-3-Clause
"""The lm_heads of current models with cross entropy, forward and backward: other sizes, dtypes and options
than fused_linear_ce.py, with every peer that takes them; then ``fused_linear_logprobs`` and heads
with LoRA. ``docs/lab/heads.md`` has floors and goals.

The ceiling is the three GEMMs by cuBLAS, with the vocabulary rounded down to a multiple of 128 classes:
cuBLAS takes several times as long for rows that are not aligned.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

import liger

from ..candidates import (
    Candidate,
    compiled,
    liger_kernel,
    liger_kernel_cute,
    ours,
    peer,
    providers,
    quack,
    selected,
)
from ..harness import Contest, normal, training_work
from ..heads import logprobs as head_logprobs
from ..heads import lora as head_lora
from ..heads import peers as head_peers
from ..heads.inputs import float32_reference, layer
from ..reports.goals import GEMMS, Goal
from .fused_linear_ce import cute_head, quack_head, torch_head

GOALS = (
    Goal("heads Llama-3.2-1B 8192x2048x128256", GEMMS, 1.03, 1070),
    Goal("heads Qwen3-4B 8192x2560x151936", GEMMS, 1.03),
    Goal("heads Qwen3-8B 8192x4096x151936", GEMMS, 1.00),
    Goal("heads Qwen3.5-2B 16384x2048x248320", GEMMS, 1.03),
    Goal("heads gemma-3-270m 8192x640x262144", GEMMS, 1.10, 900),
    Goal("heads gemma-3-1b 8192x1152x262144", GEMMS, 1.08, 1150),
    Goal("heads Qwen2.5-0.5B 8192x896x151936", GEMMS, 1.08, 800),
    Goal("heads gpt-oss-20b 8192x2880x201088", GEMMS, 1.04, 1900),
    Goal("heads Phi-3 8192x3072x32064", GEMMS, 1.00, 500),
    Goal("heads Llama-3.2-1B, one class more 8192x2048x128257", GEMMS, 1.06, 1100),
    Goal("heads Llama-3.2-1B 8192x2048x128256, float16", GEMMS, 1.00, 1100),
    Goal("heads gemma-2-2b 8192x2304x256000, softcap 30", GEMMS, 1.06, 1900),
    Goal("heads Llama-3.2-1B 8192x2048x128256, bias", GEMMS, 1.05, 1100),
    Goal("heads Llama-3.2-1B 8192x2048x128256, label smoothing 0.1", GEMMS, 1.04, 1100),
    Goal("heads Llama-3-8B 512x4096x128256", GEMMS, 1.03),
    Goal("heads Llama-3.2-1B 131072x2048x128256", GEMMS, 1.03),
    # The kept exponentials, the gradients, and 64 MiB.
    Goal("heads logprobs Llama-3.2-1B 8192x2048x128256, budget 2004 MiB", GEMMS, 1.06, 2004 + 533 + 64),
    Goal("heads logprobs Llama-3.2-1B 8192x2048x128256, default budget", GEMMS, 1.38, 1100),
    Goal(
        "heads logprobs Llama-3.2-1B 8192x2048x128256, budget 2004 MiB, temperature 0.7, entropy", GEMMS, 1.15
    ),
    Goal(
        "heads logprobs Llama-3.2-1B 8192x2048x128256, default budget, temperature 0.7, entropy", GEMMS, 1.48
    ),
)


@dataclass(frozen=True)
class Head:
    """The sizes of a head, and the options of its loss."""

    model: str
    tokens: int
    hidden: int
    vocabulary: int
    dtype: torch.dtype | None = None  # None: the dtype of the run
    bias: bool = False
    softcap: float | None = None
    label_smoothing: float = 0.0
    memory_budget: int | None = None  # bytes, of liger; other methods then have no part in the row

    @property
    def plain(self):
        return not (self.bias or self.softcap or self.label_smoothing)

    @property
    def name(self):
        parts = (
            str(self.dtype).removeprefix("torch.") if self.dtype else "",
            "bias" if self.bias else "",
            f"softcap {self.softcap:g}" if self.softcap else "",
            f"label smoothing {self.label_smoothing:g}" if self.label_smoothing else "",
            f"budget {self.memory_budget >> 20} MiB" if self.memory_budget else "",
        )
        size = f"{self.tokens}x{self.hidden}x{self.vocabulary}"
        return ", ".join((f"heads {self.model} {size}", *filter(None, parts)))


LLAMA = 2048, 128256
HEADS = (
    Head("Llama-3.2-1B", 8192, *LLAMA),
    Head("Qwen3-4B", 8192, 2560, 151936),
    Head("Qwen3-8B", 8192, 4096, 151936),
    Head("Qwen3.5-2B", 16384, 2048, 248320),
    Head("gemma-3-270m", 8192, 640, 262144),
    Head("gemma-3-1b", 8192, 1152, 262144),
    Head("Qwen2.5-0.5B", 8192, 896, 151936),
    Head("gpt-oss-20b", 8192, 2880, 201088),
    Head("Phi-3", 8192, 3072, 32064),
    Head("Llama-3.2-1B, one class more", 8192, 2048, 128257),
    Head("Llama-3.2-1B", 8192, *LLAMA, dtype=torch.float16),
    Head("gemma-2-2b", 8192, 2304, 256000, softcap=30.0),
    Head("Llama-3.2-1B", 8192, *LLAMA, bias=True),
    Head("Llama-3.2-1B", 8192, *LLAMA, label_smoothing=0.1),
    Head("Llama-3-8B", 512, 4096, 128256),
    Head("Llama-3.2-1B", 131072, *LLAMA),
    Head("Llama-3.2-1B", 131072, *LLAMA, memory_budget=2 << 30),
)
QUICK = HEADS[0], HEADS[4], HEADS[9]
TINY = (
    Head("tiny", 14, 16, 50),
    Head("tiny", 14, 24, 51, bias=True, softcap=5.0),
    Head("tiny", 14, 16, 50, label_smoothing=0.1),
    Head("tiny", 14, 16, 50, memory_budget=1 << 20),
)


def _logits(head, t):
    logits = F.linear(t["input"], t["weight"], t.get("bias"))
    return logits if head.softcap is None else head.softcap * torch.tanh(logits / head.softcap)


def _eager(head):
    return lambda t: F.cross_entropy(
        _logits(head, t).float(), t["target"], label_smoothing=head.label_smoothing
    )


def _ours(head):
    options = {
        "softcap": head.softcap,
        "label_smoothing": head.label_smoothing,
        "memory_budget": head.memory_budget,
    }
    return lambda t: liger.fused_linear_ce(t["input"], t["weight"], t["target"], t.get("bias"), **options)


def _liger_kernel(head, accum_dtype):
    # input, weight, target, bias, ce_weight, ignore_index, lse_square_scale, label_smoothing, reduction,
    # softcap, return_z_loss, accum_dtype
    options = None, -100, 0.0, head.label_smoothing, "mean", head.softcap, False, accum_dtype
    return lambda t: peer("liger_kernel.ops", "LigerFusedLinearCrossEntropyFunction").apply(
        t["input"], t["weight"], t["target"], t.get("bias"), *options
    )[0]


def _unsloth(head):
    options = {"softcap": head.softcap, "label_smoothing": head.label_smoothing}
    return lambda t: head_peers.unsloth_ce(t, **options)


def _quack(head):
    if head.bias or head.vocabulary % 8:
        # These its module computes from whole logits.
        return lambda t: peer("quack.linear_cross_entropy", "linear_cross_entropy_func")(
            t["input"], t["weight"], t.get("bias"), t["target"]
        )
    return lambda t: quack_head(t, 4096)


def _cut_cross_entropy(head):
    def run(t):
        # Version 25.1 has no bias.
        bias = {"bias": t["bias"]} if "bias" in t else {}
        return peer("cut_cross_entropy", "linear_cross_entropy")(
            t["input"], t["weight"], t["target"], softcap=head.softcap, **bias
        )

    return run


def _candidates(options, head):
    if head.memory_budget:
        return selected(options, ours(options, _ours(head)))
    candidates = [
        *ours(options, _ours(head)),
        liger_kernel(_liger_kernel(head, None)),
        liger_kernel(_liger_kernel(head, torch.float32), " fp32 sum"),
        head_peers.unsloth(_unsloth(head)),
        *compiled(options, _eager(head)),
    ]
    if not head.label_smoothing:
        candidates += [
            head_peers.trl(lambda t: -head_peers.trl_logprobs(t, softcap=head.softcap).mean()),
            Candidate("cut-cross-entropy", _cut_cross_entropy(head), needs=("cut_cross_entropy",)),
        ]
        if not head.softcap:
            candidates.append(quack(_quack(head)))
    if head.plain:
        candidates.append(liger_kernel_cute(cute_head))
        if hasattr(F, "linear_cross_entropy"):
            candidates.append(Candidate("torch F.linear_cross_entropy", torch_head))
    return selected(options, candidates)


def _row(options, head):
    dtype = options.dtype if head.dtype is None else head.dtype

    def inputs():
        made = layer(options, head.tokens, head.hidden, head.vocabulary)
        if head.bias:
            made["bias"] = normal(options, head.vocabulary, std=0.5)
        return {name: t.to(dtype) if t.is_floating_point() else t for name, t in made.items()}

    leaves = ("input", "weight", "bias") if head.bias else ("input", "weight")
    contestants = providers(_candidates(options, head), training_work, (), leaves)
    contests = () if head.memory_budget else (Contest(label="it sums dW in bfloat16"),)
    return head_logprobs.head_row(
        head, inputs, contestants, float32_reference(_eager(head), leaves), contests=contests, work="heads"
    )


def rows(options):
    for head in options.pick(HEADS, QUICK, TINY):
        yield _row(options, head)
    yield from head_logprobs.rows(options)
    yield from head_lora.rows(options)
