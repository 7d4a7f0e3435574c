"""How fused_linear_ce cuts a batch into chunks, and the memory of the head with and without it.

What is counted, for one training step of an lm_head without bias and its loss, beside the weights and activations that
both need anyway. Without liger: the two moments at which the Hugging Face causal-LM loss needs most in eager PyTorch.
In the backward of log_softmax: in float32 the log-probabilities, their gradient and the gradient of the logits, 12
bytes per logit whatever the dtype (and the logits once more, if the caller still holds the model's output). In the
backward of the linear layer: the gradient of the logits, and the gradients of the hidden states and of the weight.
With liger: the logits of one chunk, overwritten by their gradient; the float32 sum of the weight gradient where there
is one; the gradients of the hidden states and of the weight. Where there is a float32 sum, the logits of a chunk and
the weight gradient, which is written last, are not alive together.
"""

import json
import os
import sys

import torch

import liger  # noqa: F401  (registers the ops)

from ._format import human_bytes, table

DTYPES = {
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp16": torch.float16,
    "float16": torch.float16,
    "fp32": torch.float32,
    "float32": torch.float32,
}


def add_arguments(parser):
    parser.add_argument(
        "--tokens", type=int, required=True, help="rows of the batch: batch size x sequence length"
    )
    parser.add_argument("--hidden", type=int, required=True, help="hidden size of the model")
    parser.add_argument("--vocab", type=int, required=True, help="size of the vocabulary")
    parser.add_argument(
        "--dtype", choices=list(DTYPES), default="bf16", help="of logits and weight (default: bf16)"
    )
    parser.add_argument(
        "--budget",
        help="bytes for the logits of a chunk, for example 256M (default: LIGER_MEMORY_BUDGET, else 512M)",
    )
    parser.add_argument(
        "--accum",
        choices=["fp32", "same"],
        default="fp32",
        help="how the weight gradient is summed over chunks: in float32, or in its own dtype (default: fp32)",
    )
    parser.add_argument("--json", action="store_true", help="print it as JSON")


def head_memory(tokens, hidden, vocab, element_size, exact_accumulation=True):
    """The plan of a batch and its bytes, as ``liger plan`` shows them (the module docstring says what is counted).

    Args:
        tokens, hidden, vocab: sizes of the head's problem.
        element_size: bytes of one logit.
        exact_accumulation: whether the weight gradient is summed over chunks in float32.

    Returns:
        dict with chunk_rows, chunks, and bytes: logits and logits_liger (logits and everything of their size),
        accumulator (the float32 sum), gradients (of hidden states and weight), peak and peak_liger.

    Raises:
        ValueError: negative sizes, or a LIGER_MEMORY_BUDGET that is not a positive number of bytes (RuntimeError
            with a torch older than 2.13, whose stable ABI knows no other error).
    """
    chunk_rows, chunks, chunk_logits, accumulator = torch.ops.liger.plan_chunks(
        tokens, hidden, vocab, element_size, True, exact_accumulation
    )
    logits = tokens * vocab * 3 * 4
    weight_gradient = vocab * hidden * element_size
    input_gradient = tokens * hidden * element_size
    linear_backward = tokens * vocab * element_size + weight_gradient + input_gradient
    shared = max(chunk_logits, weight_gradient) if accumulator else chunk_logits + weight_gradient
    return {
        "chunk_rows": chunk_rows,
        "chunks": chunks,
        "logits": logits,
        "logits_liger": chunk_logits,
        "accumulator": accumulator,
        "gradients": weight_gradient + input_gradient,
        "peak": max(logits, linear_backward),
        "peak_liger": shared + accumulator + input_gradient,
    }


def run(arguments):
    if arguments.budget is not None:
        # One parser for budgets, and one message for bad ones: the planner's own.
        os.environ["LIGER_MEMORY_BUDGET"] = arguments.budget
    dtype = DTYPES[arguments.dtype]
    exact = arguments.accum == "fp32"
    try:
        memory = head_memory(arguments.tokens, arguments.hidden, arguments.vocab, dtype.itemsize, exact)
    except (ValueError, RuntimeError) as error:
        print(f"liger plan: {error}", file=sys.stderr)
        return 2
    if arguments.json:
        print(json.dumps(memory, indent=2))
        return 0

    budget = os.environ.get("LIGER_MEMORY_BUDGET") or "512M"
    print(
        f"{arguments.tokens} tokens, hidden {arguments.hidden}, vocabulary {arguments.vocab}, "
        f"{str(dtype).removeprefix('torch.')}, budget {budget}"
    )
    print(f"{memory['chunks']} chunk{'s' if memory['chunks'] != 1 else ''} of {memory['chunk_rows']} rows\n")
    rows = [
        ("log-probabilities, gradients, logits", memory["logits"], memory["logits_liger"]),
        ("float32 sum of the weight gradient", 0, memory["accumulator"]),
        ("gradients of hidden states and weight", memory["gradients"], memory["gradients"]),
        ("most at one time", memory["peak"], memory["peak_liger"]),
    ]
    print(
        table(
            [(name, human_bytes(without), human_bytes(with_liger)) for name, without, with_liger in rows],
            header=("memory of the head and its loss", "without liger", "with liger"),
        )
    )
    if memory["peak_liger"]:
        print(
            f"\n{memory['peak'] / memory['peak_liger']:.1f} times less. 'liger plan --help' says what is counted."
        )
    return 0
