# SPDX-License-Identifier: BSD-3-Clause
"""E15: 1 to 8 GPUs of one host: a vocabulary-parallel head, training steps under FSDP2 with as much work for
each GPU, and steps on one long sequence whose tokens are spread over the GPUs.

Every step also counts the bytes that a rank sends (liger_bench.devices.traffic).
"""

from dataclasses import replace

import torch
import torch.distributed as dist

from liger.transformers.checkpointing.checkpoint import planners
from liger_bench.devices import on_ranks, traffic, ulysses, vocabulary
from liger_bench.devices.vocabulary import ONE, SHARDED
from liger_bench.environment import CHECKOUT
from liger_bench.harness import Options
from liger_bench.models import sizes
from liger_bench.models.trainee import Trainee

from . import long_context, results, sharded_training, tables, text, training
from .cells import Cell, Experiment, expected_seconds, packages
from .long_context import TILED
from .recomputation import plan_of

PAGE = CHECKOUT / "docs" / "lab" / "scaling.md"
HEAD, WEAK, LONG = "head", "FSDP2", "one sequence"
GPUS = (1, 2, 4, 8)
METHODS = ("transformers", "liger-kernel", "liger")
HEADS = tuple((op, 16384, 4096, 128256) for op in vocabulary.OPS)
# Model -> (batch, sequence) of each GPU.
WEAK_SHAPES = {"1b": (16, 1024), "8b": (16, 512)}
PLANNED = "liger, tiled MLP, planned"
# GPUs -> (model, length of the sequence, steps until a plan is about final). A cell has to end in eight
# minutes: with the most tokens four GPUs have time for full checkpointing alone, eight for three steps of a
# plan.
SEQUENCES = {
    2: (("1b", 131072, 4),),
    4: (("8b", 131072, 4), ("8b", 524288, None)),
    8: (("8b", 131072, 4), ("8b", 524288, 3)),
}
TINY_SEQUENCES = {2: (("1b", 32, None),), 4: (("8b", 32, 4),)}
# Of the speed that expected_seconds assumes, steps on one long sequence have this share on an H200 (E16).
LONG_SPEED = 0.77


def _cell(part, method, what, gpus, order, expected, seconds, **settings):
    size = f"{part} {what}, {gpus} GPU{'s' * (gpus > 1)}"
    settings |= {"part": part, "what": what}
    # Other numbers of GPUs need another memory: only longer sequences follow from shorter ones.
    ladder = f"{method} {part} {settings['model']} {gpus}" if part == LONG else f"{method} {size}"
    return Cell(method, size, order, settings, packages(method), gpus, seconds, ladder, expected)


def _long_cells(gpus, model, length, steps):
    """Steps on one sequence with full checkpointing; with a plan that has so many steps to settle, if any."""
    for method, warm_up in ((TILED, 2), (PLANNED, steps)):
        if warm_up is not None:
            expected = expected_seconds(model, 1, length, method, warm_up) / gpus / LONG_SPEED
            given = {"model": model, "batch": 1, "sequence": length, "warm_up": warm_up}
            what = f"{model.upper()} 1x{length}"
            yield _cell(LONG, method, what, gpus, length, round(15 + expected), 470, **given)


def cells(tiny):
    """Few GPUs first: a loan of fewer GPUs then leaves the rest for another one."""
    made = []
    for gpus in (1, 2, 4) if tiny else GPUS:
        if gpus > 1:
            for head in [(op, 64, 16, 50) for op in vocabulary.OPS] if tiny else HEADS:
                op, tokens, hidden, classes = head
                what = f"{op} {tokens}x{hidden}x{classes}"
                made.append(_cell(HEAD, "liger", what, gpus, gpus, 12, 180, head=head))
        for model, (batch, sequence) in ({"1b": (2, 16)} if tiny else WEAK_SHAPES).items():
            what = f"{model.upper()} {batch}x{sequence}"
            given = {"model": model, "batch": batch, "sequence": sequence}
            for method in METHODS:
                expected = 5 + expected_seconds(model, batch, sequence, method)
                made.append(_cell(WEAK, method, what, gpus, gpus, expected, 240, **given))
        for sequence in (TINY_SEQUENCES if tiny else SEQUENCES).get(gpus, ()):
            made += _long_cells(gpus, *sequence)
    return made


# --- measuring ----------------------------------------------------------------------------------------------


class OnSequence(training.Training):
    """A Training on a sequence whose tokens are spread over the ranks."""

    def make_model(self):
        return ulysses.enable(super().make_model())

    def eager_step(self, tokens):
        loss = self.call(**ulysses.inputs(tokens)).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()


def _contestant(cell, machine):
    if cell.method == PLANNED:
        return replace(long_context.planned(machine, "auto", None), warm_up=cell.settings["warm_up"])
    if cell.method == TILED:
        return training.patched(machine, tiled_mlp=True)
    return training.contestant(cell.method, machine)


def measure(cell, machine):
    sharded_training.start(machine)
    record = _head(cell, machine) if cell.settings["part"] == HEAD else _step(cell, machine)
    dist.destroy_process_group()
    return {**record, "ranks": cell.gpus}


def _head(cell, machine):
    head = vocabulary.Head(*cell.settings["head"])
    backend = training.backend(machine)
    options = Options(device=machine.device.partition(":")[0], size="full", backends=(backend,))
    if machine.tiny:
        options = replace(options, dtype=torch.float32)
    (found,) = vocabulary.measure_all([head], options, 7, cell.seconds / 2, torch.device(machine.device))
    if found["status"] != "ok":
        raise RuntimeError(f"relative error {found['error']:.2g}")
    work = vocabulary.works(head, head.inputs(options))[SHARDED]
    with traffic.Traffic() as counted:
        work.run()
    found["sent_bytes"] = counted.total
    found["predicted_sent_bytes"] = traffic.vocabulary(head.tokens, head.hidden, cell.gpus)
    del found["status"]
    return found


def _step(cell, machine):
    given, long = cell.settings, cell.settings["part"] == LONG
    size = training.size_of(given["model"], machine)
    if long and not machine.tiny:
        size = replace(size, config={**size.config, "max_position_embeddings": given["sequence"]})
    made = (OnSequence if long else training.Training)(_contestant(cell, machine), size, machine)
    ranks, rank = cell.gpus, dist.get_rank()
    count = training.STEPS * (1 if long else ranks)
    batches = text.batches(machine, size.config["vocab_size"], count, given["batch"], given["sequence"])
    batches = batches if long else batches[rank::ranks]
    with made.contestant.context():
        made.build()
        parameters, kept = _parameters(made.model)
        on_ranks.shard(made.model, machine.device)
        if machine.gpu:
            torch.cuda.empty_cache()  # Each rank made the whole model in float32.
        made.optimizer = made.make_optimizer(made.model.parameters())
        last = _LastStep(made.step)
        record = sharded_training.timed_steps(last, batches, machine, made.contestant.warm_up)
    for planner in planners(made.model):
        record |= plan_of(planner)
    element = torch.empty((), dtype=size.dtype).element_size()
    predicted = traffic.fsdp2(parameters, ranks, kept, element, element)
    if long:
        layers = made.model.config.num_hidden_layers
        # Layers that keep their attention exchange nothing in the recomputation.
        forwards = 1 + record.get("layers", (layers,))[0] / layers
        predicted += _exchanged(made.model.config, given["sequence"], ranks, element, forwards)
        # Ranks share the tokens, of which timed_steps counts a batch for each.
        record["tokens_per_second"] /= ranks
    record |= {"sent_bytes": last.sent, "predicted_sent_bytes": predicted}
    return record


def _parameters(model):
    """How many there are, and how many of them are not in layers."""
    count = sum(p.numel() for p in model.parameters())
    return count, count - sum(p.numel() for p in model.model.layers.parameters())


def _exchanged(config, tokens, ranks, element=2, forwards=2):
    """Bytes that a rank sends for the attention of one sequence."""
    head, layers = config.hidden_size // config.num_attention_heads, config.num_hidden_layers
    keys = max(config.num_key_value_heads, ranks) * head
    return traffic.ulysses(tokens, config.hidden_size, keys, layers, ranks, element, forwards)


class _LastStep:
    """A step, and the bytes that its last call has sent."""

    def __init__(self, step):
        self.step = step

    def __call__(self, tokens):
        with traffic.Traffic() as counted:
            loss = self.step(tokens)
        self.sent = counted.total
        return loss


# --- report -------------------------------------------------------------------------------------------------


def parts(result):
    """{what was measured: its cells, by the number of GPUs and the method}"""
    found = {}
    for cell in sorted(result["cells"].values(), key=lambda c: c["gpus"]):
        found.setdefault(cell["size"].rpartition(",")[0], []).append(cell)
    return found


def per_gpu(cell):
    return cell["tokens_per_second"] / cell["gpus"]


def _sent(cell):
    return f"{cell['sent_bytes'] / 1e9:.3f} / {cell['predicted_sent_bytes'] / 1e9:.3f}"


def _head_rows(cells):
    for cell in cells:
        ratio = cell["contestants"][ONE]["ms"] / cell["contestants"][SHARDED]["ms"]
        memory = [f"{cell['contestants'][name]['peak_mib']:.0f}" for name in (ONE, SHARDED)]
        yield [str(cell["gpus"]), f"{ratio:.2f}", f"{cell['speed']:.3f}", " / ".join(memory), _sent(cell)]


def _step_rows(cells):
    alone = {c["method"]: per_gpu(c) for c in cells if c["gpus"] == 1}
    for cell in cells:
        first = alone.get(cell["method"])
        share = "" if first is None else f"{per_gpu(cell) / first:.3f}"
        peak = tables.gib(cell["peak_bytes"])
        yield [str(cell["gpus"]), cell["method"], f"{per_gpu(cell):.0f}", share, peak, _sent(cell)]


def table(result):
    """A table of each part. Only what was measured has a row."""
    texts = []
    for what, cells in parts(result).items():
        done = [c for c in cells if c["status"] == "ok"]
        others = [f"{c['method']} on {c['gpus']}: {tables.shape(c)}" for c in cells if c["status"] != "ok"]
        texts.append(f"**{what}**")
        if what.startswith(HEAD):
            header = ["GPUs", "x one GPU", "of ideal", "peak MiB, one GPU / each", "GB sent / predicted"]
            rows = _head_rows(done)
        else:
            header = [
                "GPUs",
                "method",
                "tokens/s per GPU",
                "of one GPU",
                "peak of a rank",
                "GB sent / predicted",
            ]
            rows = _step_rows(done)
        texts.append(tables.markdown(header, rows))
        texts += [f"{c['method']} on {c['gpus']}: {c['plan']}." for c in done if "plan" in c]
        if others:
            texts.append(f"{'; '.join(others)}.")
    return "\n\n".join(texts)


def blocks(folder):
    """{page: {name of a block: its text}}: what the measured steps of one host say about several hosts."""
    result = results.load(folder / "E15.json", "E15", False)
    steps = [step for cell in cells(False) for step in _projected(cell, result["cells"].get(cell.key, {}))]
    lines = [tables.markdown(*traffic.projections(steps))]
    if any(step.seconds is None for step in steps):
        lines.append("Steps without a time are not measured yet.")
    if result["environments"]:
        lines.append(f"{tables.environments(result)}.")
    return {PAGE: {"projections": "\n\n".join(lines)}}


def _projected(cell, record):
    """The Step of a cell: steps of one GPU, and steps on a sequence that all GPUs of a host share."""
    host, given = traffic.H100.per_host, cell.settings
    is_long = (given["part"], cell.method, cell.gpus) == (LONG, TILED, host)
    if is_long or (given["part"], cell.method, cell.gpus) == (WEAK, "liger", 1):
        model = Trainee(None, sizes.size_of(given["model"]), "meta").make_model()
        yield traffic.Step(
            given["what"] + f" on {host} GPUs" * is_long,
            *_parameters(model),
            model.config.num_hidden_layers,
            record["ms"]["median"] / 1e3 if record.get("status") == "ok" else None,
            _exchanged(model.config, given["sequence"], host) if is_long else 0,
        )


EXPERIMENT = Experiment("E15", "Scaling on one host", cells, measure, table, lambda result: {})
