"""The share of tiles of the gradient of the logits with hardly any probability mass, while a model trains.

The models and the text are those of ``liger demo``: a Llama from random weights, and the sources of Python's standard
library with a tokenizer trained on them; nothing is downloaded. Weights are float32 under bfloat16 autocast, the
learning rate rises linearly over the first steps, and gradients are clipped to a norm of 1. In some steps
``liger.debug.tile_mass`` counts in the wgmma engine; docs/performance/fused_linear_ce_sm90.md defines what. The
results are a JSON file, which is also written during the run, a table in Markdown and a picture: shares over the loss.
Exit code: 0, 1 if the loss is not finite, 2 for a wrong argument, a missing package or a device without the engine.
"""

import argparse
import contextlib
import dataclasses
import importlib.metadata
import importlib.util
import json
import math
import re
import sys
from pathlib import Path

import torch

import liger
from liger.cli._demo_data import token_batches
from liger.cli._demo_sizes import SIZES as DEMO_SIZES
from liger.debug import TileMassCounts, tile_mass, tile_mass_of_logits

from . import tiles_report
from .environment import RESULTS, environment
from .harness import Options

SIZES = {
    "demo": dataclasses.replace(DEMO_SIZES["cpu"], steps=2000),
    # Llama-3.2-1B: 4096 tokens per step.
    "1b": dataclasses.replace(
        DEMO_SIZES["gpu"], steps=2000, batch=2, dtype="float32", gradient_checkpointing=False
    ),
}
SELF_TEST = dataclasses.replace(
    DEMO_SIZES["tiny"], vocab=1024, hidden=32, batch=2, sequence=96, steps=6, text_bytes=1 << 17
)
WARM_UP_STEPS = 100
CLIP = 1.0
# Measured steps between two writes of the JSON file.
SAVE_EVERY = 10


def shifted(tokens):
    """The targets of a causal model's logits."""
    return torch.nn.functional.pad(tokens[:, 1:], (0, 1), value=-100)


class Trainee:
    """A model that is patched with liger, and its optimizer."""

    def __init__(self, size, device):
        from liger.cli._demo_worker import build_model

        self.autocast = torch.autocast("cuda", torch.bfloat16, enabled=device == "cuda")
        self.model = liger.patch(build_model(size, device))
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=size.learning_rate, betas=(0.9, 0.95), fused=device == "cuda"
        )
        warm_up = max(1, min(WARM_UP_STEPS, size.steps // 10))
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: min(1.0, (step + 1) / warm_up)
        )

    def step(self, tokens):
        """A training step; returns its loss as a tensor."""
        with self.autocast:
            loss = self.model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def counted_by_the_engine(self, tokens):
        """A training step, and the counts of its gradient."""
        with tile_mass() as mass:
            loss = self.step(tokens)
        return loss, mass.counts()

    def counted_by_the_reference(self, tokens):
        """The same, with the counts of logits that are computed before the step."""
        with torch.no_grad(), self.autocast:
            logits = self.model(input_ids=tokens).logits
        counts = tile_mass_of_logits(logits, shifted(tokens))
        del logits
        return self.step(tokens), counts


def record_of(step, loss, counts):
    """A measured step as JSON has it: a share of no tiles is null."""

    def shares(values):
        return [None if math.isnan(value) else value for value in values]

    return {
        "step": step,
        "loss": loss,
        "shares": shares(counts.shares),
        "shares_without_target": shares(counts.shares_without_target),
        "tiles": counts.tiles,
        "tiles_without_target": counts.tiles_without_target,
        "below": counts.below,
        "below_without_target": counts.below_without_target,
    }


class NotFinite(Exception):
    """The loss is not finite."""


def train(size, device, batches, every, reference, save):
    """Trains and calls ``save(records)`` now and then, and at the end. Raises NotFinite."""
    trainee = Trainee(size, device)
    count = trainee.counted_by_the_reference if reference else trainee.counted_by_the_engine
    records = []
    for step, tokens in enumerate(batches):
        tokens = tokens.to(device)
        if step % every and step + 1 < len(batches):
            trainee.step(tokens)
            continue
        loss, counts = count(tokens)
        records.append(record_of(step, loss.item(), counts))
        print(tiles_report.line(records[-1]), file=sys.stderr, flush=True)
        if not math.isfinite(records[-1]["loss"]):
            save(records)
            raise NotFinite(f"the loss of step {step} is {records[-1]['loss']}")
        if len(records) % SAVE_EVERY == 0:
            save(records)
    save(records)


def _parser():
    parser = argparse.ArgumentParser(
        prog="liger bench --tiles", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--size",
        choices=list(SIZES),
        default="demo",
        help="the small model of liger demo, or Llama-3.2-1B's shape (default %(default)s)",
    )
    parser.add_argument("--steps", type=int, help="training steps (default 2000)")
    parser.add_argument(
        "--every", type=int, default=20, help="counts in every N-th step and the last (default %(default)s)"
    )
    parser.add_argument(
        "--reference",
        action="store_true",
        help="counts by the formula in torch, from the logits of a second forward, on any device",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="result file; the others get its name")
    parser.add_argument(
        "--plots",
        action=argparse.BooleanOptionalAction,
        help="a PNG beside the result file (default: where matplotlib is installed)",
    )
    parser.add_argument(
        "--from",
        dest="source",
        type=Path,
        metavar="FILE",
        help="train nothing: table and picture of a result file",
    )
    parser.add_argument(
        "--self-test",
        action="store_true",
        help="a tiny model on the CPU with --reference: tests the program",
    )
    return parser


def _complaint(arguments):
    """What prevents the run, or None."""
    if arguments.source is not None:
        return None if arguments.source.is_file() else f"no such file: {arguments.source}"
    missing = [name for name in ("transformers", "tokenizers") if importlib.util.find_spec(name) is None]
    if missing:
        return f"needs {' and '.join(missing)}"
    for name, least in (("steps", 2), ("every", 1)):
        value = getattr(arguments, name)
        if value is not None and value < least:
            return f"--{name} is {value}, expected at least {least}"
    if arguments.self_test or arguments.reference:
        return None
    try:
        with tile_mass():
            return None
    except RuntimeError as error:
        return f"{error}; --reference counts on any device, --self-test runs a tiny model on the CPU"


def _write(result, path, plots):
    """Table and picture beside the result file."""
    path.with_suffix(".md").write_text(tiles_report.markdown(result))
    written = [path, path.with_suffix(".md")]
    if plots is None:
        plots = importlib.util.find_spec("matplotlib") is not None
    if plots:
        written.append(path.with_suffix(".png"))
        tiles_report.picture(result).savefig(written[-1], dpi=130)
    print("written: " + ", ".join(map(str, written)), file=sys.stderr)


def main(argv=None):
    """Trains and reports with the given arguments (default: those of the process); returns the exit code."""
    arguments = _parser().parse_args(argv)
    complaint = _complaint(arguments)
    if complaint is not None:
        print(f"liger bench --tiles: {complaint}", file=sys.stderr)
        return 2
    if arguments.source is not None:
        result = json.loads(arguments.source.read_text())
        if not isinstance(result, dict) or "tokenizer_entries" not in result:
            print(f"liger bench --tiles: {arguments.source}: no result of this command", file=sys.stderr)
            return 2
        _write(result, arguments.source, arguments.plots)
        return 0

    device = "cuda" if torch.cuda.is_available() and not arguments.self_test else "cpu"
    size = SELF_TEST if arguments.self_test else SIZES[arguments.size]
    if arguments.steps is not None:
        size = dataclasses.replace(size, steps=arguments.steps)
    reference = arguments.reference or arguments.self_test
    name = "self-test" if arguments.self_test else arguments.size
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    backends = ("cuda",) if device == "cuda" else ("torch",)
    facts = environment(Options(device, f"tiles {name}", backends, dtype=dtype))
    facts["transformers"] = importlib.metadata.version("transformers")

    batches, entries = token_batches(size)
    result = {
        "environment": facts,
        "counted_by": "reference" if reference else "engine",
        "thresholds": TileMassCounts.thresholds,
        "size": size.as_dict(),
        "tokenizer_entries": entries,
        "steps": [],
    }
    stem = re.sub(r"[^\w.]+", "-", f"{facts['date'][:16].replace(':', '')}-{facts['device']}-tiles-{name}")
    path = arguments.json or RESULTS / f"{stem}.json"
    path.parent.mkdir(parents=True, exist_ok=True)

    def save(records):
        result["steps"] = records
        path.write_text(json.dumps(result, indent=1) + "\n")

    backend = liger.use_backend("cuda") if device == "cuda" and not reference else contextlib.nullcontext()
    try:
        with backend:
            train(size, device, batches, arguments.every, reference, save)
    except NotFinite as error:
        print(f"liger bench --tiles: {error}", file=sys.stderr)
        return 1
    print(tiles_report.markdown(result))
    _write(result, path, arguments.plots)
    return 0


if __name__ == "__main__":
    sys.exit(main())
