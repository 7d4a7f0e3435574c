# SPDX-License-Identifier: BSD-3-Clause
"""A loss of NeMo Automodel, from hidden states and the weight of the lm_head:

loss_fn:
  _target_: liger.integrations.automodel.LigerLinearCrossEntropy
"""

from typing import Any, cast

import torch
import torch.distributed as dist
from nemo_automodel.components.loss.linear_ce_base import LinearCrossEntropy

from .._core.op.types import FusedCrossEntropyOptions, Reduction
from ..ops.fused_linear_ce.op import fused_linear_ce


class LigerLinearCrossEntropy(LinearCrossEntropy):
    """:func:`liger.fused_linear_ce` with the arguments of Automodel's ``FusedLinearCrossEntropy``.

    Args:
        ignore_index: the label of tokens without a loss.
        logit_softcapping: the softcap of the logits; 0 means none.
        reduction: ``"sum"``, ``"mean"`` or ``"none"``.
        options: other options of :func:`liger.fused_linear_ce`, such as memory_budget.
    """

    def __init__(
        self,
        ignore_index: int = -100,
        logit_softcapping: float = 0.0,
        reduction: Reduction = "sum",
        **options: Any,
    ) -> None:
        super().__init__()
        self.ignore_index, self.reduction = ignore_index, reduction
        self.options = cast(FusedCrossEntropyOptions, {**options, "softcap": logit_softcapping or None})

    def forward(
        self,
        hidden_states: torch.Tensor,
        labels: torch.Tensor,
        lm_weight: torch.Tensor,
        num_label_tokens: int | None = None,
        grad_reduce_group: dist.ProcessGroup | None = None,
        loss_weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if num_label_tokens is not None and self.reduction != "sum":
            raise ValueError(
                f"LigerLinearCrossEntropy: num_label_tokens was given with reduction '{self.reduction}', "
                "expected 'sum'"
            )
        weight = self.materialize_lm_weight(lm_weight, grad_reduce_group=grad_reduce_group)
        options: FusedCrossEntropyOptions = {
            **self.options,
            "ignore_index": self.ignore_index,
            "token_weight": loss_weights,
            "reduction": self.reduction if num_label_tokens is None else "mean",
            # Without any label the sum is 0, and so must be the loss.
            "denominator": None if num_label_tokens is None else max(num_label_tokens, 1),
        }
        return fused_linear_ce(
            # Packed sequences come as (1, tokens, hidden) with labels (tokens,).
            hidden_states.reshape(*labels.shape, -1),
            # FSDP casts the hidden states, but not a weight that is used outside of its module.
            weight.to(hidden_states.dtype),
            labels,
            **options,
        )
