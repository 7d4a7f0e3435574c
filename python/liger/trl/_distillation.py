# SPDX-License-Identifier: BSD-3-Clause
"""GKDTrainer and DistillationTrainer: the divergence of student and teacher without materialised logits."""

import torch
from trl import DistillationTrainer

from ..losses import TokenMetrics
from ..ops.fused_linear_divergence.op import fused_linear_jsd
from ..ops.fused_linear_logprobs.op import fused_linear_logprobs
from ._adapter import add_heads, base_model, items_per_process, replace, token_count
from ._head import FusedHead

# Keys of vision inputs in the batch of a DistillationTrainer.
_IMAGE_KEYS = (
    *("pixel_values", "image_grid_thw", "pixel_attention_mask", "spatial_shapes", "image_sizes"),
    *("token_type_ids", "mm_token_type_ids", "image_position_ids"),
)


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
            # A global number; gradients are averaged over processes.
            num_items_in_batch = items_per_process(inputs["num_items_in_batch"], trainer)
        answer, mask = inputs["completion_ids"], inputs["completion_mask"]
        if "tool_mask" in inputs:
            mask = mask * inputs["tool_mask"]
        labels = torch.cat(
            (torch.full_like(inputs["prompt_ids"], -100), answer.masked_fill(mask == 0, -100)), 1
        )
        tokens = {
            "input_ids": torch.cat((inputs["prompt_ids"], answer), 1),
            "attention_mask": torch.cat((inputs["prompt_mask"], inputs["completion_mask"]), 1),
            **{name: inputs[name] for name in _IMAGE_KEYS if name in inputs},
        }
        outputs = divergence_of(model, tokens, labels, num_items_in_batch, keep=answer.shape[1])
        sums = torch.stack((outputs.entropy.sum(), outputs.label_mask.sum()))
        entropy, count = trainer.accelerator.gather_for_metrics(sums.unsqueeze(0)).sum(0).tolist()
        trainer._metrics["train" if training else "eval"]["entropy"].append(entropy / count if count else 0.0)
        return (outputs.loss, None) if return_outputs else outputs.loss

    replace(trainer, "compute_loss", compute_loss)
    return None


def _divergence(trainer, temperature=1.0, scores=()):
    """A function that calls both models: the student's output with loss and given scores."""
    student = add_heads(trainer, scores, temperature)
    teacher = FusedHead(
        base_model(trainer, trainer.teacher_model), temperature, autocast=trainer.accelerator.autocast
    )
    transform = student.transform
    if transform != teacher.transform or transform.softcap is not None:
        raise ValueError(
            f"liger.trl.patch: the logits of the student are transformed by {tuple(transform[:2])} and the teacher's "
            f"by {tuple(teacher.transform[:2])} (temperature, softcap), expected the same without a softcap"
        )

    def call(model, tokens, labels, num_items_in_batch, keep=None):
        call_of_both = {"labels": labels, "fused_lm_head": True, "liger_keep": keep, **tokens}

        def with_student(hidden, weight, bias, target):
            losses = []

            def with_teacher(teacher_hidden, teacher_weight, teacher_bias, _):
                with torch.enable_grad():
                    parameters = (t if t is None else t.detach() for t in (teacher_weight, teacher_bias))
                    of_teacher = dict(zip(("teacher_weight", "teacher_bias"), parameters, strict=True))
                    options = {"beta": trainer.beta, "temperature": transform.temperature}
                    options["denominator"] = token_count(target, num_items_in_batch)
                    loss = fused_linear_jsd(
                        hidden, weight, target, bias, teacher_input=teacher_hidden, **of_teacher, **options
                    )
                losses.append(loss)
                # Backward hooks of the teacher must not run.
                return loss.detach(), TokenMetrics()

            # Within the call of the student's head, both gathered weights are available.
            with torch.no_grad():
                trainer.teacher_model(liger_loss=with_teacher, **call_of_both)
                tokens = TokenMetrics()
                if "entropy" in scores:
                    tokens = fused_linear_logprobs(
                        hidden, weight, target, bias, metrics=("entropy",), temperature=transform.temperature
                    )
            return losses[0], tokens

        trainer.teacher_model.eval()
        return model(liger_loss=with_student, **call_of_both)

    return call
