# SPDX-License-Identifier: BSD-3-Clause
"""Norms and other row-wise modules, with the constructors of liger_kernel."""

from typing import Any

import torch
from torch import nn

from ...nn.activation import ReLUSquared, Softmax
from ...nn.norm import GroupNorm
from ..parameters import takes
from .rows import _apply_fused_add_rms_norm, _apply_rms_norm, liger_group_norm, liger_layer_norm


def _initial(owner, init_fn, size):
    if init_fn not in ("ones", "zeros"):
        raise ValueError(f"{type(owner).__name__}: init_fn is {init_fn!r}, expected 'ones' or 'zeros'")
    return nn.Parameter(getattr(torch, init_fn)(size))


class LigerRMSNorm(nn.Module):
    """Root-mean-square norm, :func:`liger.rms_norm`. ``in_place`` and ``row_mode`` have no effect."""

    weight: nn.Parameter | None

    @takes(
        "self, hidden_size, eps=1e-6, offset=0.0, casting_mode='llama', init_fn='ones', in_place=True, row_mode=None, "
        "elementwise_affine=True"
    )
    def __init__(
        self, hidden_size, eps, offset, casting_mode, init_fn, in_place, row_mode, elementwise_affine
    ):
        super().__init__()
        self.elementwise_affine = elementwise_affine
        weight = _initial(self, init_fn, hidden_size)
        self.register_parameter("weight", weight if elementwise_affine else None)
        self.variance_epsilon, self.offset, self.casting_mode = eps, offset, casting_mode
        self.in_place, self.row_mode = in_place, row_mode

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return _apply_rms_norm(
            hidden_states, self.weight, self.variance_epsilon, self.offset, self.casting_mode
        )

    def extra_repr(self) -> str:
        shape = None if self.weight is None else tuple(self.weight.shape)
        return (
            f"{shape}, eps={self.variance_epsilon}, offset={self.offset}, casting_mode={self.casting_mode!r}"
        )


def _variant(name: str, offset: float, casting_mode: str, init_fn: str, in_place: bool = False) -> Any:
    """A subclass with other defaults, in the same order."""

    @takes(
        f"self, hidden_size, eps=1e-6, offset={offset}, casting_mode='{casting_mode}', init_fn='{init_fn}', "
        f"in_place={in_place}, row_mode=None"
    )
    def __init__(self, **options):
        LigerRMSNorm.__init__(self, **options)

    return type(name, (LigerRMSNorm,), {"__init__": __init__, "__module__": __name__})


_GEMMA = 1.0, "gemma", "zeros"
_LLAMA = 0.0, "llama", "ones"

LigerRMSNormForGemma = _variant("LigerRMSNormForGemma", *_GEMMA, in_place=True)
LigerRMSNormForGemma2 = _variant("LigerRMSNormForGemma2", *_GEMMA)
LigerRMSNormForQwen3Next = _variant("LigerRMSNormForQwen3Next", *_GEMMA)
LigerRMSNormForMuseGlimmerTextCentered = _variant("LigerRMSNormForMuseGlimmerTextCentered", *_GEMMA)
LigerRMSNormForOlmo2 = _variant("LigerRMSNormForOlmo2", *_LLAMA)
LigerRMSNormForGlm4 = _variant("LigerRMSNormForGlm4", *_LLAMA)


class LigerRMSNormForGemma3(LigerRMSNorm):
    """:class:`LigerRMSNorm` with the defaults of Gemma, whose size is called ``dim``."""

    def __init__(self, dim, eps=1e-6, offset=1.0, casting_mode="gemma", init_fn="zeros", in_place=False):
        super().__init__(dim, eps, offset, casting_mode, init_fn, in_place)


class LigerRMSNormForGemma4(LigerRMSNorm):
    """:class:`LigerRMSNorm` with an optional weight: ``with_scale=False`` has none."""

    def __init__(
        self,
        dim=None,
        eps=1e-6,
        offset=0.0,
        casting_mode="gemma",
        init_fn="ones",
        in_place=False,
        with_scale=True,
    ):
        if with_scale and dim is None:
            raise ValueError(f"{type(self).__name__}: no dim, expected one for a norm with a weight")
        super().__init__(dim or 0, eps, offset, casting_mode, init_fn, in_place, None, with_scale)
        self.with_scale = with_scale


LigerRMSNormForMuseGlimmer = type(
    "LigerRMSNormForMuseGlimmer", (LigerRMSNormForGemma4,), {"__module__": __name__}
)


class LigerFusedAddRMSNorm(nn.Module):
    """Residual addition and norm, :func:`liger.fused_add_rms_norm`: (normalised sum, sum)."""

    def __init__(
        self, hidden_size, eps=1e-6, offset=0.0, casting_mode="llama", init_fn="ones", in_place=False
    ):
        super().__init__()
        self.weight = _initial(self, init_fn, hidden_size)
        self.variance_epsilon, self.offset, self.casting_mode = eps, offset, casting_mode
        self.in_place = in_place

    def forward(
        self, hidden_states: torch.Tensor, residual: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return _apply_fused_add_rms_norm(
            hidden_states, residual, self.weight, self.variance_epsilon, self.offset, self.casting_mode
        )


class LigerLayerNorm(nn.Module):
    """Layer norm, :func:`liger.layer_norm`. There is always a bias, which starts at zero; ``bias`` has no
    effect."""

    def __init__(self, hidden_size, eps=1e-6, bias=False, init_fn="ones", impl=None, mode=None, backend=None):
        super().__init__()
        self.hidden_size, self.eps, self.variance_epsilon = hidden_size, eps, eps
        self.weight = _initial(self, init_fn, hidden_size)
        self.bias = nn.Parameter(torch.zeros(hidden_size))

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return liger_layer_norm(hidden_states, self.weight, self.bias, self.variance_epsilon)

    def extra_repr(self) -> str:
        return f"{self.hidden_size}, eps={self.variance_epsilon}"


class LigerGroupNorm(GroupNorm):
    """:class:`liger.nn.GroupNorm`. There is always a bias, which starts at zero; ``bias`` has no effect."""

    def __init__(
        self, num_channels: int, num_groups: int, eps: float = 1e-6, bias: bool = False, init_fn: str = "ones"
    ) -> None:
        super().__init__(num_groups, num_channels, eps)
        self.variance_epsilon = eps
        self.weight = _initial(self, init_fn, num_channels)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return liger_group_norm(
            hidden_states, self.weight, self.bias, self.num_channels, self.num_groups, self.variance_epsilon
        )

    def extra_repr(self) -> str:
        return f"num_channels={self.num_channels}, num_groups={self.num_groups}, eps={self.variance_epsilon}"


class LigerSoftmax(Softmax):
    """:class:`liger.nn.Softmax`."""

    def __init__(self) -> None:
        super().__init__()


class LigerReLUSquared(ReLUSquared):
    """:class:`liger.nn.ReLUSquared`."""
