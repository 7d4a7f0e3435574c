# SPDX-License-Identifier: BSD-3-Clause
"""``patch`` and ``unpatch``."""

import dataclasses
import functools
import logging
import os
import sys
from typing import TypeVar

from torch import nn
from typing_extensions import Unpack

from ..attention import qk_norm_rope, rotary
from ..checkpointing import checkpoint
from ..head import causal_lm
from ..head.kind import kind_of
from ..head.loss import patch_head, restore_forward, sharing_embeddings
from ..lora.expert_weights import expert_weight
from ..lora.recipe import GROUPS, group_layers, lora_linear
from ..mlp import activations, experts, gated_mlp
from ..norms import gated, norm, residual_trial
from ..norms.residual import AddNormRecipe
from ..recipe import trials
from ..recipe.classes import (
    give_class,
    instance_forward,
    patched_class,
    recipe_of,
    require_module,
    restore_class,
)
from ..recipe.recomputed import RecomputeRecipe
from .options import Options, PatchOptions, check_names, with_options
from .report import LEFT, NOT_ASKED, PatchReport, covered_parts, function_of, override_reason, patch_report

logger = logging.getLogger("liger.transformers")


_Model = TypeVar("_Model", bound=nn.Module)


@with_options
def patch(model: _Model, *, verbose: bool = True, **options: Unpack[PatchOptions]) -> _Model:
    """Replaces modules of one model by ops of liger. Other models, the classes and torch.nn do not change.

    A module is patched if it is of a known kind and gives the results of the op in a trial on a few random
    numbers. Parameters, buffers, hooks and ``state_dict`` do not change. Patching again replaces the previous
    patch. In training with labels, the lm_head computes the loss and ``output.logits`` is None.
    ``skip_logits=False`` in the call of the model returns logits; ``skip_logits=True`` omits them in
    evaluation, too.

    Args:
        model: a transformers model, or a module that contains models (PEFT, DDP). Patch before
            ``fully_shard`` and ``accelerator.prepare``, which may replace forward methods.
        verbose: whether one line on stderr says what was replaced, on the first process of the machine;
            default True. The logger ``liger.transformers`` gets the line in any case: a warning if something
            was left, else at level INFO.
        rope: rotary position embeddings, default True.
        rms_norm: RMS norms, default True.
        rms_norm_gated: RMS norms with a gate, default True.
        layer_norm: layer norms, default True.
        fused_add_rms_norm: the residual addition and the RMS norm that follows it in a decoder layer, default
            True. No effect without rms_norm.
        qk_norm_rope: in attention, the RMS norms of queries and keys and their rotation as one op, default
            True. No effect without rope and rms_norm.
        swiglu: MLPs, and the experts of a mixture, of the form ``down(silu(gate) * up)``, default True.
        geglu: the same with GELU instead of SiLU, exact or approximated by tanh, default True.
        relu_squared: the activation ``relu(x)^2``, default True.
        gelu: GELU activations with several operations in their code, by torch's one kernel, default True.
        lora_linear: PEFT's LoRA layers around frozen linear layers, plain or quantised, each or q, k and v
            together as one autograd node, a patched gated MLP with its adapters as one, and adapters of the
            weights of experts without a dense copy of the weights, default True.
        cross_entropy: the loss from the logits, default False. No effect, but a warning, without
            ``fused_linear_cross_entropy=False``.
        fused_linear_cross_entropy: the loss without logits, default True.
        mlp: sets both swiglu and geglu; default None.
        inplace: whether the backward of MLPs reuses the memory of their activations, default True. Not done
            for a graph that is retained by ``retain_graph=True``.
        tiled_mlp: gated MLPs, one shard of tokens at a time (:func:`liger.tiled_mlp`): the activations of all
            tokens are never materialised. Default False.
        tiled_mlp_num_shards: number of shards; default None: by the memory budget.
        recompute: in decoder layers, the backward recomputes the outputs of norms and gated products, and of
            the rotation of normalised queries and keys, with the same bits, instead of saving them: a third
            fewer bytes per token without checkpointing. GEMMs are not recomputed. Set it before you turn to
            checkpointing, which also repeats the GEMMs. Default False.
        accumulate_grad_weight: the fused loss adds the gradient of the head's weight, and of an embedding
            tied to it, to the float32 ``main_grad`` or ``grad`` of that weight (docs/guides/main_grad.md);
            default False.

    Returns:
        The same model. :func:`liger.transformers.patch_report` says what was replaced.

    Raises:
        TypeError: model is not a module, an unknown option, or a value that is not of its type.
        ValueError: a number of shards below 1 or without tiled_mlp; no module of the model can be patched.
        RuntimeError: the model was patched and then sharded by ``fully_shard``.

    Example::

        >>> model = liger.patch(model, recompute=True)
        >>> loss = model(input_ids=target, labels=target).loss
    """
    require_module("liger.patch", model)
    check_names("liger.patch", options)
    parsed = Options(**options)
    _restore(model)
    report = apply(model, parsed)
    if parsed.asks_common_parts and not report.replaced:
        found = f" ({report.summary})" if report.rows else ""
        raise ValueError(
            f"liger.patch: nothing in {type(model).__name__} can be patched as asked{found}; looked for "
            f"{parsed.looked_for}"
        )
    if verbose and not report.left:
        say(f"liger.patch: {type(model).__name__}: {report.summary}")
    return model


def say(line: str) -> None:
    """Prints a line on one process of each machine, unless the logger shows such messages already."""
    shown = logger.isEnabledFor(logging.INFO) and logger.hasHandlers()
    if not shown and os.environ.get("LOCAL_RANK", "0") == "0":
        print(line, file=sys.stderr)


def unpatch(model: _Model) -> _Model:
    """Restores a model that :func:`patch` changed, and ends what :func:`liger.transformers.checkpoint` plans
    for it.

    No effect on a model with neither.

    Args:
        model: the patched model, or a module that contains it.

    Returns:
        The same model.

    Raises:
        TypeError: model is not a module.
        RuntimeError: ``fully_shard`` has derived other classes from the patched ones.

    Example::

        >>> model = liger.patch(model)
        >>> model = liger.unpatch(model)
    """
    require_module("liger.unpatch", model)
    _restore(model)
    checkpoint.release(model)
    return model


def _restore(model):
    for module in model.modules():
        restore_class(module)
        restore_forward(module)
        for name in (LEFT, NOT_ASKED, GROUPS):
            module.__dict__.pop(name, None)


def apply(model: nn.Module, options: Options) -> PatchReport:
    """Patches all modules that can be patched, logs the report and returns it."""
    with trials.without_modes(), trials.remember():
        covered: set[int] = set()
        complete = options.complete
        for module in list(model.modules()):
            recipe = None if id(module) in covered else _recipe(module, options)
            if complete is not options and id(module) not in covered and isinstance(recipe, str | None):
                other = _recipe(module, complete)
                if not isinstance(other, str | None):
                    recipe, module.__dict__[NOT_ASKED] = None, other.kind
            if recipe is not None and not isinstance(recipe, str):
                forward = function_of(instance_forward(module))
                recipe = recipe if forward is None else override_reason(forward)
            if options.recompute:
                recipe = _recomputing(module, recipe)
            if isinstance(recipe, str):
                module.__dict__[LEFT] = recipe
            elif recipe is not None:
                covered.update(map(id, covered_parts(module, recipe)))
                _apply_recipe(module, recipe)
    for module in model.modules():
        group_layers(module)
    checkpoint.forget(model)
    report = patch_report(model)
    level = logging.WARNING if report.left else logging.INFO
    logger.log(level, "liger: %s: %s", type(model).__name__, report.summary)
    return report


def _recipe(module, options):
    """The recipe of a module, a reason for leaving it alone, or None for a module of another kind."""
    attempts = []
    if options.norms:
        attempts.append(functools.partial(norm.norm, kinds=options.norms))
    if options.tiled_mlp:
        attempts.append(functools.partial(gated_mlp.mlp_to_tile, num_shards=options.tiled_mlp_num_shards))
    elif options.activations:
        given = {
            name: getattr(options, name) for name in ("activations", "inplace", "recompute", "lora_linear")
        }
        attempts.append(functools.partial(gated_mlp.mlp, **given))
    if options.activations:
        attempts.append(functools.partial(experts.experts, activations=options.activations))
    if options.rms_norm_gated:
        attempts.append(gated.gated_norm)
    if options.plain_activations:
        attempts.append(functools.partial(activations.activation, kinds=options.plain_activations))
    if options.lora_linear:
        attempts += [lora_linear, expert_weight]
    if options.rope:
        fused = options.rms_norm and options.qk_norm_rope
        attempts.append((qk_norm_rope if fused else rotary).attention)
    if options.rms_norm and options.fused_add_rms_norm:
        attempts.append(residual_trial.decoder_layer)
    if options.cross_entropy or options.fused_linear_cross_entropy:
        attempts.append(functools.partial(causal_lm.causal_lm, fused=options.fused_linear_cross_entropy))
    recipe = next((recipe for attempt in attempts if (recipe := attempt(module)) is not None), None)
    if getattr(recipe, "fused", False):
        given = {name: getattr(options, name) for name in ("accumulate_grad_weight", "like_liger_kernel")}
        recipe = dataclasses.replace(recipe, **given)
    return recipe


def _recomputing(module, recipe):
    """The recipe with the option ``recompute``, which a decoder layer has for all that it calls."""
    if isinstance(recipe, AddNormRecipe):
        return dataclasses.replace(recipe, recompute=True)
    is_layer = any(base.__name__ == "GradientCheckpointingLayer" for base in type(module).__mro__)
    if not is_layer or instance_forward(module) is not None or not isinstance(recipe, str | None):
        return recipe
    if recipe is not None:
        module.__dict__[LEFT] = recipe
    return RecomputeRecipe()


def _apply_recipe(module, recipe):
    if getattr(recipe, "fused", False):
        kind = kind_of(module.get_output_embeddings())
        patch_head(kind)
        for part, part_recipe in sharing_embeddings(module, kind.layers):
            if recipe_of(part) is None:
                give_class(part, patched_class(type(part), part_recipe))
    give_class(module, patched_class(type(module), recipe))
