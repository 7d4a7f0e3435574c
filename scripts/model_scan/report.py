# SPDX-License-Identifier: BSD-3-Clause
"""The report of one model class: replaced modules, the results of the checks, and whether the loss is
fused."""

from __future__ import annotations

from typing import Any

from torch import nn

from liger.transformers.head import loss_call
from liger.transformers.patching import patch

from .checks import CHECKS
from .comparison import Differs, NotRun, patched_copy, step
from .inputs import ERRORS, batch_for
from .models import NotBuilt, build


def fused_loss(patched: nn.Module) -> bool:
    """True if a step of the model computes its loss in the head."""
    calls, before, batch = [], loss_call.fused_linear_ce, batch_for(patched)

    def counted(*args, **kwargs):
        calls.append(1)
        return before(*args, **kwargs)

    loss_call.fused_linear_ce = counted
    try:
        step(patched, batch)
    except (NotRun, *ERRORS):
        return False
    finally:
        loss_call.fused_linear_ce = before
    return len(calls) == 1


def run(model_type: str, class_name: str, names: tuple[str, ...] = tuple(CHECKS)) -> dict[str, Any]:
    """The report of one model class: what is replaced and left, and the result of each check by name."""
    try:
        plain = build(model_type, class_name)
    except NotBuilt as error:
        return {"type": model_type, "class": class_name, "not built": str(error)}
    patched = patched_copy(plain)
    report = patch.patch_report(patched)
    results = {}
    for name in names:
        try:
            CHECKS[name](plain, patched, model_type, class_name)
            results[name] = "equal"
        except NotRun as reason:
            results[name] = f"not run: {reason}"
        except Differs as difference:
            results[name] = f"differs: {difference}"
        except ERRORS as error:
            message = str(error).split("\n")[0][:120]
            results[name] = f"differs: the patched model raises {type(error).__name__}: {message}"
    return {
        "type": model_type,
        "class": class_name,
        "replaced": _counts(report.replaced.values()),
        "left": _counts(report.left.values()),
        "not looked at": _counts(report.not_looked_at.values()),
        "loss": "fused" if fused_loss(patched) else report.left.get("", "it has no lm_head of its own"),
        "checks": results,
    }


def _counts(values):
    counts: dict[str, int] = {}
    for value in values:
        counts[value] = counts.get(value, 0) + 1
    return dict(sorted(counts.items()))
