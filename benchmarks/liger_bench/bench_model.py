"""Training steps of a Llama, unpatched, compiled, with liger-kernel and with liger: tokens per second, peak memory.

The shape is that of Llama-3.2-1B: tied embeddings, bfloat16 weights, fused AdamW, gradient checkpointing, SDPA; with
options that of Llama-3-8B, and no checkpointing, where ``liger.patch(recompute=True)`` takes part, too. Weights and
tokens are random, the same for every contestant. All models live side by side and take turns of a few steps, so that a
chip which lowers its clock slows all of them alike; with ``--only`` one may have a process of its own. The memory of a
contestant is what its weights, gradients, optimizer and activations take at the peak of a step; the models that wait
are not counted.

``--graphs`` adds contestants of liger whose whole step is a CUDA graph. Their peak is that of the capture.

``--memory`` adds contestants whose layers are recomputed as ``liger.transformers.checkpoint`` plans, with and without
``recompute=True``. Their limit counts the models that wait as well, so each needs a process of its own (``--only``).
"""

import argparse
import contextlib
import gc
import importlib.metadata
import importlib.util
import json
import re
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from .captured_step import CapturedStep
from .environment import environment
from .harness import Options
from .measure import PROVIDER_ERRORS, spread
from .model_contestants import captured, contestants, planned, recomputing

GIB = 1024**3
# Allowed relative difference of the first loss from that of the unpatched model.
SAME_LOSS = 2e-3


@dataclass(frozen=True)
class Size:
    config: dict
    shapes: tuple[tuple[int, int], ...]  # (batch, sequence)
    dtype: torch.dtype
    warm_up: int  # steps of each contestant before a shape is measured
    rounds: int
    burst: int  # consecutive steps between two synchronisations
    checkpointing: bool = True


FULL = Size(
    {
        "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0, "max_position_embeddings": 131072,
    },
    shapes=((4, 1024), (32, 1024), (4, 8192)),
    dtype=torch.bfloat16,
    warm_up=2,
    rounds=5,
    burst=2,
)  # fmt: skip
FULL_8B = replace(
    FULL,
    config={
        **FULL.config, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "head_dim": 128,
        "tie_word_embeddings": False, "max_position_embeddings": 8192,
    },
    shapes=((32, 512),),
)  # fmt: skip
SELF_TEST = Size(
    {
        "vocab_size": 512, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64,
    },
    shapes=((2, 16), (1, 32)),
    dtype=torch.float32,
    warm_up=1,
    rounds=2,
    burst=1,
)  # fmt: skip


# --- a contestant at work -----------------------------------------------------------------------------------------


class Trainee:
    """The model and optimizer of a contestant, or the reason why it failed."""

    def __init__(self, contestant, size, device):
        self.contestant, self.size, self.device = contestant, size, device
        self.failure, self.samples, self.host, self.peak, self.loss = None, [], [], None, None
        missing = [name for name in contestant.needs if importlib.util.find_spec(name) is None]
        if missing:
            self.failure = "missing", f"not installed: {', '.join(missing)}"

    def attempt(self, action, *arguments):
        """Runs a part of the benchmark for this contestant; an exception of its code is recorded as its result."""
        if self.failure is not None:
            return
        try:
            with self.contestant.context(), self._globals():
                action(*arguments)
        except PROVIDER_ERRORS as error:
            self.failure = "failed", f"{type(error).__name__}: {error}".strip()[:600]
            self.model = self.call = self.optimizer = None

    @contextlib.contextmanager
    def _globals(self):
        """Context manager: the contestant's replacements in the module of the model are active only inside."""
        from transformers.models.llama import modeling_llama

        names = vars(modeling_llama)
        before = dict(names)
        names.update(getattr(self, "_replaced", {}))
        try:
            yield
        finally:
            self._replaced = {
                name: value for name, value in names.items() if name in before and before[name] is not value
            }
            names.update({name: before[name] for name in self._replaced})

    def make_model(self):
        """The model before the contestant prepares it, with the same weights for every contestant."""
        from transformers import LlamaConfig, LlamaForCausalLM

        settings = {"tie_word_embeddings": True, **self.size.config}
        config = LlamaConfig(**settings, use_cache=False, attn_implementation="sdpa")
        torch.manual_seed(0)
        with torch.device(self.device):
            return LlamaForCausalLM(config).to(self.size.dtype).train()

    def make_optimizer(self, parameters):
        captured = self.contestant.captured
        return torch.optim.AdamW(parameters, lr=1e-5, fused=True, capturable=captured)

    def build(self):
        self.model = self.make_model()
        captured = self.contestant.captured
        if self.size.checkpointing and self.contestant.checkpointing:
            # The state of the random generator cannot be read during a capture, and this model has no dropout.
            settings = {"preserve_rng_state": False} if captured else {}
            self.model.gradient_checkpointing_enable({"use_reentrant": False, **settings})
        self.call = self.contestant.prepare(self.model)
        self.optimizer = self.make_optimizer(self.model.parameters())
        self.step = CapturedStep(self.eager_step) if captured else self.eager_step

    def eager_step(self, tokens):
        loss = self.call(input_ids=tokens, labels=tokens).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def idle_bytes(self):
        """Bytes of model and optimizer between steps."""
        states = [value for state in self.optimizer.state.values() for value in state.values()]
        kept = [*self.model.parameters(), *self.model.buffers(), *filter(torch.is_tensor, states)]
        return sum({t.data_ptr(): t.nbytes for t in kept if t.device.type == self.device}.values())

    def warm_up(self, batches):
        count = max(self.size.warm_up, self.contestant.warm_up)
        if self.contestant.captured:
            losses = self.step.warm_up(batches[0])
            others = torch.cuda.memory_allocated() - self.idle_bytes()
            self.peak = self.step.capture(batches[0]) - others
        else:
            losses = [self.step(batches[i % len(batches)]) for i in range(count)]
        if self.loss is None:
            self.loss = losses[0].item()

    def burst(self, batches, first):
        """Runs some steps between two synchronisations; records time and host time per step, and peak memory."""
        gpu, count = self.device == "cuda", self.size.burst
        if gpu:
            torch.cuda.synchronize()
            others = torch.cuda.memory_allocated() - self.idle_bytes()
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        for i in range(first, first + count):
            self.step(batches[i % len(batches)])
        issued = time.perf_counter()
        if gpu:
            torch.cuda.synchronize()
            self.peak = max(self.peak or 0, torch.cuda.max_memory_allocated() - others)
        self.samples.append((time.perf_counter() - start) * 1e3 / count)
        self.host.append((issued - start) * 1e3 / count)

    def record(self, reference):
        """Returns the measurements of one shape and clears them."""
        record = {"group": self.contestant.group, "status": "ok"}
        if self.failure is not None:
            record["status"], record["reason"] = self.failure
        elif reference is not None and not abs(self.loss / reference - 1) <= SAME_LOSS:
            record.update(status="wrong", reason=f"loss {self.loss:.5g}, unpatched {reference:.5g}")
        if self.samples and self.failure is None:
            record.update(
                first_loss=self.loss, ms=spread(self.samples), host_ms=spread(self.host), peak_bytes=self.peak
            )
        self.samples, self.host, self.peak = [], [], None
        return record


# --- measuring ----------------------------------------------------------------------------------------------------


def _measure_shape(trainees, size, shape, device):
    generator = torch.Generator().manual_seed(1)
    vocabulary = size.config["vocab_size"]
    batches = [torch.randint(vocabulary, shape, generator=generator).to(device) for _ in range(3)]
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


def measure(size, device, backends, compile=False, shapes=None, memories=(), only=None, graphs=False):
    """One record per shape: step time, tokens per second and peak memory of each contestant, or its error.

    Args:
        memories: (name, memory) of contestants with planned checkpointing.
        only: the names of the contestants that take part; None for all.
        graphs: the contestants of liger again, each step a CUDA graph.
    """
    entered = contestants(backends, compile) + ([] if size.checkpointing else recomputing(backends))
    entered += captured(entered) if graphs else []
    entered += planned(backends, memories)
    unknown = set(only or ()) - {contestant.name for contestant in entered}
    if unknown:
        raise ValueError(f"no contestant {sorted(unknown)}, expected {[c.name for c in entered]}")
    trainees = [Trainee(c, size, device) for c in entered if only is None or c.name in only]
    for trainee in trainees:
        trainee.attempt(trainee.build)
    records = []
    for shape in shapes or size.shapes:
        start = time.perf_counter()
        records.append(_measure_shape(trainees, size, shape, device))
        print(f"  {_name(records[-1])}: {time.perf_counter() - start:.1f} s", file=sys.stderr, flush=True)
        if device == "cuda":
            gc.collect()
            torch.cuda.empty_cache()
    return records


# --- report -------------------------------------------------------------------------------------------------------


def _name(record):
    return f"B={record['batch']} T={record['sequence']}"


def tokens_per_second(record, provider):
    return record["batch"] * record["sequence"] / provider["ms"]["median"] * 1e3


def _lines(record):
    for name, provider in record["providers"].items():
        if provider["status"] == "missing":
            continue
        if "ms" not in provider:
            yield f"| {name} | failed: {provider['reason'].splitlines()[0][:160]} | | | | |"
            continue
        ms, peak = provider["ms"], provider["peak_bytes"]
        yield (
            f"| {name}{'' if provider['status'] == 'ok' else ' (WRONG LOSS)'} | {ms['median']:.1f} "
            f"| {ms['q25']:.1f} - {ms['q75']:.1f} | {provider['host_ms']['median']:.1f} "
            f"| {tokens_per_second(record, provider) / 1e3:.1f} | {'-' if peak is None else f'{peak / GIB:.2f}'} |"
        )


def verdict(record):
    """One line: the fastest contestant with liger against the fastest and the smallest other; None without both."""
    measured = {n: p for n, p in record["providers"].items() if p["status"] == "ok"}
    mine = {n: p for n, p in measured.items() if p["group"] == "ours"}
    others = {n: p for n, p in measured.items() if p["group"] != "ours"}
    if not mine or not others:
        return None

    def speed(name):
        return tokens_per_second(record, measured[name])

    best, rival = max(mine, key=speed), max(others, key=speed)
    line = f"{best}: {speed(best) / speed(rival):.3f}x the tokens/s of {rival}"
    if measured[best]["peak_bytes"] is not None:
        small = min(others, key=lambda name: measured[name]["peak_bytes"])
        line += f", {measured[best]['peak_bytes'] / measured[small]['peak_bytes']:.3f}x the memory of {small}"
    return line


def markdown(facts, records, size=FULL):
    """The environment and one table per shape."""
    known = (f"{name} {value}" for name, value in facts.items() if value not in (None, False))
    shape = "Llama-3-8B" if size.config is FULL_8B.config else "Llama-3.2-1B"
    without = "" if size.checkpointing else ", without checkpointing"
    parts = [f"# Training steps of {shape}'s shape{without}", "; ".join(known)]
    header = (
        "| | ms per step | quartiles | host ms | thousand tokens/s | peak GiB |\n|---|---|---|---|---|---|"
    )
    for record in records:
        parts += [f"## {_name(record)}", "\n".join([header, *_lines(record)])]
        if (line := verdict(record)) is not None:
            parts.append(line)
    return "\n\n".join(parts) + "\n"


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


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "shapes", nargs="*", type=parse_shape, metavar="BATCHxTOKENS", help="default: 4x1024 32x1024 4x8192"
    )
    parser.add_argument("--compile", action="store_true", help="compiled models as well (minutes to start)")
    parser.add_argument("--size", choices=("1b", "8b"), default="1b", help="default %(default)s")
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
    parser.add_argument("--json", type=Path, help="where the results go as well, as JSON and Markdown")
    parsed = parser.parse_args(arguments)
    if not parsed.self_test and not torch.cuda.is_available():
        parser.error("no CUDA device; --self-test runs a tiny model on the CPU")
    full = FULL_8B if parsed.size == "8b" else FULL
    size, device = (SELF_TEST, "cpu") if parsed.self_test else (full, "cuda")
    size = replace(size, checkpointing=not parsed.no_checkpointing)
    backends = ["torch"] if parsed.self_test else parsed.backends.split(",")
    options = Options(
        device, "self-test" if parsed.self_test else "full", tuple(backends), parsed.compile, dtype=size.dtype
    )
    facts = {**environment(options), "transformers": importlib.metadata.version("transformers")}
    try:
        records = measure(
            size, device, backends, parsed.compile, parsed.shapes, parsed.memory, parsed.only, parsed.graphs
        )
    except ValueError as error:
        parser.error(str(error))
    print(markdown(facts, records, size))
    if parsed.json:
        parsed.json.write_text(json.dumps({"environment": facts, "rows": records}, indent=1) + "\n")
        parsed.json.with_suffix(".md").write_text(markdown(facts, records, size))
    bad = [
        p for r in records for p in r["providers"].values() if p["group"] == "ours" and p["status"] != "ok"
    ]
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
