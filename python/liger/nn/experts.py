# SPDX-License-Identifier: BSD-3-Clause
"""The gated experts of a mixture, with the parameters of transformers' experts."""

import math

import torch
from torch import nn

from .._core.op.arguments import MODULE, arguments
from .._core.op.types import Device, ExpertActivation
from ..ops.grouped_experts.arguments import OPTIONS
from ..ops.grouped_experts.op import grouped_experts


class GroupedExperts(nn.Module):
    """The weighted sum, over the chosen experts of each token, of gated MLPs, by
    :func:`liger.grouped_experts`.

    Args:
        num_experts: number of experts, E.
        hidden_size: size of the last dimension of x and of the result, H.
        intermediate_size: size of the product of gate and up, I.
        bias: whether both projections have a bias.
        activation, is_transposed, is_interleaved, alpha, limit, recompute: as in
            :func:`liger.grouped_experts`.
        device, dtype: of the parameters.

    Parameters: gate_up_proj and down_proj, and with ``bias`` gate_up_proj_bias and down_proj_bias, with the
    shapes of :func:`liger.grouped_experts` and the initialisation of ``torch.nn.Linear``.

    Shape:
        x: (..., H); top_k_index, top_k_weights: (..., K); the result has the shape and dtype of x.

    Raises:
        TypeError: an option of another type, an input that is not a tensor.
        ValueError: a size that is not positive, an unknown activation, an alpha or limit that is not
            positive.
        RuntimeError: as :func:`liger.grouped_experts`.

    Example::

        >>> experts = liger.nn.GroupedExperts(8, 64, 192)
        >>> y = experts(torch.randn(10, 64), torch.randint(8, (10, 2)), torch.rand(10, 2))

    Sources: as :func:`liger.grouped_experts`.
    """

    @arguments(**MODULE, **OPTIONS)
    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        bias: bool = False,
        activation: ExpertActivation = "silu",
        is_transposed: bool = False,
        is_interleaved: bool = False,
        alpha: float = 1.702,
        limit: float | None = None,
        recompute: bool = False,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.num_experts, self.hidden_size, self.intermediate_size = (
            num_experts,
            hidden_size,
            intermediate_size,
        )
        self.activation, self.is_transposed, self.is_interleaved = activation, is_transposed, is_interleaved
        self.alpha, self.limit, self.recompute = alpha, limit, recompute

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(num_experts, *shape, device=device, dtype=dtype))

        gate_up, down = (2 * intermediate_size, hidden_size), (hidden_size, intermediate_size)
        self.gate_up_proj = parameter(*(gate_up[::-1] if is_transposed else gate_up))
        self.down_proj = parameter(*(down[::-1] if is_transposed else down))
        self.gate_up_proj_bias = parameter(2 * intermediate_size) if bias else None
        self.down_proj_bias = parameter(hidden_size) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Uniform values within 1 / sqrt(inputs), as torch.nn.Linear."""
        for inputs, parameters in (
            (self.hidden_size, (self.gate_up_proj, self.gate_up_proj_bias)),
            (self.intermediate_size, (self.down_proj, self.down_proj_bias)),
        ):
            for parameter in parameters:
                if parameter is not None:
                    nn.init.uniform_(parameter, -1 / math.sqrt(inputs), 1 / math.sqrt(inputs))

    @arguments()
    def forward(
        self, x: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        parameters = self.gate_up_proj, self.down_proj, self.gate_up_proj_bias, self.down_proj_bias
        options = {name: getattr(self, name) for name in OPTIONS}
        return grouped_experts(x, top_k_index, top_k_weights, *parameters, **options)

    def extra_repr(self) -> str:
        sizes = f"{self.num_experts}, {self.hidden_size}, {self.intermediate_size}"
        return f"{sizes}, bias={self.down_proj_bias is not None}, activation={self.activation!r}"
