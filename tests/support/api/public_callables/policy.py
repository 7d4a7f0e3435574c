# SPDX-License-Identifier: BSD-3-Clause
"""Policy losses in liger.losses: GRPO, GSPO and PPO."""

import torch
from losses_cases import packed

from liger import losses

from .case import IGNORED, LENGTH, ROWS, VOCAB, add
from .sequences import of_module, outside_sequences, sequences_with_head


def _policy(per_token=False):
    def make(device, dtype):
        hidden, weight, ids, bias = sequences_with_head(device, dtype)
        mask = (ids != IGNORED).long()
        shape = (ROWS, LENGTH) if per_token else (ROWS,)
        logprobs = -1.0 - 2 * torch.rand(2, ROWS, LENGTH).to(device)
        return {
            "input": hidden, "weight": weight, "target": ids.clamp_min(0), "bias": bias,
            "advantages": torch.randn(shape).to(device), "mask": mask, "ref_per_token_logps": logprobs[0],
            "old_per_token_logps": logprobs[1],
        }  # fmt: skip

    return make


def _packed_policy(device, dtype):
    made = _policy()(device, dtype)
    made["vllm_is_ratio"] = 0.5 + torch.rand(ROWS, LENGTH).to(device)
    of_tokens = [
        name for name, t in made.items() if isinstance(t, torch.Tensor) and t.shape[:2] == (ROWS, LENGTH)
    ]
    counted = made["mask"].masked_fill(made["mask"] == 0, IGNORED)
    tensors, ends = packed([made[name] for name in of_tokens], counted)
    return made | dict(zip(of_tokens, tensors, strict=True)) | {"cu_seqlens": ends, "max_length": LENGTH}


def _ignored_policy(given):
    names = ("input", "ref_per_token_logps", "old_per_token_logps", "advantages", "vllm_is_ratio")
    mask = given["mask"] == 0
    if "cu_seqlens" in given:
        mask = mask | outside_sequences(given["cu_seqlens"], mask.shape[-1])
    found = {name: mask for name in names if name in given and given[name].shape[:2] == mask.shape}
    if "advantages" not in found and "cu_seqlens" not in given:
        found["advantages"] = mask.all(-1)
    return found


for _name, _loss, _make in (
    *(
        (f"GRPO {kind}", losses.FusedLinearGRPOLoss(loss_type=kind), _policy())
        for kind in losses.policy.GRPO_LOSS_TYPES
    ),
    ("GRPO chunks", losses.FusedLinearGRPOLoss(memory_budget=2 * VOCAB * 4, temperature=0.8), _policy()),
    ("GSPO", losses.FusedLinearGRPOLoss(importance_sampling_level="sequence"), _policy()),
    ("GRPO entropy", losses.FusedLinearGRPOLoss(entropy_coef=0.01, delta=1.5), _policy()),
    ("GRPO packed", losses.FusedLinearGRPOLoss(), _packed_policy),
    ("GSPO packed", losses.FusedLinearGRPOLoss(importance_sampling_level="sequence"), _packed_policy),
    ("PPO", losses.FusedLinearPPOLoss(), _policy(per_token=True)),
):
    add(
        f"losses.{_name}", of_module(_loss), _make, "input weight bias",
        public=f"losses.{type(_loss).__name__}", ignored=_ignored_policy, loss=True,
    )  # fmt: skip
