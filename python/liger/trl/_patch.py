"""The one entry: which adapter a trainer gets."""

import importlib
import logging

logger = logging.getLogger("liger.trl")

# Trainers of TRL and the module and function of their adapters, subclasses before their bases. A module of
# trl.experimental is imported only if a trainer of that name is at hand.
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
}


def patch(trainer):
    """Makes one trainer of TRL compute its loss without logits, by the losses of liger. No other trainer changes.

    Call it between the trainer's constructor and ``trainer.train()``. Options, data, logged metrics and checkpoints
    stay as they are. Where liger.losses has the trainer's loss, its gradient is made in the forward of the model's
    head; otherwise the trainer computes its own loss from log-probabilities made by liger, and the log says why.

    Args:
        trainer: a DPOTrainer, KTOTrainer, GRPOTrainer, RLOOTrainer, SFTTrainer, ORPOTrainer, CPOTrainer, GKDTrainer
            or DistillationTrainer, or of a class derived from one.

    Returns:
        The same trainer; patching it again changes nothing.

    Raises:
        TypeError: another trainer.
        ValueError: a model that is not a causal language model, or scales its logits by what is not positive.
        RuntimeError: in training, a head that is not a plain linear layer.
    """
    if getattr(trainer, "liger_patched", False):
        return trainer
    names = [cls.__name__ for cls in type(trainer).__mro__ if cls.__module__.split(".")[0] == "trl"]
    name = next((name for name in _ADAPTERS if name in names), None)
    if name is None:
        raise TypeError(
            f"liger.trl.patch was given a {type(trainer).__name__}, expected a trainer of TRL: {', '.join(_ADAPTERS)}"
        )
    module, function = _ADAPTERS[name]
    adapt = getattr(importlib.import_module(f".{module}", __package__), function)
    reason = adapt(trainer)
    trainer.liger_patched = True
    if reason is None:
        logger.info("liger: %s computes its loss in the model's head", name)
    else:
        logger.info("liger: %s keeps its own loss, on log-probabilities of liger: %s", name, reason)
    return trainer
