# SPDX-License-Identifier: BSD-3-Clause
"""E13: loss curves of 100 steps in every setting of liger, from the same weights on the same text.

The reference is the unpatched model in float32, from the same bfloat16 weights. Two yardsticks say what
rounding does: the distance of the unpatched bfloat16 run from that reference, and the difference of an
unpatched run whose weights differ by one rounding each. A curve agrees if its mean distance from the
reference is at most ``FACTOR`` times the distance of the unpatched run, and if no step differs from the
unpatched run by more than ``liger demo`` allows.
"""

import contextlib
import zlib

import torch

import liger
from liger.cli._demo_report import allowed_difference
from liger_bench.models import sizes as model_sizes

from . import pictures, tables, text, training
from .cells import Cell, Experiment
from .curve_settings import NUDGED, REFERENCE, SETTINGS, UNPATCHED
from .results import cells_of, ordered

FACTOR = 1.5
STEPS = 100
# Family -> (name of the size, batch, sequence): four layers of Llama-3.2-1B's and of Qwen3-1.7B's width.
SIZES = {"llama": ("Llama, 4 layers", 8, 512), "qwen3": ("Qwen3, 4 layers", 4, 512)}
CONFIGS = {
    "llama": {**model_sizes.FULL.config, "num_hidden_layers": 4},
    # With the vocabulary of the Llama, so that both have one tokenizer.
    "qwen3": {
        "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 4,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0, "max_position_embeddings": 40960,
    },
}  # fmt: skip
TINY = {**model_sizes.SELF_TEST.config, "num_hidden_layers": 4}
TINY_STEPS, TINY_BATCH, TINY_SEQUENCE = 40, 4, 16


def cells(tiny):
    return [
        Cell(
            setting.name,
            SIZES[family][0],
            order,
            {"family": family},
            setting.needs,
            setting.gpus,
            setting.seconds,
            ladder=f"{setting.name} {family}",
        )
        for order, family in enumerate(SIZES)
        for setting in SETTINGS
        if family in setting.families and not (tiny and setting.needs_gpu)
    ]


def make_model(family, dtype, machine):
    """The model with weights that are numbers of bfloat16, whatever its dtype."""
    import transformers

    settings = {**(TINY if machine.tiny else CONFIGS[family]), "tie_word_embeddings": True}
    name = family.capitalize()
    config = getattr(transformers, f"{name}Config")(**settings, use_cache=False, attn_implementation="sdpa")
    torch.manual_seed(0)
    with torch.device(machine.device):
        model = getattr(transformers, f"{name}ForCausalLM")(config)
    return model.to(torch.bfloat16).to(dtype).train()


def measure(cell, machine):
    family = cell.settings["family"]
    setting = next(s for s in SETTINGS if s.name == cell.method)
    model = make_model(family, getattr(torch, setting.dtype), machine)
    setting.patch(model)
    _, batch, sequence = SIZES[family]
    steps = STEPS
    if machine.tiny:
        steps, batch, sequence = TINY_STEPS, TINY_BATCH, TINY_SEQUENCE
    batches = text.batches(machine, model.config.vocab_size, steps, batch, sequence)
    context = contextlib.nullcontext()
    if setting.ours:
        context = liger.use_backend(training.backend(machine))
    if machine.gpu:
        torch.cuda.empty_cache()  # The model was made in float32.
        torch.cuda.reset_peak_memory_stats()
    with context:
        losses = torch.stack(setting.steps(model, list(batches), machine))
    # Tokenizers of two runs may differ, where pairs of tokens are equally frequent.
    text_read = zlib.crc32(batches.to("cpu", torch.int64).numpy().tobytes())
    record = {"losses": losses.float().tolist(), "text": text_read}
    if machine.gpu:
        record["peak_bytes"] = torch.cuda.max_memory_allocated()
    if setting.ours:
        record["plan"] = liger.transformers.patch_report(model).checkpointing
    return record


# --- report -------------------------------------------------------------------------------------------------


def _apart(one, other):
    return [abs(a - b) for a, b in zip(one, other, strict=True)]


def _mean(values):
    return sum(values) / len(values)


def verdicts(curves):
    """{method: dict} of the losses of one size.

    ``distance`` is the mean distance from the float32 run, ``ratio`` that distance in units of the unpatched
    run's; ``largest`` is the largest difference from the unpatched run, ``allowed`` its limit. All but the
    first are None without the runs that they compare with; ``agrees`` then is None, too.
    """
    reference, plain, nudged = (curves.get(name) for name in (REFERENCE, UNPATCHED, NUDGED))
    if reference is None:
        return {}
    found = {}
    for method, losses in curves.items():
        if method == REFERENCE:
            continue
        one = {"distance": _mean(_apart(losses, reference)), "ratio": None, "largest": None}
        one |= {"allowed": None, "agrees": None}
        if plain is not None:
            one["ratio"] = one["distance"] / _mean(_apart(plain, reference))
            differences = _apart(losses, plain)
            one["largest"] = max(differences)
            if nudged is not None:
                one["allowed"] = allowed_difference(plain, nudged)
                # Compares each step: max() may ignore a NaN, but every comparison with NaN is false.
                small = all(difference <= one["allowed"] for difference in differences)
                one["agrees"] = small and one["ratio"] <= FACTOR
        found[method] = one
    return found


def curves_of(result, size):
    """{method: losses} of the cells that have read the same text as the newest one; others cannot be
    compared."""
    found = [c for c in cells_of(result, size=size) if c["status"] == "ok"]
    text_read = max(found, key=lambda c: c.get("date", ""), default={}).get("text")
    return {c["method"]: c["losses"] for c in found if c.get("text") == text_read}


def _number(value, style):
    return "" if value is None else format(value, style)


def _row(cell, verdict, own):
    """``own``: the run is a yardstick itself, and has no verdict."""
    first, last = cell["losses"][0], cell["losses"][-1]
    word = {True: "agrees", False: "**DISAGREES**", None: ""}[None if own else verdict.get("agrees")]
    return [
        cell["method"], f"{first:.4f} to {last:.4f}", _number(verdict.get("distance"), ".1e"),
        _number(verdict.get("ratio"), ".2f"), _number(verdict.get("largest"), ".1e"), word,
    ]  # fmt: skip


def table(result):
    parts = [
        "*Distance*: mean distance of the losses from the float32 run, and relative to the distance of the unpatched "
        f"bfloat16 run, allowed up to {FACTOR}. *Difference*: the largest from the unpatched bfloat16 run; a run "
        "differs by at most four times the *nudged* run, a run with weights that differ by one rounding each."
    ]
    for size in ordered(result, "size"):
        found = verdicts(curves_of(result, size))
        rows = []
        for cell in cells_of(result, size=size):
            word = tables.shape(cell)
            if word is not None:
                rows.append([cell["method"], word, "", "", "", ""])
                continue
            own = cell["method"] in (REFERENCE, UNPATCHED, NUDGED)
            rows.append(_row(cell, found.get(cell["method"], {}), own))
        allowed = next((v["allowed"] for v in found.values() if v["allowed"] is not None), None)
        limit = "" if allowed is None else f", allowed {allowed:.1e}"
        header = [size, "loss", "distance", "in units of unpatched", f"difference{limit}", ""]
        parts.append(tables.markdown(header, rows))
    return "\n\n".join(parts)


def _color(method):
    shades = {UNPATCHED: "transformers", NUDGED: "nudged", "liger-kernel": "liger-kernel"}
    return pictures.COLORS[shades.get(method, "liger")]


def draw(result):
    """A dot per setting: its distance from the float32 run in units of the unpatched run's, and the limit."""
    sizes = ordered(result, "size")
    found = {size: verdicts(curves_of(result, size)) for size in sizes}
    count = sum(map(len, found.values()))
    made, axes = pictures.figure(
        0.24 * count + 0.9 * len(sizes) + 1.0, rows=len(sizes), sharex=True, source=pictures.source(result),
        title="How far from float32 is each setting, relative to the unpatched run?",
        height_ratios=[len(of_size) + 2 for of_size in found.values()],
    )  # fmt: skip
    for panel, (size, of_size) in zip(axes[:, 0], found.items(), strict=True):
        methods = [method for method, one in of_size.items() if one["ratio"] is not None]
        for place, method in enumerate(methods):
            panel.plot(of_size[method]["ratio"], place, "o", color=_color(method), markersize=6)
        panel.set_yticks(range(len(methods)), map(pictures.named, methods), fontsize=8)
        panel.set_ylim(len(methods) - 0.4, -0.6)
        panel.axvline(FACTOR, color="black", linewidth=0.8, linestyle=(0, (3, 2)))
        panel.set_title(size, loc="left", fontsize=9)
        panel.grid(axis="x", color="#eeeeee")
    panel.set_xlim(left=0)
    panel.set_xlabel(f"mean distance, unpatched = 1; limit {FACTOR}", fontsize=9)
    return {"": made}


EXPERIMENT = Experiment("E13", "Loss curves of every setting", cells, measure, table, draw)
