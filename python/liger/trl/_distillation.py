"""GKD and distillation on own samples: the divergence of student and teacher, of neither of which there are logits."""

import torch
from trl import DistillationTrainer

from ..losses import TokenStatistics
from ..ops.fused_linear_divergence import fused_linear_jsd
from ..ops.fused_linear_logprobs import fused_linear_logprobs
from ._adapter import add_heads, base_model, over_processes, replace, token_count
from ._head import FusedHead

_NOTHING = TokenStatistics(None, None, None)
# What a batch of a DistillationTrainer may hold for models that also see images.
_OF_IMAGES = (
    "pixel_values", "image_grid_thw", "pixel_attention_mask", "spatial_shapes", "image_sizes", "token_type_ids",
    "mm_token_type_ids", "image_position_ids",
)  # fmt: skip


def adapt_gkd(trainer):
    divergence_of = _divergence(trainer)

    def compute_loss(original, model, inputs, return_outputs=False, num_items_in_batch=None):
        tokens = {name: inputs[name] for name in ("input_ids", "attention_mask")}
        loss = divergence_of(model, tokens, inputs["labels"], num_items_in_batch).loss
        if not return_outputs:
            return loss
        with torch.no_grad():
            return loss, model(**tokens)

    replace(trainer, "compute_loss", compute_loss)
    return None


def adapt_distillation(trainer):
    for name in ("compute_loss", "_compute_loss"):
        if getattr(type(trainer), name) is not getattr(DistillationTrainer, name):
            raise ValueError(
                f"liger.trl.patch: {type(trainer).__name__} has a {name} of its own, expected none"
            )
    divergence_of = _divergence(trainer, trainer.temperature, ("entropy",))

    def compute_loss(original, model, inputs, return_outputs=False, num_items_in_batch=None):
        training = trainer.model.training
        if training and inputs.get("num_items_in_batch") is not None:
            # Of all processes, over which gradients are averaged.
            num_items_in_batch = over_processes(inputs["num_items_in_batch"], trainer)
        answer, counts = inputs["completion_ids"], inputs["completion_mask"]
        if "tool_mask" in inputs:
            counts = counts * inputs["tool_mask"]
        labels = torch.cat(
            (torch.full_like(inputs["prompt_ids"], -100), answer.masked_fill(counts == 0, -100)), 1
        )
        tokens = {
            "input_ids": torch.cat((inputs["prompt_ids"], answer), 1),
            "attention_mask": torch.cat((inputs["prompt_mask"], inputs["completion_mask"]), 1),
            **{name: inputs[name] for name in _OF_IMAGES if name in inputs},
        }
        outputs = divergence_of(model, tokens, labels, num_items_in_batch, keep=answer.shape[1])
        found = torch.stack((outputs.entropy.sum(), outputs.label_mask.sum()))
        entropy, count = trainer.accelerator.gather_for_metrics(found.unsqueeze(0)).sum(0).tolist()
        trainer._metrics["train" if training else "eval"]["entropy"].append(entropy / count if count else 0.0)
        return (outputs.loss, None) if return_outputs else outputs.loss

    replace(trainer, "compute_loss", compute_loss)
    return None


def _divergence(trainer, temperature=1.0, wanted=()):
    """The function that calls both models; its result has the loss, and the scores of the student that are wanted."""
    student = add_heads(trainer, wanted, temperature)
    teacher = FusedHead(
        base_model(trainer, trainer.teacher_model), temperature, autocast=trainer.accelerator.autocast
    )
    transform = student.transform
    if transform != teacher.transform or transform.softcap is not None:
        raise ValueError(
            f"liger.trl.patch: the logits of the student are transformed by {tuple(transform)} and those of the "
            f"teacher by {tuple(teacher.transform)} (temperature, softcap), expected the same without a softcap"
        )

    def call(model, tokens, labels, num_items_in_batch, keep=None):
        call_of_both = {"labels": labels, "fused_lm_head": True, "liger_keep": keep, **tokens}

        def with_student(hidden, weight, bias, target):
            made = []

            def with_teacher(teacher_hidden, teacher_weight, teacher_bias, _):
                with torch.enable_grad():
                    loss = fused_linear_jsd(
                        hidden, weight, teacher_hidden, teacher_weight.detach(), target, bias=bias,
                        teacher_bias=None if teacher_bias is None else teacher_bias.detach(),
                        denominator=token_count(target, num_items_in_batch), beta=trainer.beta,
                        temperature=transform.temperature,
                    )  # fmt: skip
                made.append(loss)
                # The hooks of the teacher are to know nothing of a backward.
                return loss.detach(), _NOTHING

            # Within both heads the weights of both are whole, whatever shards them.
            with torch.no_grad():
                trainer.teacher_model(liger_loss=with_teacher, **call_of_both)
                found = _NOTHING
                if "entropy" in wanted:
                    found = fused_linear_logprobs(
                        hidden, weight, target, bias, transform.temperature, return_entropy=True
                    )
            return made[0], found

        trainer.teacher_model.eval()
        return model(liger_loss=with_student, **call_of_both)

    return call
