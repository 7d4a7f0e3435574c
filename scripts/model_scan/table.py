# SPDX-License-Identifier: BSD-3-Clause
"""docs/reference/models.md: the reports of a scan as a page of Markdown. The same reports give the same
text."""

from __future__ import annotations

from typing import Any

import transformers

from .checks import CHECKS
from .comparison import GRADIENT_TOLERANCE, LOSS_TOLERANCE

_INTRODUCTION = """# Models

Written by `make models MODELS_ARGS="--write docs/reference/models.md"`, not by hand.
transformers {version}: {tried} language model classes, of which {built} were built as tiny random models;
{fused} of these compute their loss in the lm_head.

Every model was compared on the CPU in float32 with a copy that `liger.patch` had changed. **Equal** means: the loss
within {loss:g} of its value, and every gradient within {gradient:g} of its largest element. Where a model amplifies
rounding errors beyond that, it means: at most three times as far from float64 as the unpatched model, whose weights are
also changed by one rounding.

| check | what is compared |
|---|---|
| training | loss and all gradients, in training mode, with and without a padding mask |
| arguments | the same with `num_items_in_batch`, `shift_labels`, `ignore_index`, `logits_to_keep`, `output_hidden_states`, `output_attentions`, `output_router_logits`, `return_dict=False` and `use_cache=True`, as far as the model takes them |
| ignored labels | the same with a row that has no labels |
| evaluation | loss and logits in evaluation mode |
| generate | four tokens of a greedy generation |
| images | training with an image in every row |
| packed positions | training with `position_ids` that restart within a row |
| dropout | training with every dropout of the configuration at 0.2 and the same seed |
| checkpointing | training with gradient checkpointing, both kinds |
| large weights | training with every matrix times 6; tolerances times 30 |
| bfloat16 | training in bfloat16 against float32: at most twice the error of the unpatched model, or 1% |
| resized vocabulary | training after `resize_token_embeddings`, before and after patching |
| unpatch | the classes and, bit by bit, the numbers after `liger.unpatch` |

A number in brackets refers to the [reasons](#reasons). Counts are of the tiny models, which have a layer of every kind.

| model type | class | loss | replaced | not replaced | checks |
|---|---|---|---|---|---|
"""  # noqa: E501

COLUMNS = 6


def render(reports: list[dict[str, Any]]) -> str:
    """The page for the reports of :func:`model_scan.runner.scan`."""
    built = [report for report in reports if "not built" not in report]
    reasons = _reasons(built)
    numbers = {reason: number for number, reason in enumerate(reasons, 1)}
    lines = [
        introduction(
            transformers.__version__,
            len(reports),
            len(built),
            sum(report["loss"] == "fused" for report in built),
        )
    ]
    lines += [_line(row(report, numbers)) for report in built]
    lines += ["", "## Reasons", ""]
    lines += [f"{number}. {_escaped(reason)}" for reason, number in numbers.items()]
    others = [report for report in reports if "not built" in report]
    if others:
        lines += ["", "## Not built", "", "| model type | class | reason |", "|---|---|---|"]
    lines += [
        _line((f"`{report['type']}`", f"`{report['class']}`", _escaped(report["not built"])))
        for report in others
    ]
    return "\n".join(lines) + "\n"


def introduction(version: str, tried: int, built: int, fused: int) -> str:
    """The text above the rows, and the head of their table."""
    return _INTRODUCTION.format(
        version=version,
        tried=tried,
        built=built,
        fused=fused,
        loss=LOSS_TOLERANCE,
        gradient=GRADIENT_TOLERANCE,
    ).rstrip("\n")


def row(report: dict[str, Any], numbers: dict[str, int]) -> tuple[str, ...]:
    """The cells of one model. ``numbers``: of the reasons."""
    left = dict(report["left"])
    loss = report["loss"]
    if loss != "fused":
        left[loss] = left.get(loss, 1) - 1
        loss = f"no [{numbers[loss]}]"
    kinds = {k: n for k, n in report["replaced"].items() if k != "fused_linear_cross_entropy"}
    others = [f"{count} [{numbers[reason]}]" for reason, count in left.items() if count]
    others += [f"{count} {what}" for what, count in report["not looked at"].items()]
    return (
        f"`{report['type']}`",
        f"`{report['class']}`",
        loss,
        ", ".join(f"{count} {kind}" for kind, count in kinds.items()) or "-",
        ", ".join(map(_escaped, others)) or "-",
        _checks(report["checks"], numbers),
    )


def _checks(results, numbers):
    parts = [f"{sum(result == 'equal' for result in results.values())} of {len(CHECKS)} equal"]
    for name, result in results.items():
        kind, _, reason = result.partition(": ")
        if kind == "not run":
            parts.append(f"{name} not run [{numbers[reason]}]")
        elif kind == "differs":
            parts.append(f"**{name} differs** [{numbers[reason]}]")
    return "; ".join(parts)


def _reasons(reports):
    found = set()
    for report in reports:
        found |= report["left"].keys()
        if report["loss"] != "fused":
            found.add(report["loss"])
        found |= {r.partition(": ")[2] for r in report["checks"].values() if r != "equal"}
    return sorted(found)


def _line(cells):
    return f"| {' | '.join(cells)} |"


def _escaped(text):
    return text.replace("|", "\\|")
