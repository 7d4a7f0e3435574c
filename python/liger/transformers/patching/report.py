# SPDX-License-Identifier: BSD-3-Clause
"""The report of a patched model: which parts run on liger, which do not, and why."""

import inspect
from collections import Counter
from dataclasses import dataclass, field

from torch import nn

from ..attention.rotary import is_rotary
from ..checkpointing.checkpoint import planners
from ..lora.expert_weights import why_unpatched
from ..lora.recipe import GroupRecipe
from ..mlp import activations
from ..mlp.recipe import MLPRecipe
from ..recipe import trials
from ..recipe.classes import instance_forward, overriding_forward, recipe_of, require_module
from ..recipe.recomputed import recomputes
from ..recipe.rename import globals_used

# Attribute of a module with the reason why it was not patched; copies and wrappers of the model preserve it.
LEFT = "_liger_left"
# Attribute of a module with the kind of a replacement that its option turned off.
NOT_ASKED = "_liger_not_asked"

EXPERTS, GATED_NORM, ONE_KERNEL = "experts", "gated RMS norm", "GELU of torch"
# The kind of a replacement in the words of a user.
PARTS = {
    "rope": "rotary embedding",
    "rms_norm": "RMS norm",
    "rms_norm_gated": "gated RMS norm",
    "layer_norm": "layer norm",
    "fused_add_rms_norm": "residual addition + RMS norm",
    "qk_norm_rope": "norms of q, k + rotary embedding",
    "swiglu": "gated MLP (SiLU)",
    "geglu": "gated MLP (GELU)",
    "tiled_mlp": "gated MLP, tiled",
    "experts": "MoE experts",
    "relu_squared": "squared ReLU",
    "gelu": "GELU",
    "lora_linear": "LoRA layer",
    "cross_entropy": "loss",
    "fused_linear_cross_entropy": "lm_head and loss",
    "vocab_parallel_fused_linear_cross_entropy": "vocabulary-parallel lm_head and loss",
    "trainer_loss": "lm_head and loss of the trainer",
}
LAYER = "decoder layer"
_PART_OF = {EXPERTS: "MoE experts"}
_WHY_NOT = {ONE_KERNEL: "torch computes it in one kernel that saves its input only"}


@dataclass
class PatchReport:
    """The modules of a model that run on liger and those that do not, by module name ("" is the model
    itself).

    ``print(report)`` shows a table: part, count, what was done, and why.

    Attributes:
        replaced: module name -> ``"rope"``, ``"rms_norm"``, ``"rms_norm_gated"``, ``"layer_norm"``,
            ``"fused_add_rms_norm"``, ``"qk_norm_rope"`` (an attention, whose norms have entries of their
            own), ``"swiglu"``, ``"geglu"``, ``"tiled_mlp"``, ``"experts"``, ``"relu_squared"``, ``"gelu"``,
            ``"lora_linear"``, ``"cross_entropy"``, ``"fused_linear_cross_entropy"``,
            ``"vocab_parallel_fused_linear_cross_entropy"`` if tensor parallelism shards the classes of the
            lm_head, or ``"trainer_loss"`` for a model whose lm_head was replaced by ``liger.trl.patch``.
        left: module name -> the reason why a module of a known kind was not patched.
        not_looked_at: module name -> a computation for which patching has no replacement.
        classes: module name -> name of the class, of the modules in ``left``.
        recomputed: names of the decoder layers that recompute cheap outputs in the backward
            (``recompute=True``).
        checkpointing: the plan of :func:`liger.transformers.checkpoint` in one line; empty without one.
        not_asked_for: module name -> what it would be in ``replaced``, but the option is False.

    Example::

        >>> report = liger.transformers.patch_report(liger.patch(model))
        >>> isinstance(report, liger.transformers.PatchReport), report.replaced["model.norm"]
        (True, 'rms_norm')
    """

    replaced: dict[str, str] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)
    not_looked_at: dict[str, str] = field(default_factory=dict)
    classes: dict[str, str] = field(default_factory=dict)
    recomputed: list[str] = field(default_factory=list)
    checkpointing: str = ""
    not_asked_for: dict[str, str] = field(default_factory=dict)

    @property
    def summary(self) -> str:
        """The report in one line."""
        lines = [f"{count} x {kind}" for kind, count in Counter(self.replaced.values()).items()]
        if self.recomputed:
            lines.append(f"{len(self.recomputed)} x recompute")
        lines += [
            f"left {count} as before: {reason}" for reason, count in Counter(self.left.values()).items()
        ]
        for title, found in (("not asked for", self.not_asked_for), ("not looked at", self.not_looked_at)):
            if found:
                counted = Counter(found.values()).items()
                lines.append(f"{title}: " + ", ".join(f"{count} x {what}" for what, count in counted))
        if self.checkpointing:
            lines.append(f"checkpointing: {self.checkpointing}")
        return "; ".join(lines) or "not patched: call liger.patch(model)"

    @property
    def rows(self) -> list[tuple[str, int, str, str]]:
        """(part, count, what was done, why) for every kind of part."""
        rows = [
            (PARTS.get(kind, kind), n, f"replaced ({kind})", "")
            for kind, n in Counter(self.replaced.values()).items()
        ]
        if self.recomputed:
            rows.append((LAYER, len(self.recomputed), "recomputes cheap outputs (recompute)", ""))
        left = [(self.classes.get(name, "module"), reason) for name, reason in self.left.items()]
        rows += [(part, n, "left as before", reason) for (part, reason), n in Counter(left).items()]
        rows += [
            (PARTS.get(kind, kind), n, "not asked for", "")
            for kind, n in Counter(self.not_asked_for.values()).items()
        ]
        rows += [
            (_PART_OF.get(what, what), n, "not looked at", _WHY_NOT.get(what, ""))
            for what, n in Counter(self.not_looked_at.values()).items()
        ]
        return rows

    def __str__(self) -> str:
        if not self.rows:
            return self.summary
        table = [("part", "count", "", ""), *((p, str(n), done, why) for p, n, done, why in self.rows)]
        widths = [max(len(row[column]) for row in table) for column in range(3)]
        lines = []
        for part, count, done, why in table:
            cells = part.ljust(widths[0]), count.rjust(widths[1]), done.ljust(widths[2]), why
            lines.append("  ".join(cells).rstrip())
        if self.checkpointing:
            lines.append(f"checkpointing: {self.checkpointing}")
        return "\n".join(lines)


def patch_report(model: nn.Module) -> PatchReport:
    """The current :class:`PatchReport` of a model or of any other module; empty if no module is patched.

    A module with a patched forward that was replaced afterwards (by a TRL trainer, for example) is reported
    as left.

    Args:
        model: any module; one that contains patched modules (PEFT, DDP) reports those.

    Returns:
        A new report, which does not follow later changes.

    Raises:
        TypeError: model is not a module.

    Example::

        >>> report = liger.transformers.patch_report(liger.patch(model))
        >>> report.replaced["model.norm"]
        'rms_norm'
    """
    require_module("liger.transformers.patch_report", model)
    report = PatchReport(checkpointing="; ".join(planner.summary for planner in planners(model)))
    modules = dict(model.named_modules())
    for name, module in modules.items():
        kind, reason = _state(module)
        if reason is not None:
            report.left[name], report.classes[name] = reason, trials.original(module).__name__
        elif kind is not None:
            report.replaced[name] = kind
        if (
            recomputes(module)
            and not isinstance(recipe_of(module), MLPRecipe)
            and overriding_forward(module) is None
        ):
            report.recomputed.append(name)
    if report.replaced or report.left:
        covered = {
            id(part) for module in modules.values() for part in covered_parts(module, recipe_of(module))
        }
        for name, module in modules.items():
            known = not isinstance(recipe_of(module), GroupRecipe | None)
            known = known or name in report.replaced or name in report.left
            if not known and id(module) not in covered:
                if NOT_ASKED in module.__dict__:
                    report.not_asked_for[name] = module.__dict__[NOT_ASKED]
                elif (what := _not_looked_at(module)) is not None:
                    report.not_looked_at[name] = what
    return report


def covered_parts(module, recipe):
    """Submodules that the recipe replaces as a part of the module."""
    if isinstance(recipe, MLPRecipe):
        yield getattr(module, recipe.act_name, None)


def _state(module):
    """(kind of replacement, reason for leaving the module alone); both None for a module of no known kind."""
    recipe, reason = recipe_of(module), module.__dict__.get(LEFT)
    forward = function_of(instance_forward(module) if recipe is None else overriding_forward(module))
    if getattr(forward, "liger_trainer_loss", False):
        return "trainer_loss", None
    kind = getattr(recipe, "kind", None)
    if kind is not None and forward is not None:
        return None, override_reason(forward)
    if hasattr(recipe, "unused_because"):
        unused = recipe.unused_because(module)
        kind = recipe.kind_in(module) if hasattr(recipe, "kind_in") else kind
        return (kind, None) if unused is None else (None, unused)
    if kind is None and reason is None and NOT_ASKED not in module.__dict__:
        reason = why_unpatched(module)
    return kind, reason


def function_of(method):
    return getattr(method, "__func__", method)


def override_reason(function):
    """Why a module with this forward on its instance is not patched."""
    reason = "its forward was replaced on the instance"
    # Not __module__, which functools.wraps copies.
    if not getattr(function, "__globals__", {}).get("__name__", "").startswith("trl."):
        return reason
    return f"{reason} by a trainer of TRL, which computes the loss there: liger.trl.patch(trainer) does so by liger"


def _not_looked_at(module):
    """A description of a computation that has a name of its own in reports; None for other modules."""
    cls = trials.original(module)
    name = cls.__name__
    if name.endswith("Experts"):
        return EXPERTS
    if "RMSNorm" in name and "Gated" in name:
        return GATED_NORM
    if isinstance(module, nn.LayerNorm) or name.endswith("LayerNorm"):
        return "layer norm"
    if isinstance(module, nn.RMSNorm) or name.endswith("RMSNorm"):
        return "RMS norm of another form"
    if activations.calls_one_kernel(module):
        return ONE_KERNEL
    if inspect.isfunction(cls.forward):
        rotary = sorted(filter(is_rotary, globals_used(cls.forward)))
        if rotary:
            return f"rotary embedding ({', '.join(rotary)})"
    return None
