# SPDX-License-Identifier: BSD-3-Clause
"""The gated experts of a mixture, with the constructor and the arguments of liger_kernel."""

from typing import Any

import torch

from ...nn.experts import GroupedExperts
from ...ops.grouped_experts.op import grouped_experts
from .mlps import _require_silu

_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
_WIDTHS = ("moe_intermediate_size", "intermediate_size")


def _size(config, names):
    """The first of these fields that the configuration has."""
    for name in names:
        if hasattr(config, name):
            return getattr(config, name)
    raise ValueError(f"LigerExperts: the configuration has no {' and no '.join(names)}, expected one of them")


def _apply_fused_moe(x, gate_up_proj, down_proj, top_k_index, top_k_weights):
    """:func:`liger.grouped_experts` of tokens (T, H) with indices and routing weights (T, K)."""
    return grouped_experts(x, top_k_index, top_k_weights, gate_up_proj, down_proj)


class LigerExperts(GroupedExperts):
    """:class:`liger.nn.GroupedExperts` with SiLU and without biases, in the sizes of a configuration.

    The forward reads gate_up_proj and down_proj alone, so that ``_patch_swiglu_module`` can give it to the
    experts of transformers.
    """

    def __init__(self, config: Any) -> None:
        _require_silu(self, config)
        super().__init__(_size(config, _COUNTS), config.hidden_size, _size(config, _WIDTHS))
        self.hidden_dim, self.intermediate_dim = self.hidden_size, self.intermediate_size

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Hidden states (..., H), experts and routing weights (..., K), of as many tokens."""
        rows = hidden_states.reshape(-1, hidden_states.shape[-1])
        choices = (t.reshape(-1, top_k_index.shape[-1]) for t in (top_k_index, top_k_weights))
        y = _apply_fused_moe(rows, self.gate_up_proj, self.down_proj, *choices)
        # Also under autocast, the result has the dtype of the hidden states.
        return y.view(hidden_states.shape).to(hidden_states.dtype)
