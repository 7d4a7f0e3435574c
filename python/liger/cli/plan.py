# SPDX-License-Identifier: BSD-3-Clause
"""``liger plan``: the chunks of fused_linear_ce for a batch, and the memory of the lm_head with and without
it.

``liger_cli.commands`` says what is counted.
"""

import json
import math
import os
import sys

import torch

import liger
from liger_cli.arguments import size
from liger_cli.commands import DTYPES
from liger_cli.devices import GPUS

from .._core.head.kept_logits import exponentials_bytes, sizes_for_engine
from .._core.head.sm90_plan import ENGINE, ENGINE_DTYPES, plan_chunks_sm90
from .._core.runtime.environment import wgmma_engine_allowed
from .._core.runtime.memory_budget import default_memory_budget
from . import _plan_model
from ._format import human_bytes, table

SM90 = (9, 0)
# The options that describe the lm_head and have no meaning with --model.
_SIZES = ("tokens", "hidden", "vocab")
_HEAD_OPTIONS = ("hidden", "vocab", "budget", "accum", "capability")
# The options that describe a step of a model.
_STEP_OPTIONS = ("length", "memory", "gpu", "optimizer", "lora")
_LARGEST_BYTES = 2**63 - 1


def _device_capability():
    """Compute capability of the current GPU if the cuda backend serves fused_linear_ce; else None."""
    if not torch.cuda.is_available():
        return None
    capability = torch.cuda.get_device_capability()
    return capability if liger.backend_report()["fused_linear_ce"]["backend"] == "cuda" else None


def _clusters():
    """Concurrent clusters of two blocks on the current GPU of capability 9.0, or else on an H200."""
    if _device_capability() != SM90:
        return 66
    return torch.cuda.get_device_properties().multi_processor_count // 2


def _plan_generic(tokens, hidden, vocab, element_size, exact_accumulation, is_trained):
    chunk_rows, chunks, chunk_logits, accumulator = torch.ops.liger.plan_chunks(
        tokens, hidden, vocab, element_size, is_trained, exact_accumulation
    )
    return {
        "engine": "generic",
        "chunk_rows": chunk_rows,
        "first_chunk_rows": chunk_rows,
        "chunks": chunks,
        "logits_liger": chunk_logits,
        "accumulator": accumulator,
        "working": 0,
    }


def _plan_sm90(tokens, hidden, vocab, dtype, exact_accumulation, is_trained, budget):
    """The plan of the wgmma engine in the same form, or None if the generic engine runs the batch."""
    half = dtype == torch.float16
    plan = plan_chunks_sm90(
        tokens, hidden, vocab, True, is_trained, exact_accumulation, budget, clusters=_clusters()
    )
    if not plan.chunks:
        return None
    panels = math.ceil(vocab / ENGINE.panel) + plan.panel_offset
    offset_bytes = plan.panel_offset * ENGINE.panel * hidden * 2
    working = 0
    for chunk in plan.chunks:
        is_first = chunk.first == 0
        need = 4 * chunk.rows * (math.ceil(vocab / ENGINE.logits_tile) + 4)
        if half:
            need += chunk.rows * (math.ceil(vocab / ENGINE.logits_tile) + 12)
        if is_first and plan.rows_in_grad_weight:
            need += 2 * chunk.rows * hidden
        need += 4 * torch.ops.liger.plan_split_k_sums_sm90(chunk.rows, hidden, chunk.k_splits)
        # Free memory: grad_input of later rows, or grad_weight past its last row.
        room = 2 * hidden * (tokens - chunk.rows) if is_first else offset_bytes
        working = max(working, need if need > room else 0)
    return {
        "engine": "sm90",
        "chunk_rows": plan.chunks[min(1, len(plan.chunks) - 1)].rows,
        "first_chunk_rows": plan.chunks[0].rows,
        "chunks": len(plan.chunks),
        "logits_liger": panels * (plan.workspace_panel_bytes - plan.scale_bytes),
        "accumulator": panels * plan.scale_bytes,
        # Beside it a one-hot term per class, and per row its loss and its place in the index of valid rows.
        "working": working + offset_bytes + 8 * vocab + 12 * tokens,
    }


def head_memory(tokens, hidden, vocab, dtype, exact_accumulation=True, capability=None, is_trained=True):
    """The plan of a batch and its memory in bytes, as ``liger plan`` prints them (see the module docstring).

    Args:
        tokens, hidden, vocab: sizes of the head's problem.
        dtype: of hidden states and weight.
        exact_accumulation: whether the weight gradient is summed over chunks in float32.
        capability: (major, minor) of the GPU, or None for one without an engine of its own.
        is_trained: whether the weight has a gradient.

    Returns:
        dict with engine ("generic" or "sm90"), chunks, chunk_rows, first_chunk_rows, and bytes: logits and
        logits_liger (logits and everything of their size), accumulator (what the sum over chunks needs in
        addition to the weight gradient), working, gradients (of hidden states and weight), peak and
        peak_liger. Of fused_linear_logprobs: logprobs_gemms, logprobs_kept (bytes between forward and
        backward), and logprobs_budget, with which there are three GEMMs (None: with no budget).

    Raises:
        ValueError: a LIGER_MEMORY_BUDGET that is not a positive number of bytes, a LIGER_WGMMA other than 0
            and 1, or sizes whose products do not fit 64 bits.
        RuntimeError: negative sizes.
    """
    budget = default_memory_budget()
    if max(12 * tokens * vocab, 4 * tokens * hidden, 4 * vocab * hidden) > _LARGEST_BYTES:
        raise ValueError(f"{tokens} tokens, hidden {hidden} and vocabulary {vocab} need more than 2^63 bytes")
    has_engine = capability == SM90 and dtype in ENGINE_DTYPES and wgmma_engine_allowed()
    plan = None
    if has_engine:
        plan = _plan_sm90(tokens, hidden, vocab, dtype, exact_accumulation, is_trained, budget)
    plan = plan or _plan_generic(tokens, hidden, vocab, dtype.itemsize, exact_accumulation, is_trained)
    logits = tokens * vocab * 3 * 4
    weight_gradient = vocab * hidden * dtype.itemsize if is_trained else 0
    input_gradient = tokens * hidden * dtype.itemsize
    linear_backward = tokens * vocab * dtype.itemsize + weight_gradient + input_gradient
    # The generic engine allocates the final gradient after its last chunk of logits.
    sequential = plan["engine"] == "generic" and plan["accumulator"] > 0
    together = (max if sequential else sum)((plan["logits_liger"], weight_gradient))
    can_keep = has_engine and sizes_for_engine(tokens, hidden)
    exponentials = exponentials_bytes(tokens, vocab)
    keeps = can_keep and exponentials <= budget
    return {
        **plan,
        "logits": logits,
        "gradients": weight_gradient + input_gradient,
        "peak": max(logits, linear_backward),
        "peak_liger": together + plan["accumulator"] + plan["working"] + input_gradient,
        "logprobs_gemms": 3 if keeps else 4,
        "logprobs_kept": exponentials if keeps else 0,
        "logprobs_budget": exponentials if can_keep else None,
    }


def _describe_chunks(memory):
    first, later, chunks = memory["first_chunk_rows"], memory["chunk_rows"], memory["chunks"]
    count = f"{chunks} chunk{'s' if chunks != 1 else ''}"
    sizes = f" of {first} rows" if first == later else f": {first} rows, then {later} at a time"
    engine = "the generic engine" if memory["engine"] == "generic" else "the engine of compute capability 9.0"
    return f"{count}{sizes}, by {engine}"


def _describe_logprobs(memory):
    text = f"fused_linear_logprobs: {memory['logprobs_gemms']} GEMMs"
    if memory["logprobs_kept"]:
        return text + f", with {human_bytes(memory['logprobs_kept'])} of exponentials kept for the backward"
    if memory["logprobs_budget"]:
        return text + f", 3 with a budget of {human_bytes(memory['logprobs_budget'])}"
    return text


def _complaint(arguments, dtype):
    """The fault of the arguments of the lm_head, or None."""
    if unused := _given(arguments, _STEP_OPTIONS):
        return f"{', '.join(unused)} without --model"
    missing = [f"--{name}" for name in _SIZES if getattr(arguments, name) is None]
    if missing:
        return (
            f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing: the plan of an lm_head needs "
            "--tokens, --hidden and --vocab; the plan of the decoder layers of a model needs --model alone"
        )
    if arguments.budget is not None:
        row = arguments.vocab * dtype.itemsize
        if size(_LARGEST_BYTES)(arguments.budget) < row:
            return f"--budget is {arguments.budget}, expected at least the logits of one row, {row} bytes"
    return None


def _model_complaint(arguments):
    """The fault of the arguments of a model, or None."""
    unused = _given(arguments, _HEAD_OPTIONS)
    if unused:
        return f"--model takes no {', '.join(unused)}"
    tokens, length = arguments.tokens, arguments.length
    options = _given(arguments, _STEP_OPTIONS)
    if options and tokens is None and length is None:
        return f"{', '.join(options)} without a batch: --tokens is a given one, --length asks for the largest one"
    if tokens is not None:
        if arguments.memory is not None:
            return "--memory asks for the largest batch, --tokens is a given one; expected one of them"
        if length is not None and length > tokens:
            return f"--length is {length}, expected at most --tokens, {tokens}"
        if arguments.gpu is not None and length is None:
            return "--gpu with --tokens needs --length, which the speed depends on"
    elif length is not None and arguments.memory is None and arguments.gpu is None:
        return "--length asks for the largest batch, which needs --memory or --gpu"
    return None


def _given(arguments, names):
    return [f"--{name}" for name in names if getattr(arguments, name) is not None]


def _plan_of_model(arguments, dtype):
    capability = _device_capability() if arguments.gpu is None else GPUS[arguments.gpu].capability

    def head_peak(tokens, hidden, vocab, dtype, is_trained):
        return head_memory(tokens, hidden, vocab, dtype, True, capability, is_trained)["peak_liger"]

    return _plan_model.run(arguments, dtype, head_peak)


def _planned_for(chosen, found):
    """The GPU that the plan is for, in words."""
    if chosen is not None:
        return "compute capability {}.{}".format(*chosen)
    if found is not None:
        return "the GPU of this machine, compute capability {}.{}".format(*found)
    why = (
        "the cuda backend does not serve it here" if torch.cuda.is_available() else "this machine has no GPU"
    )
    return f"any GPU but one of compute capability 9.0, since {why}: --capability 9.0 plans for an H100"


def run(arguments):
    dtype = getattr(torch, DTYPES[arguments.dtype])
    of_model = arguments.model is not None
    complaint = _model_complaint(arguments) if of_model else _complaint(arguments, dtype)
    if complaint is not None:
        print(f"liger plan: {complaint}", file=sys.stderr)
        return 2
    if of_model:
        return _plan_of_model(arguments, dtype)
    if arguments.budget is not None:
        os.environ["LIGER_MEMORY_BUDGET"] = arguments.budget
    exact = arguments.accum != "same"
    found = _device_capability()
    capability = arguments.capability or found
    try:
        memory = head_memory(arguments.tokens, arguments.hidden, arguments.vocab, dtype, exact, capability)
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
    print(_describe_chunks(memory))
    print(f"planned for {_planned_for(arguments.capability, found)}\n")
    rows = [
        ("log-probabilities, gradients, logits", memory["logits"], memory["logits_liger"]),
        ("sum of the weight gradient over chunks", 0, memory["accumulator"]),
        ("working memory", 0, memory["working"]),
        ("gradients of hidden states and weight", memory["gradients"], memory["gradients"]),
        ("peak", memory["peak"], memory["peak_liger"]),
    ]
    print(
        table(
            [(name, human_bytes(without), human_bytes(with_liger)) for name, without, with_liger in rows],
            header=("memory of the head and its loss", "without liger", "with liger"),
        )
    )
    print("\n" + _describe_logprobs(memory))
    if memory["peak_liger"]:
        print(
            f"\n{memory['peak'] / memory['peak_liger']:.1f} times less. 'liger plan --help' says what is counted."
        )
    return 0
