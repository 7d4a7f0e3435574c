# SPDX-License-Identifier: BSD-3-Clause
"""Steps of a Llama with the inputs of layers on the device, in host memory, or there as transformers does it.

``python -m liger_bench.models.offload [BATCHxTOKENS ...] --json r.json`` measures tokens per second and peak
memory of full checkpointing, and compares the bits of the loss and of all gradients of the first step. The
shape, the weights and the tokens are as in ``bench_model``. The settings take turns, each with a model of its
own; ``release`` has AdamW make its steps in the backward.
"""

import argparse
import gc
import hashlib
import json
import sys
import time
from pathlib import Path

import torch

import liger
from liger.transformers.checkpointing import methods

from ..environment import environment
from ..harness import Options
from .bench_model import parse_shape
from .contestants import Contestant, adamw
from .report import GIB
from .sizes import FULL, SELF_TEST
from .trainee import Trainee, random_batches

SHAPES = ((32, 1024), (4, 8192), (1, 32768), (1, 131072))


def _device(model):
    # A memory of one byte: every layer is recomputed.
    return liger.transformers.checkpoint(liger.patch(model), 1, offload=False)


def _offload(model):
    return liger.transformers.checkpoint(liger.patch(model), 1, offload=True)


def _transformers(model):
    methods.enable(liger.patch(model))
    model.activation_checkpointing_enable({"use_reentrant": False}, offload=True)
    return model


# Setting -> (how it prepares the model, whether gradients are released).
SETTINGS = {
    "device": (_device, False),
    "offload": (_offload, False),
    "offload, release": (_offload, True),
    "offload of transformers": (_transformers, False),
}


def _digest(tensors):
    """A hash of the bits of tensors."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().reshape(-1).view(torch.uint8).cpu().numpy().tobytes())
    return found.hexdigest()[:16]


def measure(name, size, shape, device, count):
    """The record of one setting: milliseconds per step, peak bytes, hashes of the first step."""
    prepare, released = SETTINGS[name]
    trainee = Trainee(Contestant(name, "ours", prepare, checkpointing=False), size, device)
    trainee.build()
    batches = random_batches(size, shape, device)
    loss = trainee.call(input_ids=batches[0], labels=batches[0]).loss
    loss.backward()
    # A part of each gradient is enough to find a wrong input of any layer.
    gradients = [p.grad.reshape(-1)[: 2**16] for p in trainee.model.parameters()]
    record = {"loss": loss.item(), "loss_bits": _digest([loss]), "gradient_bits": _digest(gradients)}
    del loss, gradients
    trainee.model.zero_grad()
    if released:
        trainee.optimizer = adamw(trainee.model.parameters())
        liger.transformers.release_gradients(trainee.optimizer)
    for number in range(2):
        trainee.step(batches[number % 3])
    gpu = device == "cuda"
    if gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    for number in range(count):
        trainee.step(batches[number % 3])
    if gpu:
        torch.cuda.synchronize()
    record["ms"] = (time.perf_counter() - start) * 1e3 / count
    record["tokens_per_second"] = shape[0] * shape[1] / record["ms"] * 1e3
    record["peak_gib"] = torch.cuda.max_memory_allocated() / GIB if gpu else None
    record["plan"] = liger.transformers.patch_report(trainee.model).checkpointing
    return record


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shapes", nargs="*", type=parse_shape, metavar="BATCHxTOKENS")
    parser.add_argument("--setting", action="append", choices=SETTINGS, help="repeatable; default: all")
    parser.add_argument("--steps", type=int, default=4, help="measured steps (default %(default)s)")
    parser.add_argument("--self-test", action="store_true", help="a tiny model on the CPU")
    parser.add_argument("--json", type=Path, help="where the records go as well, after each one")
    parsed = parser.parse_args(arguments)
    size, device = (SELF_TEST, "cpu") if parsed.self_test else (FULL, "cuda")
    backends = ("torch",) if parsed.self_test else ("cuda",)
    options = Options(device, "self-test" if parsed.self_test else "full", backends, False, dtype=size.dtype)
    result = {**environment(options), "rows": []}
    for shape in parsed.shapes or (size.shapes if parsed.self_test else SHAPES):
        records = {}
        for name in parsed.setting or SETTINGS:
            try:
                records[name] = measure(name, size, shape, device, parsed.steps)
            except RuntimeError as error:
                records[name] = {"failed": f"{type(error).__name__}: {error}"[:300]}
            gc.collect()
            if device == "cuda":
                torch.cuda.empty_cache()
            print(f"{shape[0]}x{shape[1]} {name}: {records[name]}", flush=True)
        bits = {(r.get("loss_bits"), r.get("gradient_bits")) for r in records.values() if "failed" not in r}
        result["rows"].append({"batch": shape[0], "sequence": shape[1], "same": len(bits) == 1, **records})
        print(f"{shape[0]}x{shape[1]} same bits: {len(bits) == 1}", flush=True)
        if parsed.json:
            parsed.json.write_text(json.dumps(result, indent=1, default=str))
    return 0 if all(row["same"] for row in result["rows"]) else 1


if __name__ == "__main__":
    sys.exit(main())
