"""``patch``, ``unpatch`` and ``patch_report``."""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import nn

from . import _behaviour, _causal_lm
from ._classes import (
    give_class,
    instance_forward,
    overriding_forward,
    patched_class,
    recipe_of,
    restore_class,
)
from ._loss import EmbeddingRecipe, head_recipe, heads_of, sharing_embeddings

logger = logging.getLogger("liger.transformers")


@dataclass(frozen=True)
class Options:
    """The keywords of :func:`patch`."""

    rope: bool = True
    rms_norm: bool = True
    swiglu: bool = True
    geglu: bool = True
    cross_entropy: bool = False
    fused_linear_cross_entropy: bool = True
    mlp: bool | None = None
    inplace: bool = True
    tiled_mlp: bool = False
    tiled_mlp_num_shards: int | None = None

    def __post_init__(self) -> None:
        if self.cross_entropy and self.fused_linear_cross_entropy:
            raise ValueError(
                "cross_entropy and fused_linear_cross_entropy cannot both be True: the fused form has no logits to "
                "compute a cross entropy from"
            )
        shards = self.tiled_mlp_num_shards
        if shards is not None and (not self.tiled_mlp or shards < 1):
            raise ValueError(
                f"tiled_mlp_num_shards is {shards}, expected at least 1, and only together with tiled_mlp=True"
            )
        if self.mlp is not None:
            object.__setattr__(self, "swiglu", self.mlp)
            object.__setattr__(self, "geglu", self.mlp)

    @property
    def any(self) -> bool:
        losses = (self.cross_entropy, self.fused_linear_cross_entropy)
        return any((self.rope, self.rms_norm, self.swiglu, self.geglu, self.tiled_mlp, *losses))

    @property
    def activations(self) -> tuple[str, ...]:
        """Activations of the gated MLPs to patch."""
        swiglu = _behaviour.SWIGLU_ACTIVATIONS if self.swiglu else ()
        return (*swiglu, *_behaviour.GEGLU_ACTIVATIONS) if self.geglu else swiglu


@dataclass
class PatchReport:
    """The modules of a model that run on liger and those that do not, by module name ("" is the model itself).

    Attributes:
        replaced: module name -> ``"rope"``, ``"rms_norm"``, ``"swiglu"``, ``"geglu"``, ``"tiled_mlp"``,
            ``"cross_entropy"``, ``"fused_linear_cross_entropy"``, or ``"trainer_loss"`` for a model whose lm_head was
            replaced by ``liger.trl.patch``.
        left: module name -> the reason why a module of a known kind was not patched.
        not_looked_at: module name -> a computation without a replacement to try (experts, layer norm, another rotary
            embedding).
    """

    replaced: dict[str, str] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)
    not_looked_at: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        kinds = list(self.replaced.values())
        lines = [f"{kinds.count(kind)} x {kind}" for kind in dict.fromkeys(kinds)]
        reasons = list(self.left.values())
        lines += [f"left {reasons.count(reason)} as before: {reason}" for reason in dict.fromkeys(reasons)]
        others = list(self.not_looked_at.values())
        if others:
            lines.append(
                "not looked at: " + ", ".join(f"{others.count(o)} x {o}" for o in dict.fromkeys(others))
            )
        return "; ".join(lines) or "nothing"


_Model = TypeVar("_Model", bound=nn.Module)


def patch(model: _Model, **options: Any) -> _Model:
    """Replaces modules of one model by ops of liger. Other models, the classes and torch.nn do not change.

    A module is patched if it is of a known kind and gives the results of the op in a trial on a few random numbers.
    Parameters, buffers, hooks and ``state_dict`` do not change. Patching again replaces the previous patch. In training
    with labels, the lm_head computes the loss and ``output.logits`` is None. ``skip_logits=False`` in the call of the
    model returns logits; ``skip_logits=True`` omits them in evaluation, too.

    Args:
        model: a transformers model, or a module that contains models (PEFT, DDP). Patch before ``fully_shard`` and
            ``accelerator.prepare``, which may replace forward methods.
        rope: rotary position embeddings, default True.
        rms_norm: RMS norms, default True.
        swiglu: MLPs of the form ``down(silu(gate) * up)``, default True.
        geglu: MLPs of the form ``down(gelu(gate) * up)``, exact or approximated by tanh, default True.
        cross_entropy: the loss from the logits, default False.
        fused_linear_cross_entropy: the loss without logits, default True. Not together with cross_entropy.
        mlp: sets both swiglu and geglu; default None.
        inplace: whether the backward of MLPs reuses the memory of their activations, default True. Not done for a
            graph that is retained by ``retain_graph=True``.
        tiled_mlp: gated MLPs, one shard of tokens at a time (:func:`liger.tiled_mlp`): the activations of all tokens
            are never materialised. Default False.
        tiled_mlp_num_shards: number of shards; default None: by the memory budget.

    Returns:
        The same model. :func:`liger.transformers.patch_report` says what was replaced.

    Raises:
        TypeError: model is not a module, or an unknown option.
        ValueError: cross_entropy and fused_linear_cross_entropy together; a number of shards below 1 or without
            tiled_mlp; no module of the model can be patched.
        RuntimeError: the model was patched and then sharded by ``fully_shard``.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"liger.patch expects a torch.nn.Module, not {type(model).__name__}")
    parsed = Options(**options)
    unpatch(model)
    report = apply(model, parsed)
    if parsed.any and not report.replaced:
        raise ValueError(f"liger.patch: nothing in {type(model).__name__} can be patched as asked ({report})")
    return model


def unpatch(model: _Model) -> _Model:
    """Restores a model that :func:`patch` changed. No effect on a model that is not patched.

    Args:
        model: the patched model, or a module that contains it.

    Returns:
        The same model.

    Raises:
        RuntimeError: ``fully_shard`` has derived other classes from the patched ones.
    """
    for module in model.modules():
        restore_class(module)
        module.__dict__.pop(_LEFT, None)
    return model


def patch_report(model: nn.Module) -> PatchReport:
    """The current :class:`PatchReport` of a model or of any other module; empty if no module is patched.

    A module whose patched forward was replaced afterwards (by a TRL trainer, for example) is reported as left.
    """
    report = PatchReport()
    modules = dict(model.named_modules())
    for name, module in modules.items():
        kind, reason = _state(module)
        if reason is not None:
            report.left[name] = reason
        elif kind is not None:
            report.replaced[name] = kind
    if report.replaced or report.left:
        for name, module in modules.items():
            if recipe_of(module) is None and name not in report.left:
                what = _behaviour.not_looked_at(module)
                if what is not None:
                    report.not_looked_at[name] = what
    return report


def _state(module):
    """(kind of replacement, reason for leaving the module alone); both None for a module of no known kind."""
    recipe, reason = recipe_of(module), module.__dict__.get(_LEFT)
    forward = _function(instance_forward(module) if recipe is None else overriding_forward(module))
    if getattr(forward, "liger_trainer_loss", False):
        return "trainer_loss", None
    kind = getattr(recipe, "kind", None)
    if kind is not None and forward is not None:
        return None, _override_reason(forward)
    return kind, reason


def _function(method):
    return getattr(method, "__func__", method)


def _override_reason(function):
    reason = "its forward was replaced on the instance"
    # Not __module__, which functools.wraps copies.
    if not getattr(function, "__globals__", {}).get("__name__", "").startswith("trl."):
        return reason
    return f"{reason} by a trainer of TRL, which computes the loss there: liger.trl.patch(trainer) does so by liger"


# Attribute of a module with the reason why it was not patched; copies and wrappers of the model preserve it.
_LEFT = "_liger_left"


def apply(model: nn.Module, options: Options) -> PatchReport:
    """Patches all modules that can be patched, logs the report and returns it."""
    # Trials run on the CPU, even if the model is constructed on the meta device, and may draw random numbers.
    with (
        torch.device("cpu"),
        torch.no_grad(),
        torch.autocast("cpu", enabled=False),
        torch.random.fork_rng(devices=[]),
    ):
        for module in list(model.modules()):
            recipe = _recipe(module, options)
            if recipe is not None and not isinstance(recipe, str):
                forward = _function(instance_forward(module))
                recipe = recipe if forward is None else _override_reason(forward)
            if isinstance(recipe, str):
                module.__dict__[_LEFT] = recipe
            elif recipe is not None:
                _apply_recipe(module, recipe)
    report = patch_report(model)
    logger.log(
        logging.WARNING if report.left else logging.INFO, "liger: %s: %s", type(model).__name__, report
    )
    return report


def _recipe(module, options):
    """The recipe of one module, a string with the reason for leaving it alone, or None for a module of another kind."""
    trials = []
    if options.rms_norm:
        trials.append(_behaviour.norm)
    if options.tiled_mlp:
        trials.append(functools.partial(_behaviour.mlp_to_tile, num_shards=options.tiled_mlp_num_shards))
    elif options.activations:
        trial = functools.partial(_behaviour.mlp, activations=options.activations, inplace=options.inplace)
        trials.append(trial)
    if options.rope:
        trials.append(_behaviour.attention)
    if options.cross_entropy or options.fused_linear_cross_entropy:
        trials.append(functools.partial(_causal_lm.causal_lm, fused=options.fused_linear_cross_entropy))
    return next((recipe for trial in trials if (recipe := trial(module)) is not None), None)


def _apply_recipe(module, recipe):
    if getattr(recipe, "fused", False):
        heads = heads_of(module.get_output_embeddings())
        recipes = [(head, head_recipe(head)) for head in heads]
        recipes += [(embedding, EmbeddingRecipe()) for embedding in sharing_embeddings(module, heads)]
        for part, part_recipe in recipes:
            # A model within another one may have the same head.
            if recipe_of(part) is None:
                give_class(part, patched_class(type(part), part_recipe))
    give_class(module, patched_class(type(module), recipe))
