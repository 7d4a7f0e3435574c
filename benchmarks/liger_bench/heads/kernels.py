# SPDX-License-Identifier: BSD-3-Clause
"""The kernels of ``fused_linear_ce`` on the wgmma engine, vs. the GEMMs of cuBLAS: where the time of a
head goes.

    PYTHONPATH=benchmarks python -m liger_bench.heads.kernels --json r.json gemma-3-270m Qwen3-4B

For the plain heads of ops/heads.py: the device time of each of the three GEMMs with its epilogue and of all
other kernels together, in a forward and backward, by torch.profiler; and each GEMM by cuBLAS alone, of as
many rows as 4 GiB of logits have, scaled to all rows. Rounds alternate between the two. A GEMM alone has a
higher clock rate than in the sum of three, which runs at the power limit: its time here is 5 to 7 % shorter
than in ``benchmarks/run.py --heads``.
"""

import argparse
import json
import statistics
import sys
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

import liger

from ..environment import environment
from ..harness import Options
from ..ops.heads import HEADS
from .inputs import layer

# Parts of the names of kernels.
GEMMS = {"logits": "ExpEpilogue", "grad_input": "GradInputEpilogue", "grad_weight": "GradWeightEpilogue"}
OTHERS = "others"
STEPS = 3
LOGITS_BYTES = 4 << 30


def kernel_ms(times, steps):
    """{GEMM, or others: ms of a step}, from (name of a kernel, microseconds of all steps)."""
    found = dict.fromkeys((*GEMMS, OTHERS), 0.0)
    for kernel, microseconds in times:
        name = next((n for n, part in GEMMS.items() if part in kernel), OTHERS)
        found[name] += microseconds / 1000 / steps
    return found


def liger_ms(inputs):
    leaves = [inputs["input"].requires_grad_(), inputs["weight"].requires_grad_()]

    def step():
        torch.autograd.grad(liger.fused_linear_ce(*leaves, inputs["target"]), leaves)

    step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(STEPS):
            step()
        torch.cuda.synchronize()
    return kernel_ms(((e.key, e.self_device_time_total) for e in profiler.key_averages()), STEPS)


def cublas_ms(inputs):
    x, weight = inputs["input"].detach(), inputs["weight"].detach()
    rows = min(len(x), LOGITS_BYTES // (weight.shape[0] * x.element_size()))
    part = x[:rows]
    logits = part @ weight.T
    gemms = {
        "logits": lambda: torch.mm(part, weight.T, out=logits),
        "grad_input": lambda: logits @ weight,
        "grad_weight": lambda: logits.T @ part,
    }
    found = {}
    for name, gemm in gemms.items():
        gemm()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(STEPS):
            gemm()
        end.record()
        torch.cuda.synchronize()
        found[name] = begin.elapsed_time(end) / STEPS * len(x) / rows
    return found


def measure(head, options, rounds):
    """{name, liger: {kernel: ms}, cublas: {GEMM: ms}}: medians over rounds."""
    inputs = layer(options, head.tokens, head.hidden, head.vocabulary)
    samples = [(liger_ms(inputs), cublas_ms(inputs)) for _ in range(rounds)]
    ours, theirs = ([pair[i] for pair in samples] for i in (0, 1))
    return {
        "name": head.name,
        "liger": {name: statistics.median(s[name] for s in ours) for name in ours[0]},
        "cublas": {name: statistics.median(s[name] for s in theirs) for name in theirs[0]},
    }


def markdown(records):
    """GEMMs with their epilogues relative to cuBLAS, and the share of all other kernels."""
    lines = ["| head | logits | dX | dW | other kernels |", "|---|---|---|---|---|"]
    for record in records:
        ours, theirs = record["liger"], record["cublas"]
        ratios = " | ".join(f"{ours[name] / theirs[name]:.2f}" for name in GEMMS)
        lines.append(f"| {record['name']} | {ratios} | {ours[OTHERS] / sum(ours.values()):.1%} |")
    return "\n".join(lines)


def chosen(words):
    """The plain heads in bfloat16 whose names have one of the words; all of them without words. Without the
    unaligned vocabulary, for which cuBLAS takes several times as long."""
    plain = [
        h for h in HEADS if h.plain and h.dtype is None and h.memory_budget is None and h.vocabulary % 8 == 0
    ]
    return [h for h in plain if not words or any(word in h.name for word in words)]


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "words", nargs="*", metavar="MODEL", help="heads with this in their names (default: all)"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, metavar="FILE")
    given = parser.parse_args(arguments)
    heads = chosen(given.words)
    if not heads or given.rounds < 1:
        parser.error("no head has these words in its name" if not heads else "--rounds: expected at least 1")
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        print("liger_bench.heads.kernels: needs a GPU of compute capability 9.0", file=sys.stderr)
        return 2
    options = Options(backends=("cuda",))
    records = []
    for head in heads:
        records.append(measure(head, options, given.rounds))
        torch.cuda.empty_cache()
    print(markdown(records))
    if given.json is not None:
        text = json.dumps({"environment": environment(options), "rows": records}, indent=1)
        given.json.write_text(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
