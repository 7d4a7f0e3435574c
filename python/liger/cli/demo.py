# SPDX-License-Identifier: BSD-3-Clause
"""``liger demo``: trains a Llama unpatched and patched; compares losses, memory, tokens per second."""

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import torch

from liger_cli.demo_sizes import SIZES

from . import _demo_report as report

EXTRA = 'pip install "liger-ops[demo]"'
RUNS = {"unpatched": "unpatched", "liger": "patched with liger", "nudged": "rounding yardstick"}


class RunFailed(Exception):
    """A training process failed; it printed the reason."""


def run(arguments):
    missing = [name for name in ("transformers", "tqdm") if importlib.util.find_spec(name) is None]
    if missing:
        print(f"liger demo needs {' and '.join(missing)}: {EXTRA}", file=sys.stderr)
        return 2
    if arguments.steps is not None and arguments.steps < 2:
        print(f"liger demo: --steps is {arguments.steps}, expected at least 2", file=sys.stderr)
        return 2
    try:
        arguments.output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        print(f"liger demo: --output {arguments.output}: {error.strerror}", file=sys.stderr)
        return 2
    device = "cuda" if torch.cuda.is_available() else "cpu"
    name = "tiny" if arguments.quick else arguments.size or ("gpu" if device == "cuda" else "cpu")
    size = SIZES[name] if arguments.steps is None else replace(SIZES[name], steps=arguments.steps)

    print(report.headline(size, device), flush=True)
    try:
        results = {
            "size": size.as_dict(),
            "device": report.device_name(device),
            "runs": train_all(size, device),
        }
    except RunFailed as error:
        print(f"liger demo: {error}", file=sys.stderr)
        return 1
    results["comparison"] = report.compare(results["runs"], size)
    print(report.text(results))

    saved = [arguments.output / "results.json"]
    saved[0].write_text(json.dumps(results, indent=2))
    if importlib.util.find_spec("matplotlib") is None:
        print(f"No picture, because matplotlib is not installed: {EXTRA}")
    else:
        saved.append(arguments.output / "demo.png")
        report.picture(results, saved[1])
    print("Saved " + " and ".join(str(path) for path in saved))
    return 0 if results["comparison"]["agree"] else 1


def train_all(size, device):
    """{kind: {"losses", "seconds", "peak_memory", ...}} of the three runs, each in a separate process."""
    from ._demo_data import token_batches

    with tempfile.TemporaryDirectory(prefix="liger-demo-") as folder:
        batches, vocabulary = token_batches(size)
        path = Path(folder) / "batches.pt"
        torch.save(batches, path)
        print(
            f"Text: the sources of Python's standard library, tokenizer of {vocabulary} entries trained on it"
        )
        return {kind: train(kind, size, device, path) for kind in RUNS}


def train(kind, size, device, batches):
    """One run in a separate process, with a progress bar. Raises RunFailed."""
    from tqdm import tqdm

    description = batches.with_name(f"{kind}.json")
    given = {"kind": kind, "size": size.as_dict(), "device": device, "batches": str(batches)}
    description.write_text(json.dumps(given))
    environment = dict(os.environ)
    # glibc returns larger blocks to the system when they are freed: resident size is memory in use.
    environment.setdefault("MALLOC_MMAP_THRESHOLD_", str(1 << 20))
    if size.memory_budget:
        environment.setdefault("LIGER_MEMORY_BUDGET", size.memory_budget)
    losses, seconds, last = [], [], {}
    with (
        tqdm(total=size.steps, desc=f"{RUNS[kind]:18s}", unit="step") as bar,
        subprocess.Popen(
            [sys.executable, "-m", "liger.cli._demo_worker", str(description)],
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        ) as process,
    ):
        for line in process.stdout:
            last = json.loads(line)
            if "step" in last:
                losses.append(last["loss"])
                seconds.append(last["seconds"])
                bar.set_postfix_str(f"loss {last['loss']:.4f}", refresh=False)
                bar.update()
    if process.returncode or "peak_memory" not in last:
        raise RunFailed(
            f"the {RUNS[kind]} run ended with exit code {process.returncode} after {len(losses)} steps"
        )
    return {"losses": losses, "seconds": seconds, **last}
