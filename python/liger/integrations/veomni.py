# SPDX-License-Identifier: BSD-3-Clause
"""Kernels of VeOmni by the name ``liger_ops``. ``import liger.integrations.veomni`` in the training script
registers them; the configuration chooses them, op by op:

    model:
      ops_implementation:
        rms_norm_implementation: liger_ops
        rotary_pos_emb_implementation: liger_ops
        swiglu_mlp_implementation: liger_ops
"""

from collections.abc import Callable
from typing import Any

import torch
from veomni.ops.kernel_registry import KERNEL_REGISTRY, HardwareRequirement, KernelSpec

from ..nn.norm import RMSNormGated
from ..ops.rms_norm import rms_norm
from ..ops.rope.op import rope
from ..ops.swiglu import swiglu


def _offset_rms_norm(hidden_states: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return rms_norm(hidden_states, weight, eps, offset=1.0, casting_mode="gemma")


def _vision_rope(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """q and k (tokens, heads, head_dim)."""
    q, k = rope(q.unsqueeze(0), k.unsqueeze(0), cos, sin, unsqueeze_dim=2)
    return q.squeeze(0), k.squeeze(0)


def _swiglu_mlp(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x), inplace=True))


# {(op, variant): what the forward of a model calls}. The gated norm is a class, which the model builds.
KERNELS: dict[tuple[str, str], Callable[..., Any]] = {
    ("rms_norm", "standard"): rms_norm,
    ("rms_norm", "unweighted"): rms_norm,
    ("rms_norm", "qwen3_5"): _offset_rms_norm,
    ("rms_norm_gated", "standard"): RMSNormGated,
    ("rotary_pos_emb", "full"): rope,
    ("rotary_pos_emb_vision", "full"): _vision_rope,
    ("swiglu_mlp", "standard"): _swiglu_mlp,
}

for (_op, _variant), _kernel in KERNELS.items():
    KERNEL_REGISTRY.register(
        KernelSpec(
            name="liger_ops",
            op_name=_op,
            variant=_variant,
            factory=lambda kernel=_kernel: kernel,
            hardware=HardwareRequirement(device_type="any"),
            description="liger-ops",
        ),
        force=True,  # importlib.reload is no error
    )
