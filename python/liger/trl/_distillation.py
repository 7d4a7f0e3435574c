"""GKD: the divergence of student and teacher, of neither of which there are logits."""

import torch

from ..losses import TokenStatistics
from ..ops.fused_linear_divergence import fused_linear_jsd
from ._adapter import add_heads, base_model, replace, token_count
from ._head import FusedHead

# Nothing is logged of tokens.
_NOTHING = TokenStatistics(None, None, None)


def adapt_gkd(trainer):
    student = add_heads(trainer)
    teacher = FusedHead(base_model(trainer, trainer.teacher_model), autocast=trainer.accelerator.autocast)
    if student.transform != teacher.transform or student.transform.softcap is not None:
        raise ValueError(
            f"liger.trl.patch: the logits of the student are transformed by {tuple(student.transform)} and those of "
            f"the teacher by {tuple(teacher.transform)} (temperature, softcap), expected the same without a softcap"
        )

    def compute_loss(original, model, inputs, return_outputs=False, num_items_in_batch=None):
        tokens = {name: inputs[name] for name in ("input_ids", "attention_mask")}
        labels = inputs["labels"]

        def divergence(hidden, weight, bias, target):
            made = []

            def with_teacher(teacher_hidden, teacher_weight, teacher_bias, _):
                with torch.enable_grad():
                    loss = fused_linear_jsd(
                        hidden, weight, teacher_hidden, teacher_weight.detach(), target, bias=bias,
                        teacher_bias=None if teacher_bias is None else teacher_bias.detach(),
                        denominator=token_count(target, num_items_in_batch), beta=trainer.beta,
                        temperature=student.transform.temperature,
                    )  # fmt: skip
                made.append(loss)
                # The hooks of the teacher are to know nothing of a backward.
                return loss.detach(), _NOTHING

            # Within both heads the weights of both are whole, whatever shards them.
            with torch.no_grad():
                trainer.teacher_model(**tokens, labels=labels, fused_lm_head=True, liger_loss=with_teacher)
            return made[0], _NOTHING

        trainer.teacher_model.eval()
        loss = model(**tokens, labels=labels, fused_lm_head=True, liger_loss=divergence).loss
        if not return_outputs:
            return loss
        with torch.no_grad():
            return loss, model(**tokens)

    replace(trainer, "compute_loss", compute_loss)
    return None
