# SPDX-License-Identifier: BSD-3-Clause
"""ORPOTrainer and CPOTrainer: a forward with a fused head replaces their full logits."""

from torch.nn.functional import pad
from trl.experimental.cpo import CPOTrainer
from trl.experimental.orpo import ORPOTrainer

from ..losses import FusedLinearCPOLoss, FusedLinearORPOLoss, FusedLinearSimPOLoss
from ._adapter import LossProxy, LossWithTokenMetrics, add_heads, replace
from ._answers import AnswerWidth, crop_to_answers


def adapt_orpo(trainer):
    head = _add_head(trainer)
    loss_of = LossWithTokenMetrics(FusedLinearORPOLoss, beta=trainer.beta, **head.transform._asdict())
    # The likelihood term includes prompts; the mean of logits excludes the last position.
    options = {"average": True, "with_nll": True, "nll_of_prompts": True, "positions": slice(None, -1)}
    return _adapt(trainer, ORPOTrainer, loss_of, trainer.padding_value, **options)


def adapt_cpo(trainer):
    head = _add_head(trainer)
    average, simpo = trainer.loss_type in ("ipo", "simpo"), trainer.loss_type == "simpo"
    with_nll = trainer.cpo_alpha != 0
    options = {"beta": trainer.beta, "alpha": trainer.cpo_alpha, "compute_nll_loss": with_nll}
    options |= {"label_smoothing": trainer.label_smoothing, **head.transform._asdict()}
    reason = loss_of = None
    if trainer.alpha != 0.0:
        reason = f"alpha={trainer.alpha} (AlphaPO)"
    elif simpo:
        loss_of = LossWithTokenMetrics(FusedLinearSimPOLoss, gamma=trainer.simpo_gamma, **options)
    else:
        options |= {"loss_type": trainer.loss_type, "average_log_prob": average}
        loss_of = LossWithTokenMetrics(FusedLinearCPOLoss, **options)
    batch_options = {"average": average, "with_nll": with_nll}
    batch_options |= {"nll_of_prompts": False, "positions": slice(None)}
    return _adapt(trainer, CPOTrainer, loss_of, trainer.pad_token_id, **batch_options) or reason


def _add_head(trainer):
    if trainer.is_encoder_decoder:
        raise ValueError(
            "liger.trl.patch: the model has an encoder and a decoder, expected a causal language model"
        )
    return add_heads(trainer, ("mean_logits",))


def _adapt(trainer, cls, loss_of, padding_value, *, average, with_nll, nll_of_prompts, positions):
    reason = None
    if type(trainer).get_batch_loss_metrics is not cls.get_batch_loss_metrics:
        reason, loss_of = f"{type(trainer).__name__} has a loss of its own", None
    policies = []

    def concatenated_forward(original, model, batch):
        merged = trainer.concatenated_inputs(
            batch, padding_value=padding_value, device=trainer.accelerator.device
        )
        ids, mask = merged["concatenated_input_ids"], merged["concatenated_attention_mask"]
        answers = _next(merged["concatenated_labels"])
        nll_target = _next(ids.masked_fill(mask == 0, -100)) if nll_of_prompts else answers
        pairs = batch["chosen_labels"].shape[0]

        def function(hidden, weight, bias, target, answer):
            # A separate mask only if the likelihood term has other valid tokens.
            nll_mask = target != -100 if nll_of_prompts else None
            return loss_of(hidden, weight, target, bias, mask=answer != -100, nll_mask=nll_mask)

        if loss_of is not None:
            model = LossProxy(model, crop_to_answers(function, AnswerWidth(nll_target != -100), answers))
            policies.append(model)
        options = {"output_router_logits": True} if trainer.aux_loss_enabled else {}
        outputs = model(ids, attention_mask=mask, shift_labels=nll_target, fused_lm_head=True, **options)
        valid = answers != -100
        logps = (outputs.log_probs * valid).sum(-1)
        logps = logps / valid.sum(-1) if average else logps
        nll = logps.new_zeros(())
        if with_nll:
            nll = -outputs.log_probs[:pairs].sum() / (nll_target[:pairs] != -100).sum()
        # The trainer logs the mean of the logits and reads nothing else of them.
        means = outputs.mean_logits[:, positions]
        results = (logps[:pairs], logps[pairs:], means[:pairs], means[pairs:], nll)
        return (*results, outputs.aux_loss) if trainer.aux_loss_enabled else results

    def get_batch_loss_metrics(original, *args, **kwargs):
        trainer_loss, metrics = original(*args, **kwargs)
        return policies.pop().attach_gradient(trainer_loss), metrics

    replace(trainer, "concatenated_forward", concatenated_forward)
    if loss_of is not None:
        replace(trainer, "get_batch_loss_metrics", get_batch_loss_metrics)
    return reason


def _next(labels):
    """Labels shifted by one: the target of each position, -100 for the last one."""
    return pad(labels, (0, 1), value=-100)[:, 1:]
