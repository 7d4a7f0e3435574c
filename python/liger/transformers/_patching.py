"""patch, unpatch and their report."""

import functools
import logging
from dataclasses import dataclass, field

import torch
from torch import nn

from . import _behaviour
from ._classes import (
    forward_in_its_place,
    give_class,
    hiding_forward,
    patched_class,
    recipe_of,
    restore_class,
)
from ._loss import EmbeddingRecipe, HeadRecipe, linear_heads, sharing_embeddings

logger = logging.getLogger("liger.transformers")


@dataclass(frozen=True)
class Options:
    """What to patch; the keywords of :func:`patch`."""

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

    def __post_init__(self):
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
    def any(self):
        losses = (self.cross_entropy, self.fused_linear_cross_entropy)
        return any((self.rope, self.rms_norm, self.swiglu, self.geglu, self.tiled_mlp, *losses))

    @property
    def activations(self):
        """Of the gated MLPs to patch."""
        swiglu = _behaviour.SWIGLU_ACTIVATIONS if self.swiglu else ()
        return (*swiglu, *_behaviour.GEGLU_ACTIVATIONS) if self.geglu else swiglu


@dataclass
class PatchReport:
    """What of a model runs on liger, by module name ("" is the model itself).

    Attributes:
        replaced: module name -> ``"rope"``, ``"rms_norm"``, ``"swiglu"``, ``"geglu"``, ``"tiled_mlp"``,
            ``"cross_entropy"``, ``"fused_linear_cross_entropy"``, or ``"trainer_loss"`` where ``liger.trl.patch`` has
            given a trainer's model its head.
        left: module name -> why a module that looks as if it could be patched runs as before.
        not_looked_at: module name -> what it computes (experts, layer norm, another rotary embedding), where patching
            has no replacement to try.
    """

    replaced: dict = field(default_factory=dict)
    left: dict = field(default_factory=dict)
    not_looked_at: dict = field(default_factory=dict)

    def __str__(self):
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


def patch(model, **options):
    """Makes one model use the ops of liger. Other models, its classes and torch.nn stay as they are.

    Any module of the model is patched that looks like one liger can replace and that gives, tried on a few random
    numbers, the same results. Parameters, buffers, hooks and ``state_dict`` are untouched. Patching again replaces the
    former patch. In training, with labels, the loss is computed inside the head and ``output.logits`` is None: call the
    model with ``skip_logits=False`` to get them, or with ``skip_logits=True`` to do without them in evaluation.

    Args:
        model: a transformers model, or a module that contains some (PEFT, DDP). Before ``fully_shard`` and
            ``accelerator.prepare``, after which forward methods may no longer be those of the classes.
        rope: rotary position embeddings, default True.
        rms_norm: RMS norms, default True.
        swiglu: MLPs of the form ``down(silu(gate) * up)``, default True.
        geglu: MLPs of the form ``down(gelu(gate) * up)``, exact or approximated by tanh, default True.
        cross_entropy: the loss from the logits, default False.
        fused_linear_cross_entropy: the loss without logits, default True. Not together with cross_entropy.
        mlp: swiglu and geglu at once.
        inplace: whether MLPs reuse, in the backward, the memory of their activations, default True. A graph
            kept by ``retain_graph=True`` is left alone.
        tiled_mlp: gated MLPs, also those with GELU, a shard of tokens at a time, so that their activations never
            exist for all tokens: :func:`liger.tiled_mlp`. Default False.
        tiled_mlp_num_shards: into how many shards, default None: as a memory budget says.

    Returns:
        The same model. :func:`liger.transformers.patch_report` says what was replaced.

    Raises:
        TypeError: model is not a module, or an unknown option.
        ValueError: cross_entropy and fused_linear_cross_entropy together, fewer than one shard or shards without
            tiled_mlp, or nothing in the model can be patched.
        RuntimeError: the model was patched and then sharded by ``fully_shard``.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"liger.patch expects a torch.nn.Module, not {type(model).__name__}")
    options = Options(**options)
    unpatch(model)
    report = apply(model, options)
    if options.any and not report.replaced:
        raise ValueError(f"liger.patch: nothing in {type(model).__name__} can be patched as asked ({report})")
    return model


def unpatch(model):
    """Restores a model that :func:`patch` changed; a model that is not patched stays as it is.

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


def patch_report(model):
    """The :class:`PatchReport` of a model, or of any module of one, as it is now; an empty one if nothing is patched.

    What has taken the place of a patched forward since (the head that a trainer of TRL gives its model, for example) is
    reported as left.
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
    """(which op a module runs on, why it runs as before); both None if it never looked like anything to patch."""
    recipe, reason = recipe_of(module), module.__dict__.get(_LEFT)
    forward = _function(hiding_forward(module) if recipe is None else forward_in_its_place(module))
    if getattr(forward, "liger_trainer_loss", False):
        return "trainer_loss", None
    kind = getattr(recipe, "kind", None)
    if kind is not None and forward is not None:
        return None, _hidden_by(forward)
    return kind, reason


def _function(method):
    return getattr(method, "__func__", method)


def _hidden_by(function):
    words = "its forward was replaced on the instance"
    # Not __module__, which functools.wraps copies.
    if not getattr(function, "__globals__", {}).get("__name__", "").startswith("trl."):
        return words
    return f"{words} by a trainer of TRL, which computes the loss there: liger.trl.patch(trainer) does so by liger"


# Where a module that was left alone keeps the reason, which copies and what wraps the model take along.
_LEFT = "_liger_left"


def apply(model, options):
    """Patches what can be patched."""
    # Trials run on the CPU, also while a model is being made on the meta device, and may draw random numbers.
    with (
        torch.device("cpu"),
        torch.no_grad(),
        torch.autocast("cpu", enabled=False),
        torch.random.fork_rng(devices=[]),
    ):
        for module in list(model.modules()):
            recipe = _recipe(module, options)
            if recipe is not None and not isinstance(recipe, str):
                forward = _function(hiding_forward(module))
                recipe = recipe if forward is None else _hidden_by(forward)
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
    """How to patch one module, why not (a string), or None if it does not look like anything liger replaces."""
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
        trials.append(functools.partial(_behaviour.causal_lm, fused=options.fused_linear_cross_entropy))
    return next((recipe for trial in trials if (recipe := trial(module)) is not None), None)


def _apply_recipe(module, recipe):
    if getattr(recipe, "fused", False):
        heads = linear_heads(module.get_output_embeddings())
        for head in heads:
            give_class(head, patched_class(type(head), HeadRecipe()))
        for embedding in sharing_embeddings(module, heads):
            give_class(embedding, patched_class(type(embedding), EmbeddingRecipe()))
    give_class(module, patched_class(type(module), recipe))
