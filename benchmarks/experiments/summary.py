# SPDX-License-Identifier: BSD-3-Clause
"""The tables of README and docs/start/speed.md, from the results of several experiments."""

from liger_bench.environment import CHECKOUT
from liger_bench.reports import stale
from liger_bench.reports.verdict import time_of

from . import ops, results, tables
from .cells import COMPILED
from .recomputation import RELEASED
from .results import GIB
from .small_batches import REDUCED

README = CHECKOUT / "README.md"
SPEED = CHECKOUT / "docs" / "start" / "speed.md"
NOT_MEASURED = "*Not measured yet.*"
# The results of some rows under a torch that is newer than the torch of all others.
NEWEST = "newest"
MODELS = ("Llama-3.2-1B", "Qwen3-1.7B", "Gemma-3-1B", "Qwen3-30B-A3B, 4 layers", "Llama-3-8B")
MIXTURES = ("Mixtral-8x7B, 2 layers", "gpt-oss-20b, 4 layers")
_1B = MODELS[0]


def _whole(shape, models=MODELS, task="full", words=""):
    return tuple(
        (f"{model}, {words}{shape.replace('x', ' x ')}", "E14", f"{model}, {task} {shape}")
        for model in models
    )


# (what, experiment, size of its cells)
IN_README = (
    *_whole("4x8192"),
    *_whole("8x1024", [_1B]),
    *_whole("1x131072", [_1B]),
    (f"{_1B}, 4 x 8192, a plan", "E16", "4x8192"),
    (f"{_1B}, 1 x 131072, a plan", "E16", "1x131072"),
    (f"{_1B}, LoRA, 4 x 1024, nothing recomputed", "E9", "LoRA, nothing recomputed"),
    (f"{_1B}, QLoRA, 4 x 1024", "E9", "QLoRA"),
    (f"{_1B}, DPO by TRL, 32 pairs of 1024", "E12", "TRL dpo 32x1024"),
)
STEPS = (
    *IN_README,
    *_whole("16x1024", MODELS[:4], "nothing recomputed", "nothing recomputed, "),
    *_whole("8x1024", (*MODELS[1:], *MIXTURES)),
    *_whole("1x131072", MODELS[1:4]),
    *_whole("1x1024"),
    (f"{_1B}, 4 x 512", "E18", "4x512"),
    (f"{_1B}, 1 x 32768, a plan", "E16", "1x32768"),
    (f"{_1B}, LoRA, 4 x 1024", "E9", "LoRA"),
    *_whole("8x1024", (_1B, MODELS[-1]), "LoRA", "LoRA, "),
    *_whole("4x8192", [_1B], "LoRA", "LoRA, "),
    *_whole("4x1024", [_1B], "DPO", "DPO by TRL, pairs, "),
    *_whole("2x8192", [_1B], "DPO", "DPO by TRL, pairs, "),
)
COLUMNS = {
    "transformers": ("transformers", "TRL"),
    "torch.compile": (COMPILED, REDUCED),
    "liger-kernel": ("liger-kernel",),
}
# Behind the name of a row with a cell of other code than the code of this checkout.
EARLIER = "\\*"
OF_EARLIER = f"Rows with {EARLIER} are of an earlier state of the code."
# The share of the largest number of tokens per second that counts as equal: steps vary by as much.
AS_FAST = 0.98
# Of liger-kernel, only on request.
OTHER_FORMS = ("liger-kernel CuTe",)


def _step(cells, reference=None):
    """The fastest of these cells, or why none has a number."""
    measured = [c for c in cells if c["status"] == "ok"]
    if not measured:
        words = {"oom": "out of memory", "failed": "fails", **tables.WORDS}
        return words[cells[0]["status"]] if cells else ""
    cell = max(measured, key=lambda c: c["tokens_per_second"])
    wrong = ", wrong loss" if tables.differs(cell, reference) else ""
    return f"{cell['tokens_per_second'] / 1e3:.1f}k, {cell['peak_bytes'] / GIB:.1f} GiB{wrong}"


def _named(what, name, cells):
    """The name of a row of these cells of an experiment."""
    return what + (EARLIER if any(stale.is_stale(name, cell) for cell in cells) else "")


def _explained(rows):
    """The sentence on rows that are marked, if there are any."""
    return f" {OF_EARLIER}" if any(row[0].endswith(EARLIER) for row in rows) else ""


def steps(folder, wanted=STEPS):
    """Of whole steps that are measured: tokens per second and peak; where liger is behind; and the machines
    of all rows.

    Of liger: the smallest of the forms that are as fast as the fastest, but for those that change more than
    the model.
    """
    rows, facts, every = [], [], {}
    for what, name, size in wanted:
        result = results.load(folder / f"{name}.json", name, False)
        cells = [c for c in results.cells_of(result, size=size) if c["method"] not in RELEASED]
        columns = [[c for c in cells if c["method"] in methods] for methods in COLUMNS.values()]
        ours = [c for c in cells if tables.is_ours(c["method"])]
        if not ours:
            continue
        fast = AS_FAST * max((c["tokens_per_second"] for c in ours if c["status"] == "ok"), default=0)
        best = min(
            (c for c in ours if c["status"] == "ok" and c["tokens_per_second"] >= fast),
            key=lambda c: c["peak_bytes"],
            default=ours[0],
        )
        plain = next((c for c in columns[0] if c["status"] == "ok"), None)
        rows.append(
            [_named(what, name, cells), *(_step(column, plain) for column in columns), _step([best], plain)]
        )
        facts += [result["environments"][c["environment"]] for c in [best] if "environment" in c]
        every |= {f"{c['method']} @ {what}": {**c, "size": what, "order": len(rows)} for c in cells}
    table = tables.markdown(["training steps", *COLUMNS, "liger"], rows)
    return f"{table}\n\n{tables.behind({'cells': every})}{_explained(rows)}", {"environments": facts}


def _ratio(theirs, mine):
    return f"{time_of(theirs) / time_of(mine):.2f}" if theirs else ""


def op_times(folder):
    """Speed and memory relative to liger-kernel, and the fastest peer: of the first row of each work of E17,
    and of all rows of models."""
    found = {}
    for cell in results.load(folder / "E17.json", "E17", False)["cells"].values():
        for row in cell.get("rows", ()):
            if row["kind"] == "device":
                work = row["name"] if row["op"] in ("heads", "experts") else row["work"]
                found.setdefault(work, (row, cell))
    rows = []
    for row, cell in found.values():
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
            [_named(row["name"].replace(" forward and backward", ""), "E17", [cell]), _ratio(theirs, mine), memory,
             f"{_ratio(row['providers'][fastest], mine)} {fastest}", ceiling]
        )  # fmt: skip
    memory, peer = "MiB, liger / liger-kernel", "x the fastest peer"
    table = tables.markdown(["forward and backward", "x liger-kernel", memory, peer, "time / ceiling"], rows)
    return table + (f"\n\n{OF_EARLIER}" if _explained(rows) else "")


def newest(folder):
    """The rows of the newest torch, which its folder has."""
    if not (folder / NEWEST).is_dir():
        return NOT_MEASURED
    of_steps, machines = steps(folder / NEWEST)
    return f"{of_steps}\n\n{op_times(folder / NEWEST)}\n\n{tables.environments(machines)}."


def blocks(folder):
    """{page: {name of a block: its text}}"""
    of_ops = tables.environments(results.load(folder / "E17.json", "E17", False))
    every, measured = steps(folder)
    shown, machines = steps(folder, IN_README)
    devices = " or ".join(dict.fromkeys(facts["device"] for facts in machines["environments"]))
    return {
        README: {"steps": f"{shown} Measured on one {devices}."},
        SPEED: {
            "steps": f"{every}\n\n{tables.environments(measured)}.",
            "ops": f"{op_times(folder)}\n\n{of_ops}.",
            "the newest torch": newest(folder),
        },
    }
