# SPDX-License-Identifier: BSD-3-Clause
"""Gated MLPs, with the constructors and the submodule names of liger_kernel."""

from typing import Any

import torch
from torch import nn

from ...nn.mlp import GELU, SILU, Projections, options_of
from ...nn.tiled_mlp import TiledMLP
from ...ops.gated import GELU_NAMES
from .rows import _apply_silu_mul, liger_geglu, swiglu_packed


def _activation(config):
    return getattr(config, "hidden_activation", None) or getattr(config, "hidden_act", None)


def _require_silu(owner, config):
    if _activation(config) not in SILU:
        raise ValueError(
            f"{type(owner).__name__}: the activation of the configuration is {_activation(config)!r}, expected one "
            f"of {', '.join(SILU)}"
        )


class _GatedMLP(Projections):
    def __init__(self, config: Any, intermediate_size: int | None = None) -> None:
        size = config.intermediate_size if intermediate_size is None else intermediate_size
        super().__init__(config.hidden_size, size, getattr(config, "mlp_bias", False), None, None)
        self.config = config


class LigerSwiGLUMLP(_GatedMLP):
    """``down_proj(silu(gate_proj(x)) * up_proj(x))``; biases as ``config.mlp_bias`` says."""

    def __init__(self, config: Any, intermediate_size: int | None = None) -> None:
        super().__init__(config, intermediate_size)
        _require_silu(self, config)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(_apply_silu_mul(self.gate_proj(x), self.up_proj(x)))


class LigerQwen3MoeSwiGLUMLP(LigerSwiGLUMLP):
    """:class:`LigerSwiGLUMLP` under the name for Qwen3Moe and DeepSeek."""


class LigerSwiGLUMLPForMuseGlimmer(LigerSwiGLUMLP):
    """:class:`LigerSwiGLUMLP` under the name for MuseGlimmer."""


class LigerHunyuanV1SwiGLUMLP(LigerSwiGLUMLP):
    """:class:`LigerSwiGLUMLP` with the index of its layer."""

    def __init__(self, config: Any, layer_idx: int | None = None, is_shared_mlp: bool = False) -> None:
        super().__init__(config)
        self.layer_idx = layer_idx


class LigerFalconH1SwiGLUMLP(LigerSwiGLUMLP):
    """:class:`LigerSwiGLUMLP` with the factors ``config.mlp_multipliers`` of the gate and of the result."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.gate_multiplier, self.down_multiplier = map(float, config.mlp_multipliers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        product = _apply_silu_mul(self.gate_proj(x), self.up_proj(x), self.gate_multiplier)
        return self.down_proj(product) * self.down_multiplier


class LigerBlockSparseTop2MLP(nn.Module):
    """``w2(silu(w1(x)) * w3(x))``: one expert of Mixtral."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.ffn_dim, self.hidden_dim = config.intermediate_size, config.hidden_size
        self.w1 = nn.Linear(self.hidden_dim, self.ffn_dim, bias=False)
        self.w2 = nn.Linear(self.ffn_dim, self.hidden_dim, bias=False)
        self.w3 = nn.Linear(self.hidden_dim, self.ffn_dim, bias=False)
        _require_silu(self, config)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(_apply_silu_mul(self.w1(x), self.w3(x)))


class LigerPhi3SwiGLUMLP(nn.Module):
    """``down_proj(silu(gate) * up)`` with gate and up from one projection, which are not copied apart."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self.hidden_size, self.intermediate_size = config.hidden_size, config.intermediate_size
        self.gate_up_proj = nn.Linear(self.hidden_size, 2 * self.intermediate_size, bias=False)
        self.down_proj = nn.Linear(self.intermediate_size, self.hidden_size, bias=False)
        _require_silu(self, config)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(swiglu_packed(self.gate_up_proj(x)))


class LigerGEGLUMLP(_GatedMLP):
    """``down_proj(gelu(gate_proj(x)) * up_proj(x))`` with the approximation by tanh."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(liger_geglu(self.gate_proj(x), self.up_proj(x)))


class LigerGEGLUMLPForGemma4(LigerGEGLUMLP):
    """:class:`LigerGEGLUMLP`, twice as wide in the layers of Gemma 4 that share keys and values, if the
    configuration has ``use_double_wide_mlp``."""

    def __init__(self, config: Any, layer_idx: int | None = None) -> None:
        shared = getattr(config, "num_kv_shared_layers", 0)
        first_shared = getattr(config, "num_hidden_layers", 0) - shared
        wide = getattr(config, "use_double_wide_mlp", False) and layer_idx is not None and shared > 0
        factor = 2 if wide and layer_idx is not None and layer_idx >= first_shared > 0 else 1
        _GatedMLP.__init__(self, config, factor * config.intermediate_size)


class LigerTiledSwiGLUMLP(TiledMLP):
    """:class:`liger.nn.TiledSwiGLUMLP`."""

    def __init__(self, config: Any, num_shards: int | None = None) -> None:
        super().__init__(**options_of(type(self).__name__, config, SILU), num_shards=num_shards)


class LigerTiledGEGLUMLP(TiledMLP):
    """:class:`liger.nn.TiledGEGLUMLP`."""

    def __init__(self, config: Any, num_shards: int | None = None) -> None:
        given = options_of(type(self).__name__, config, GELU)
        activation = GELU_NAMES[given.pop("approximate")]
        super().__init__(**given, num_shards=num_shards)
        self.activation = activation
