# SPDX-License-Identifier: BSD-3-Clause
"""``python -m experiments.kept_attention --json FILE``: steps whose layers are recomputed without attention.

Llama-3.2-1B in bfloat16, patched with ``recompute=True``, one contestant after the other: full checkpointing;
attention kept in all layers; and in the memory that this takes, a plan, and a plan of whole layers alone.
"""

import argparse
import gc
import json
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch

import liger
from liger.transformers.checkpointing import decoder_layers
from liger.transformers.checkpointing import planner as planning
from liger.transformers.checkpointing.memory_plan import Saving, State, path
from liger_bench.devices.processes import elsewhere
from liger_bench.environment import environment
from liger_bench.harness import Options
from liger_bench.models.bench_model import parse_shape
from liger_bench.models.contestants import Contestant
from liger_bench.models.report import GIB
from liger_bench.models.sizes import size_of
from liger_bench.models.trainee import Trainee, random_batches

SHAPES = ((32, 1024), (4, 8192), (1, 32768), (1, 131072))
FULL, KEPT, PLAN, WHOLE = "full checkpointing", "attention kept", "plan", "plan of whole layers"
# Peaks of a step vary by some MiB.
_MARGIN = 1.01


def patched(model):
    return liger.patch(model, recompute=True, verbose=False)


def kept(model):
    """The model with the attention of all layers kept, without a plan."""
    layers = decoder_layers.find(patched(model))
    switches = decoder_layers.Switches(model, layers)
    switches.intercept()
    switches.turn((State.ATTENTION,) * len(layers))
    return model


def whole_layers(savings, fixed=0):
    return path([Saving(s.bytes, s.time) for s in savings], fixed)


def contestant(name, memory):
    def planned(model):
        planning.path = whole_layers if name == WHOLE else path
        return liger.transformers.checkpoint(patched(model), memory)

    prepare = {FULL: patched, KEPT: kept}.get(name, planned)
    return Contestant(name, "ours", prepare, is_planned=name in (PLAN, WHOLE))


def measured(entered, size, shape, device, steps):
    """Tokens per second, peak and plan of a contestant at a shape, after ``steps`` further steps."""
    trainee = Trainee(entered, replace(size, warm_up=steps), device)
    trainee.attempt(trainee.build)
    batches = random_batches(size, shape, device)
    trainee.attempt(trainee.warm_up, batches)
    for index in range(size.rounds):
        trainee.attempt(trainee.burst, batches, index * size.burst)
    record = trainee.record(None)
    if record["status"] == "ok":
        record["tokens_per_second"] = shape[0] * shape[1] / record["ms"]["median"] * 1e3
        for planner in planning.planners(trainee.model):
            record["layers"] = planner.plan.counts(planner.step.kept)
            record["savings"] = [list(vars(saving).values()) for saving in planner.savings[:1]]
    return record


def shape_record(shape, size, device, capacity):
    methods, memory = {}, capacity
    for name in (FULL, KEPT, PLAN, WHOLE):
        is_long = shape[1] > 65536
        if is_long and name == WHOLE:
            continue  # A step takes a quarter of a minute.
        small = replace(size, rounds=2, burst=1) if is_long else replace(size, rounds=3, burst=2)
        entered = contestant(name, memory)
        steps = (4 if is_long else 8) if entered.is_planned else (1 if is_long else 2)
        start = time.perf_counter()
        record = methods[name] = measured(entered, small, shape, device, steps)
        if name == KEPT and record.get("peak_bytes"):
            memory = int(record["peak_bytes"] * _MARGIN)
        speed, peak = record.get("tokens_per_second", 0), (record.get("peak_bytes") or 0) / GIB
        print(
            f"{shape[0]}x{shape[1]} {name}: {speed:.0f} tokens/s, {peak:.2f} GiB, {record.get('layers', '')} "
            f"{record.get('plan', '')} {record.get('reason', '')} ({time.perf_counter() - start:.0f} s)",
            file=sys.stderr,
            flush=True,
        )
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()
    return {"batch": shape[0], "sequence": shape[1], "methods": methods}


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shapes", nargs="*", type=parse_shape, metavar="BATCHxTOKENS")
    parser.add_argument("--json", type=Path, help="where the results go, rewritten after every shape")
    parser.add_argument("--self-test", action="store_true", help="a tiny model on the CPU")
    parsed = parser.parse_args(arguments)
    size, device = size_of("1b", parsed.self_test), "cpu" if parsed.self_test else "cuda"
    facts = elsewhere(environment, Options(device, "full", ("cuda",), False, dtype=size.dtype))
    records = []
    for shape in parsed.shapes or (size.shapes if parsed.self_test else SHAPES):
        records.append(shape_record(shape, size, device, 10**12))
        if parsed.json:
            content = {"environment": facts, "shape_of": size.name, "shapes": records}
            parsed.json.write_text(json.dumps(content, indent=1) + "\n")
    return records


if __name__ == "__main__":
    main()
