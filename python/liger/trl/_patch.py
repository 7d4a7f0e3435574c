# SPDX-License-Identifier: BSD-3-Clause
"""``liger.trl.patch`` and the table of adapters."""

from __future__ import annotations

import importlib
import logging
from typing import TYPE_CHECKING, TypeVar

from ..transformers.patching.options import Options
from ..transformers.patching.patch import apply, say
from ..transformers.recipe.classes import recipe_of

if TYPE_CHECKING:
    from transformers import Trainer

logger = logging.getLogger("liger.trl")

_Trainer = TypeVar("_Trainer", bound="Trainer")

# Trainer of TRL -> (module, function) of its adapter, subclasses before their bases. An adapter may import
# trl.experimental, so it is imported only for a trainer of that class.
_ADAPTERS = {
    "GKDTrainer": ("_distillation", "adapt_gkd"),
    "DistillationTrainer": ("_distillation", "adapt_distillation"),
    "DPOTrainer": ("_preference", "adapt_dpo"),
    "KTOTrainer": ("_preference", "adapt_kto"),
    "GRPOTrainer": ("_policy", "adapt_grpo"),
    "RLOOTrainer": ("_policy", "adapt_rloo"),
    "SFTTrainer": ("_supervised", "adapt_sft"),
    "ORPOTrainer": ("_paired", "adapt_orpo"),
    "CPOTrainer": ("_paired", "adapt_cpo"),
    "OnlineDPOTrainer": ("_online", "adapt_online_dpo"),
}

# Trainers of TRL without an adapter -> the reason.
_NOT_ADAPTED = {
    "RewardTrainer": "its score head has one output and no logits of a vocabulary; liger.patch(model) patches the "
    "layers"
}


def patch(trainer: _Trainer) -> _Trainer:
    """Makes one TRL trainer compute its loss with the losses of liger, without materialised logits.

    Call it between the trainer's constructor and ``trainer.train()``. The layers of the model are patched as
    well, unless :func:`liger.patch` has done so. Other trainers, options, data, logged metrics and
    checkpoints do not change. If ``liger.losses`` implements the trainer's loss, the forward of the model's
    lm_head computes loss and gradient. Otherwise the trainer computes its own loss from log-probabilities by
    liger, and a message of the logger ``liger.trl`` gives the reason.

    Args:
        trainer: a DPOTrainer, KTOTrainer, GRPOTrainer, RLOOTrainer, SFTTrainer, ORPOTrainer, CPOTrainer,
            GKDTrainer, DistillationTrainer or OnlineDPOTrainer, or an object of a derived class.

    Returns:
        The same trainer. Patching it again has no effect.

    Raises:
        TypeError: not one of these trainers.
        ValueError: the model is not a causal language model with a base model; its logits are scaled by a
            factor that is not positive, or are more than a scale and a softcap of what its lm_head returns
            for the hidden states.
        RuntimeError: in training, if the lm_head is not a plain linear layer with an unsharded weight.

    Example::

        >>> trainer = trl.DPOTrainer(model, args=config, train_dataset=dataset)  # doctest: +SKIP
        >>> trainer = liger.trl.patch(trainer)  # doctest: +SKIP
    """
    if getattr(trainer, "liger_patched", False):
        return trainer
    names = [cls.__name__ for cls in type(trainer).__mro__ if cls.__module__.split(".")[0] == "trl"]
    name = next((name for name in _ADAPTERS if name in names), None)
    if name is None:
        reason = next((f": {_NOT_ADAPTED[name]}" for name in names if name in _NOT_ADAPTED), "")
        raise TypeError(
            f"liger.trl.patch was given a {type(trainer).__name__}{reason}, expected a trainer of TRL: "
            f"{', '.join(_ADAPTERS)}"
        )
    module, function = _ADAPTERS[name]
    adapt = getattr(importlib.import_module(f".{module}", __package__), function)
    reason = adapt(trainer)
    vars(trainer)["liger_patched"] = True
    _patch_layers(trainer)
    if reason is None:
        logger.info("liger: %s computes its loss in the model's head", name)
    else:
        logger.info("liger: %s keeps its own loss, on log-probabilities of liger: %s", name, reason)
    return trainer


def _patch_layers(trainer):
    """Patches the layers of the policy and of the reference model, except of a model with patched modules."""
    # The constructor has sharded the reference model already, and patching comes before sharding.
    sharded = trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled
    for model in (trainer.model, None if sharded else getattr(trainer, "ref_model", None)):
        if model is not None and all(recipe_of(module) is None for module in model.modules()):
            report = apply(model, Options(fused_linear_cross_entropy=False))
            if report.replaced:
                say(f"liger.trl.patch: {type(model).__name__}: {report.summary}")
