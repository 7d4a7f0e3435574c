# SPDX-License-Identifier: BSD-3-Clause
"""OnlineDPOTrainer: its own loss reads log-probabilities by liger."""

import torch
from trl.experimental.online_dpo import OnlineDPOTrainer

from ._adapter import add_heads, replace


def adapt_online_dpo(trainer):
    if type(trainer)._forward is not OnlineDPOTrainer._forward:
        return f"{type(trainer).__name__} has a _forward of its own, which computes all logits"
    add_heads(trainer)

    def forward(
        original, model, prompt_ids, prompt_mask, completion_ids, completion_mask, vision_inputs=None
    ):
        if prompt_ids.shape[1] == 0:
            # The first token of the answer has no position that predicts it.
            return original(model, prompt_ids, prompt_mask, completion_ids, completion_mask, vision_inputs)
        length = completion_ids.shape[1]
        if vision_inputs is None:
            # As the trainer does: prompts lose tokens on the left until prompt and answer fit.
            excess = max(prompt_ids.shape[1] + length - trainer.max_length, 0)
            prompt_ids, prompt_mask = prompt_ids[:, excess:], prompt_mask[:, excess:]
        ids = torch.cat((prompt_ids, completion_ids), 1)
        names = ("pixel_values", "pixel_attention_mask", "image_sizes", "image_grid_thw")
        images = {name: vision_inputs[name] for name in names if name in (vision_inputs or {})}
        # Padding is also scored: the trainer's KL divergence and entropy cover it.
        mask = torch.cat((prompt_mask, completion_mask), 1)
        call = {"labels": ids, "fused_lm_head": True, "liger_keep": length}
        output = model(ids, attention_mask=mask, **call, **images)
        return output.log_probs

    replace(trainer, "_forward", forward)
    return "its pairs depend on rewards of the sampled answers"
