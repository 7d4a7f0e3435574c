# SPDX-License-Identifier: BSD-3-Clause
"""The arguments and the help of each command; ``liger.cli`` has the modules that run them."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from .arguments import budget, capability, positive, size
from .demo_sizes import SIZES
from .devices import DEFAULT_OPTIMIZER, GPUS, OPTIMIZERS

# Names of dtypes, as ``liger plan`` takes them.
DTYPES = {
    "bf16": "bfloat16",
    "bfloat16": "bfloat16",
    "fp16": "float16",
    "float16": "float16",
    "fp32": "float32",
    "float32": "float32",
}


class Command(NamedTuple):
    """A command: a line about it, the text above its options, and what adds these to its parser."""

    summary: str
    description: str
    add_arguments: Callable[[argparse.ArgumentParser], None]


INFO = """\
Versions, devices, the build, the backend of each public function with the reason for it, and
environment variables."""


def _info(parser):
    parser.add_argument("--json", action="store_true", help="print it as JSON")


PLAN = """\
The chunks of fused_linear_ce for a batch, and the memory of the lm_head with and without it.

The numbers are for one training step of an lm_head without bias and its loss, in addition to weights and activations.

Without liger: the larger of the two peaks of the Hugging Face causal-LM loss in eager PyTorch. Backward of log_softmax:
log-probabilities, their gradient and the gradient of the logits, all in float32, 12 bytes per logit for every dtype
(plus the logits, if the caller still refers to the model's output). Backward of the linear layer: the gradients of the
logits, of the hidden states and of the weight.

With liger: the logits of one chunk, which their gradient overwrites; the float32 sum of the weight gradient, if there
is one; the gradients of the hidden states and of the weight. With a float32 sum, the logits of a chunk are freed before
the weight gradient is allocated.

GPUs of compute capability 9.0 use the wgmma engine for bfloat16 and float16, at least 256 rows, and hidden sizes
divisible by 16. It stores exponentials instead of logits. Its first chunk is larger than the others, because most of
its exponentials use the memory of the weight gradient. The sum over chunks uses the same memory, in float16 with block
scales in a separate buffer. Its working memory is a copy of the rows of a chunk, numbers per row and class, shifts per
row with float16, and the float32 sums of split-K of the input gradient, unless they fit into gradients that are not
written yet.

fused_linear_logprobs takes three GEMMs where this engine keeps the exponentials of all rows from the forward to the
backward, because they fit the budget, and four elsewhere.

With --model: what the decoder layers of a patched model save for the backward, in bytes per token, by part and tensor:
with liger.patch(model), and with liger.patch(model, recompute=True). Assumed are trained weights, no autocast, no
checkpointing, use_cache=False, and an attention kernel that saves q, k, v, its output and the logarithms of its sums.

With --length also what fits into --memory, or into a --gpu with 8 percent left free: for each way to recompute layers
the largest batch of sequences of that length, the peak of its step on one GPU, what waits in host memory, and with
--gpu about how many tokens a second it trains, where the host keeps up. With --tokens instead: a step of that size.
liger.transformers.checkpoint chooses among checkpoints, attention that is kept, and offload; gradients are released by
liger.transformers.release_gradients. All weights train, in --dtype, or with --lora float32 adapters on all linear
layers.
"""


def _plan(parser):
    parser.add_argument(
        "--tokens",
        type=size(2**40),
        help="rows of the batch: batch size x sequence length, for example 8192 or 8K (powers of 1024)",
    )
    parser.add_argument("--hidden", type=size(2**31), help="hidden size of the model")
    parser.add_argument("--vocab", type=size(2**31), help="size of the vocabulary")
    parser.add_argument(
        "--model",
        metavar="NAME_OR_CONFIG",
        help="instead of the lm_head: what the decoder layers of a patched model save for the backward, in bytes per"
        " token; a model of the Hub, a folder or a config.json. With --length, --tokens a step of it",
    )
    parser.add_argument(
        "--length",
        type=size(2**28),
        help="with --model: tokens of a sequence, for example 8192 or 8K; plans the largest batch that fits",
    )
    parser.add_argument(
        "--memory",
        type=size(2**50, "a number of bytes"),
        help="bytes that a step may allocate at its peak, for example 60G (default: 92 percent of the --gpu's)",
    )
    parser.add_argument(
        "--gpu", type=str.lower, choices=list(GPUS), help="for its memory, and its speed with 16 bits"
    )
    parser.add_argument(
        "--optimizer",
        choices=list(OPTIMIZERS),
        help=f"by its name in transformers' TrainingArguments(optim=) (default: {DEFAULT_OPTIMIZER})",
    )
    parser.add_argument(
        "--lora", type=positive, metavar="RANK", help="adapters on all linear layers, and frozen weights"
    )
    parser.add_argument(
        "--dtype", choices=list(DTYPES), default="bf16", help="of logits and weight (default: bf16)"
    )
    parser.add_argument(
        "--budget",
        type=budget,
        help="bytes for the logits of a chunk, for example 256M (default: LIGER_MEMORY_BUDGET, else 512M)",
    )
    parser.add_argument(
        "--accum",
        choices=["fp32", "same"],
        help="how the weight gradient is summed over chunks: in float32, or in its own dtype (default: fp32)",
    )
    parser.add_argument(
        "--capability",
        type=capability,
        metavar="X.Y",
        help="compute capability of the GPU, for example 9.0 (default: the current device's; without a device, any"
        " but 9.0)",
    )
    parser.add_argument("--json", action="store_true", help="print it as JSON")


DEMO = """\
Trains the same Llama on the same text twice, unpatched and patched with one line of liger, and compares the losses
of every step, tokens per second and peak memory.

The text is the source code of Python's standard library, and the tokenizer is trained on it: nothing is downloaded.
Each model trains in a separate process, from the same weights and data. A third, unpatched run starts from weights
that differ by one rounding each. Its losses show the effect of rounding alone, which limits the difference allowed for
liger. Tokens per second on a CPU that has other work to do are noise.
Exit code: 0; 1 if a run fails or the losses disagree; 2 if a required package is missing.
"""


def _demo(parser):
    size = parser.add_mutually_exclusive_group()
    size.add_argument(
        "--size",
        choices=list(SIZES),
        help="of the model: tiny, cpu (a few million parameters), gpu (Llama-3.2-1B's shape); default: by the device",
    )
    size.add_argument(
        "--quick", action="store_true", help="the tiny size: one to two minutes on two CPU cores"
    )
    parser.add_argument("--steps", type=positive, help="training steps (default: by the size)")
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("demo-output"),
        help="folder for demo.png and results.json (demo-output)",
    )


COMMANDS = {
    "info": Command("versions, devices, what was built, and which backend serves each function", INFO, _info),
    "plan": Command("memory of a step of a model, or of the lm_head and its chunks", PLAN, _plan),
    "demo": Command("train a Llama with and without liger on this machine and compare", DEMO, _demo),
}
