# SPDX-License-Identifier: BSD-3-Clause
"""Distillation losses in liger.losses."""

from liger import losses

from .case import LENGTH, ROWS, VOCAB, add, normal
from .sequences import ignored_sequences, of_module, sequences_with_head


def _distillation(logits=False):
    def make(device, dtype):
        hidden, weight, labels, bias = sequences_with_head(device, dtype)
        made = {"input": hidden, "weight": weight, "target": labels, "bias": bias}
        if logits:
            return made | {"teacher_logits": normal(device, dtype, ROWS, LENGTH, VOCAB)}
        return made | {
            "teacher_input": normal(device, dtype, ROWS, LENGTH, 24),
            "teacher_weight": normal(device, dtype, VOCAB, 24, scale=0.2),
            "teacher_bias": normal(device, dtype, VOCAB, scale=0.3),
        }

    return make


def _top_k(device, dtype):
    made = _distillation(logits=True)(device, dtype)
    found = made.pop("teacher_logits").float().log_softmax(-1).topk(5, -1)
    return made | {"teacher_logprobs": found.values, "teacher_indices": found.indices}


for _name, _loss, _make in (
    ("JSD", losses.FusedLinearJSDLoss(beta=0.1), _distillation()),
    ("JSD logits", losses.FusedLinearJSDLoss(temperature=1.7), _distillation(logits=True)),
    ("JSD chunks", losses.FusedLinearJSDLoss(memory_budget=4 * VOCAB * 4), _distillation()),
    ("KL", losses.FusedLinearKLDivLoss(), _distillation()),
    ("reverse KL", losses.FusedLinearKLDivLoss(reverse=True), _distillation()),
    ("cosine", losses.FusedLinearCosineSimilarityLoss(), _distillation()),
    ("cosine logits", losses.FusedLinearCosineSimilarityLoss(), _distillation(logits=True)),
    ("top k", losses.FusedLinearTopKLoss(), _top_k),
    ("top k renormalised", losses.FusedLinearTopKLoss(rest="renormalize"), _top_k),
):
    add(
        f"losses.{_name}", of_module(_loss), _make, "input weight bias",
        public=f"losses.{type(_loss).__name__}", loss=True,
        ignored=ignored_sequences("input", "teacher_input", "teacher_logits", "teacher_logprobs"),
    )  # fmt: skip
