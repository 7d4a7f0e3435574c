# SPDX-License-Identifier: BSD-3-Clause
"""The tables of README and docs/start/speed.md, from the results of several experiments."""

from liger_bench.environment import CHECKOUT
from liger_bench.reports.verdict import time_of

from . import ops, results, tables
from .recomputation import RELEASED
from .results import GIB

README = CHECKOUT / "README.md"
SPEED = CHECKOUT / "docs" / "start" / "speed.md"
MODELS = ("Llama-3.2-1B", "Qwen3-1.7B", "Gemma-3-1B", "Qwen3-30B-A3B, 4 layers", "Llama-3-8B")
# The largest model has no step on the longest sequence.
OTHER_SHAPES = [(m, s) for m in MODELS for s in ("1x1024", "8x1024", "1x131072")][:-1]
# (what, experiment, size of its cells); README has the first steps that are measured.
STEPS = (
    *((f"{model}, 4 x 8192 tokens", "E14", f"{model}, full 4x8192") for model in MODELS),
    ("Llama-3.2-1B, 4 x 8192, a plan", "E16", "4x8192"),
    ("Llama-3.2-1B, 1 x 32768, a plan", "E16", "1x32768"),
    ("Llama-3.2-1B, 1 x 131072, a plan", "E16", "1x131072"),
    ("Llama-3.2-1B, LoRA, 4 x 1024, nothing recomputed", "E9", "LoRA, nothing recomputed"),
    ("Llama-3.2-1B, QLoRA, 4 x 1024", "E9", "QLoRA"),
    ("Llama-3.2-1B, DPO by TRL, 32 pairs of 1024", "E12", "TRL dpo 32x1024"),
    *((f"{m}, {s.replace('x', ' x ')} tokens", "E14", f"{m}, full {s}") for m, s in OTHER_SHAPES),
    ("Llama-3-8B, LoRA, 8 x 1024", "E14", "Llama-3-8B, LoRA 8x1024"),
)
IN_README = 5
# The share of the largest number of tokens per second that counts as equal: steps vary by as much.
AS_FAST = 0.98
# Of liger-kernel, only on request.
OTHER_FORMS = ("liger-kernel CuTe",)


def _step(cell):
    if cell is None or cell["status"] in ("missing", "failed"):
        return ""
    if cell["status"] != "ok":
        return tables.WORDS.get(cell["status"], "out of memory")
    return f"{cell['tokens_per_second'] / 1e3:.1f}k, {cell['peak_bytes'] / GIB:.1f} GiB"


def steps(folder, count=None):
    """Tokens per second and peak of whole steps; and the machines of all rows. Of liger: the smallest of the
    forms that are as fast as the fastest, but for those that change more than the model."""
    rows, facts = [], []
    for what, name, size in STEPS:
        result = results.load(folder / f"{name}.json", name, False)
        cells = {c["method"]: c for c in results.cells_of(result, size=size)}
        ours = [
            c for m, c in cells.items() if tables.is_ours(m) and c["status"] == "ok" and m not in RELEASED
        ]
        if ours:
            least = AS_FAST * max(c["tokens_per_second"] for c in ours)
            best = min((c for c in ours if c["tokens_per_second"] >= least), key=lambda c: c["peak_bytes"])
            plain = cells.get("transformers", cells.get("TRL"))
            rows.append([what, _step(plain), _step(cells.get("liger-kernel")), _step(best)])
            facts.append(result["environments"][best["environment"]])
    table = tables.markdown(["training steps", "transformers", "liger-kernel", "liger"], rows[:count])
    return table, tables.environments({"environments": facts})


def _ratio(theirs, mine):
    return f"{time_of(theirs) / time_of(mine):.2f}" if theirs else ""


def op_times(folder):
    """The first row of each work of E17: speed and memory relative to liger-kernel, and the fastest peer."""
    found = {}
    for cell in results.load(folder / "E17.json", "E17", False)["cells"].values():
        for row in cell.get("rows", ()):
            if row["kind"] == "device":
                found.setdefault(row["work"] if row["op"] != "heads" else row["name"], row)
    rows = []
    for row in found.values():
        mine, theirs = ops.best(row, "liger["), ops.best(row, "liger-kernel", OTHER_FORMS)
        right = {n: p for n, p in row["providers"].items() if p["status"] == "ok"}
        peers = [n for n, p in right.items() if p["group"] in ("liger-kernel", "other")]
        if mine is None or not peers:
            continue
        fastest = min(peers, key=lambda n: time_of(row["providers"][n]))
        memory = f"{mine.get('peak_mib') or 0:.0f} / {theirs.get('peak_mib') or 0:.0f}" if theirs else ""
        ceiling = next(
            (f"{mine['ratios'][n]:.2f} of {n}" for n in row["ceilings"] if n in mine["ratios"]), ""
        )
        rows.append(
            [row["name"].replace(" forward and backward", ""), _ratio(theirs, mine), memory,
             f"{_ratio(row['providers'][fastest], mine)} {fastest}", ceiling]
        )  # fmt: skip
    memory, peer = "MiB, liger / liger-kernel", "x the fastest peer"
    return tables.markdown(["forward and backward", "x liger-kernel", memory, peer, "time / ceiling"], rows)


def blocks(folder):
    """{page: {name of a block: its text}}"""
    of_ops = tables.environments(results.load(folder / "E17.json", "E17", False))
    every, measured = steps(folder)
    return {
        README: {"steps": steps(folder, IN_README)[0]},
        SPEED: {"steps": f"{every}\n\n{measured}.", "ops": f"{op_times(folder)}\n\n{of_ops}."},
    }
