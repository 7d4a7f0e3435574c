# SPDX-License-Identifier: BSD-3-Clause
"""Training steps of a Llama, unpatched, compiled, with liger-kernel and with liger: tokens per second, peak
memory.

The shape is Llama-3.2-1B's: tied embeddings, bfloat16 weights, fused AdamW, gradient checkpointing,
SDPA; with options Llama-3-8B's, and no checkpointing, where ``liger.patch(recompute=True)`` takes part,
too. Weights and tokens are random, the same for every contestant. All models live side by side and take turns
of a few steps, so that a chip which lowers its clock slows all of them alike. The memory of a contestant is
what its weights, gradients, optimizer and activations take at the peak of a step; the models that wait are
not counted.

``--graphs`` adds contestants of liger whose whole step is a CUDA graph. Their peak is measured during the
capture.

``--small`` measures 4 x 512 and 1 x 2048 tokens by every way of docs/recipes/small_batches.md: uncompiled,
compiled, compiled with CUDA graphs, and, of liger, the step as one graph.

``--memory`` adds contestants whose layers are recomputed as ``liger.transformers.checkpoint`` plans, with and
without ``recompute=True``. Their limit counts the models that wait as well, so each needs a process of its
own.

``--optimizer`` chooses the optimizers: AdamW, AdamW with states of 8 bits, or either with its steps in the
backward, which frees each gradient at once. ``--recipes`` adds contestants without the fused recipes of
decoder layers.

``--lora`` trains adapters of PEFT on frozen weights, which ``--nf4`` quantises to 4 bits; a contestant of
liger leaves the layers of LoRA to PEFT. The memory above the weights is ``peak_bytes - idle_bytes``.

``--own-processes`` gives every contestant a process of its own, saves the results after each, and continues
where an earlier run ended. ``--ranks`` does the same with a model that FSDP2 shards over several processes
(model_ranks.py).
"""

import argparse
import gc
import importlib.metadata
import re
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch

from ..devices.processes import count_gpus, elsewhere
from ..environment import environment
from ..harness import Options
from .contestants import OPTIMIZERS, entered
from .report import GIB, markdown, shape_of, write
from .sizes import SIZES, SMALL, size_of
from .trainee import Trainee, random_batches

# --- measuring ----------------------------------------------------------------------------------------------


def _measure_shape(trainees, size, shape, device):
    batches = random_batches(size, shape, device)
    for trainee in trainees:
        trainee.attempt(trainee.warm_up, batches)
    for index in range(size.rounds):
        shift = index % len(trainees)
        for trainee in trainees[shift:] + trainees[:shift]:
            trainee.attempt(trainee.burst, batches, index * size.burst)
    reference = next((t.loss for t in trainees if t.contestant.group == "plain"), None)
    return {
        "batch": shape[0],
        "sequence": shape[1],
        "providers": {t.contestant.name: t.record(reference) for t in trainees},
    }


def measure(size, device, backends, shapes=None, **options):
    """One record per shape: step time, tokens per second and peak memory of each contestant, or its error.

    The options are as for :func:`entered`.
    """
    trainees = [Trainee(c, size, device) for c in entered(size, backends, **options)]
    for trainee in trainees:
        trainee.attempt(trainee.build)
    records = []
    for shape in shapes or size.shapes:
        start = time.perf_counter()
        records.append(_measure_shape(trainees, size, shape, device))
        print(f"  {shape_of(records[-1])}: {time.perf_counter() - start:.1f} s", file=sys.stderr, flush=True)
        if device == "cuda":
            gc.collect()
            torch.cuda.empty_cache()
    return records


# --- command ------------------------------------------------------------------------------------------------


def parse_shape(text):
    match = re.fullmatch(r"(\d+)x(\d+)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"'{text}' is not BATCHxTOKENS")
    return int(match[1]), int(match[2])


def _memory(text):
    """(name, memory): "auto", a share such as 0.5, GiB such as 60G, or None for "none"."""
    if text in ("auto", "none"):
        return text, None if text == "none" else text
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(G?)", text)
    if match is None or not (match[2] or 0 < float(text) <= 1):
        raise argparse.ArgumentTypeError(f"'{text}' is not auto, none, a share in (0, 1] or GiB such as 60G")
    return text, int(float(match[1]) * GIB) if match[2] else float(text)


def _parser():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "shapes", nargs="*", type=parse_shape, metavar="BATCHxTOKENS", help="default: the shapes of the size"
    )
    parser.add_argument("--compile", action="store_true", help="compiled models as well (minutes to start)")
    parser.add_argument("--size", choices=SIZES, default="1b", help="default %(default)s")
    parser.add_argument(
        "--no-checkpointing", action="store_true", help="every activation is saved; recompute=True takes part"
    )
    parser.add_argument(
        "--only",
        action="append",
        metavar="NAME",
        help="a contestant, such as 'liger[cuda], recompute'; repeatable",
    )
    parser.add_argument(
        "--self-test", action="store_true", help="a tiny model on the CPU with the torch backend"
    )
    parser.add_argument(
        "--backends", default="cuda", help="backends of liger to measure (default %(default)s)"
    )
    parser.add_argument(
        "--memory",
        type=_memory,
        action="append",
        default=[],
        help="also liger with planned checkpointing in this memory: auto, a share such as 0.5, GiB such as 60G; or "
        "none, without checkpointing; repeatable",
    )
    parser.add_argument("--graphs", action="store_true", help="also liger with each step as a CUDA graph")
    parser.add_argument(
        "--small", action="store_true", help="4x512 and 1x2048 tokens, compiled and as CUDA graphs as well"
    )
    parser.add_argument(
        "--recipes",
        action="store_true",
        help="also liger without fused_add_rms_norm, without qk_norm_rope, and without both",
    )
    parser.add_argument(
        "--optimizer",
        choices=OPTIMIZERS,
        action="append",
        help="of every contestant (default adamw); the 8-bit ones are from bitsandbytes; repeatable",
    )
    parser.add_argument(
        "--lora", type=int, default=0, metavar="RANK", help="adapters of PEFT on frozen linear layers"
    )
    parser.add_argument(
        "--nf4", action="store_true", help="with --lora: linear layers of 4 bits (bitsandbytes)"
    )
    parser.add_argument(
        "--ranks", type=int, default=1, help="processes that share a model by FSDP2 (default %(default)s)"
    )
    parser.add_argument(
        "--own-processes", action="store_true", help="one contestant at a time, in a process of its own"
    )
    parser.add_argument(
        "--minutes",
        type=float,
        help="with --own-processes or --ranks: no contestant starts or runs after that (default: no limit)",
    )
    parser.add_argument(
        "--json",
        type=Path,
        help="where the results go as well, as JSON and Markdown; with --own-processes or --ranks after every "
        "contestant, and those that a file has already are not measured again",
    )
    return parser


def _check(parser, parsed):
    gpus = count_gpus()
    if not parsed.self_test and gpus == 0:
        parser.error("no CUDA device; --self-test runs a tiny model on the CPU")
    if parsed.ranks < 1:
        parser.error(f"--ranks is {parsed.ranks}, expected at least 1")
    if parsed.minutes is not None and not (parsed.own_processes or parsed.ranks > 1):
        parser.error("--minutes needs --own-processes or --ranks of at least 2")
    if parsed.lora < 0 or (parsed.nf4 and not parsed.lora):
        parser.error(f"--lora is {parsed.lora}, expected at least 0, and at least 1 with --nf4")
    if parsed.lora and (parsed.own_processes or parsed.ranks > 1):
        parser.error("--lora cannot be combined with --own-processes or --ranks")
    if parsed.ranks == 1:
        return
    if not parsed.self_test and parsed.ranks > gpus:
        parser.error(f"--ranks is {parsed.ranks}, but here are {gpus} CUDA devices")
    if parsed.graphs or parsed.compile or parsed.small:
        parser.error("--ranks cannot be combined with --graphs, --compile or --small")


def main(arguments=None):
    parser = _parser()
    parsed = parser.parse_args(arguments)
    _check(parser, parsed)
    size = size_of(parsed.size, parsed.self_test, not parsed.no_checkpointing)
    size = replace(size, lora=parsed.lora, nf4=parsed.nf4)
    device = "cpu" if parsed.self_test else "cuda"
    backends = ["torch"] if parsed.self_test else parsed.backends.split(",")
    options = Options(
        device, "self-test" if parsed.self_test else "full", tuple(backends), parsed.compile, dtype=size.dtype
    )
    # Contestants in processes of their own are forked from this one.
    facts = {**elsewhere(environment, options), "transformers": importlib.metadata.version("transformers")}
    entry = {
        "compile": parsed.compile,
        "memories": parsed.memory,
        "graphs": parsed.graphs,
        "optimizers": parsed.optimizer or ["adamw"],
        "recipes": parsed.recipes,
        "small": parsed.small,
    }
    if parsed.small and not parsed.self_test:
        parsed.shapes = parsed.shapes or list(SMALL)
    try:
        if parsed.own_processes or parsed.ranks > 1:
            from . import ranks as model_ranks

            records = model_ranks.measure(parsed, size, backends, facts, entry)
        else:
            records = measure(size, device, backends, parsed.shapes, only=parsed.only, **entry)
    except ValueError as error:
        parser.error(str(error))
    print(markdown(facts, records, size.name, size.checkpointing))
    if parsed.json:
        write(parsed.json, facts, records, size)
    bad = [
        p for r in records for p in r["providers"].values() if p["group"] == "ours" and p["status"] != "ok"
    ]
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
