"""Gated MLPs that process one shard of tokens at a time, with the constructors of Hugging Face's MLPs."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .._core.arguments import ANYTHING, BYTES, COUNT, DTYPE, arguments
from .._core.dtensor import is_dtensor
from .._core.linear_layers import computes_linear_alone, needs_no_call
from .._core.types import Activation, Device
from .._tiled import tiled
from ..ops.geglu import geglu
from ..ops.swiglu import swiglu
from ..ops.tiled_mlp import tiled_mlp

# Hugging Face's name of an activation -> the name in liger.tiled_mlp.
_SILU: dict[str, Activation] = {"silu": "silu", "swish": "silu"}
_GELU: dict[str, Activation] = {
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_accurate": "gelu_tanh",
}


class _TiledMLP(nn.Module):
    """``down_proj(activation(gate_proj(x)) * up_proj(x))``.

    Plain projections are modules only for the names of their parameters: the forward does not call them. With others
    (LoRA, quantised, with hooks) the forward calls all of them, shard by shard. DDP, FSDP and ZeRO-1 and 2 have their
    hooks on this module, on a layer around it, or on the parameters; ZeRO-3 gathers a parameter when a module's
    attribute is read.
    """

    _activations: dict[str, Activation]

    @arguments(
        config=ANYTHING, num_shards=COUNT, memory_budget=BYTES, device=ANYTHING, dtype=DTYPE
    )  # fmt: skip
    def __init__(
        self,
        config: Any,
        num_shards: int | None = None,
        memory_budget: int | None = None,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        # Gemma's configurations have both; hidden_activation is the one that its MLP uses.
        name = getattr(config, "hidden_activation", None) or config.hidden_act
        if name not in self._activations:
            raise ValueError(
                f"{type(self).__name__}: the activation of the configuration is {name!r}, "
                f"expected one of {', '.join(self._activations)}"
            )
        self.hidden_size, self.intermediate_size = config.hidden_size, config.intermediate_size
        self.activation, self.num_shards, self.memory_budget = (
            self._activations[name],
            num_shards,
            memory_budget,
        )
        options: dict[str, Any] = {
            "bias": getattr(config, "mlp_bias", False),
            "device": device,
            "dtype": dtype,
        }
        self.gate_proj = nn.Linear(self.hidden_size, self.intermediate_size, **options)
        self.up_proj = nn.Linear(self.hidden_size, self.intermediate_size, **options)
        self.down_proj = nn.Linear(self.intermediate_size, self.hidden_size, **options)

    @arguments()
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up, down = projections = self.gate_proj, self.up_proj, self.down_proj
        # Those who shard a weight leave hooks on its layer. For DTensors this module does what they do.
        sharded = any(is_dtensor(getattr(p, "weight", None)) for p in projections)
        is_plain = computes_linear_alone if sharded else needs_no_call
        if not all(is_plain(p, x) for p in projections):
            return tiled(self._of_modules, x, num_shards=self._shards(x))
        weights, biases = (gate.weight, up.weight, down.weight), (gate.bias, up.bias, down.bias)
        if is_dtensor(weights[0]):
            return self._tensor_parallel(x, weights, biases)
        return tiled_mlp(x, *weights, *biases, self.activation, self._shards(x), self.memory_budget)

    def _of_modules(self, x):
        gate, up = self.gate_proj(x), self.up_proj(x)
        if self.activation == "silu":
            return self.down_proj(swiglu(gate, up))
        return self.down_proj(
            geglu(gate, up, approximate="tanh" if self.activation == "gelu_tanh" else "none")
        )

    def _shards(self, x):
        """At most one shard per token: the last batch of an epoch may have fewer tokens than shards."""
        return None if self.num_shards is None else max(min(self.num_shards, x.shape[:-1].numel()), 1)

    def _tensor_parallel(self, x, weights, biases):
        """Every rank computes with its shard of the intermediate size. x and the result are replicated along the
        dimension of the mesh that has these shards; along others the ranks have tokens of their own."""
        from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

        from .._core.placements import dense_strides

        mesh, dimension = weights[0].device_mesh, self._tensor_dimension(weights)

        def along(others, placement):
            return [placement if i == dimension else p for i, p in enumerate(others)]

        if isinstance(x, DTensor):
            tokens = along([Replicate() if p.is_partial() else p for p in x.placements], Replicate())
            distributed = x.redistribute(placements=tokens)
        else:
            tokens = along([Shard(0)] * mesh.ndim, Replicate())
            distributed = DTensor.from_local(x, mesh, tokens, run_check=False)
        # Also along a _StridedShard, as of flattened (batch, tokens), the ranks have tokens of their own.
        sums = [p if p.is_replicate() else Partial() for p in tokens]
        local = distributed.to_local(grad_placements=along(tokens, Partial()))
        column, row = along(sums, Shard(0)), along(sums, Shard(1))
        y = tiled_mlp(
            local,
            *(w.to_local(grad_placements=p) for w, p in zip(weights, (column, column, row), strict=True)),
            *(None if b is None else b.to_local(grad_placements=column) for b in biases[:2]),
            None,  # added below: here every rank would add it
            self.activation,
            self._shards(local),
            self.memory_budget,
        )
        shape = (*distributed.shape[:-1], y.shape[-1])
        result = DTensor.from_local(
            y, mesh, along(tokens, Partial()), run_check=False, shape=shape, stride=dense_strides(y, shape)
        ).redistribute(placements=tokens)
        if biases[2] is not None:
            result = result + biases[2]
        return result if isinstance(x, DTensor) else result.to_local()

    def _tensor_dimension(self, weights):
        """The dimension of the mesh along which the intermediate size is sharded."""
        from torch.distributed.tensor import DTensor, Shard

        mesh, names = weights[0].device_mesh, ("gate_proj", "up_proj", "down_proj")
        dimensions = [i for i, p in enumerate(weights[0].placements) if p == Shard(0)]
        for name, weight, expected in zip(names, weights, (Shard(0), Shard(0), Shard(1)), strict=True):
            found = list(weight.placements) if isinstance(weight, DTensor) else []
            if (
                len(dimensions) == 1
                and len(found) == mesh.ndim
                and weight.device_mesh == mesh
                and found.pop(dimensions[0]) == expected
                and all(p.is_replicate() for p in found)
            ):
                continue
            got = weight.placements if isinstance(weight, DTensor) else "not a DTensor"
            raise RuntimeError(
                f"{type(self).__name__}: {name}.weight is {got}, expected ({expected},): column-wise gate_proj and "
                "up_proj, row-wise down_proj, along the same dimension of one mesh, and replicated along its other "
                "dimensions. fully_shard belongs on this module or on a layer around it, not on its projections"
            )
        return dimensions[0]

    def extra_repr(self) -> str:
        return f"activation={self.activation!r}, num_shards={self.num_shards}, memory_budget={self.memory_budget}"


class TiledSwiGLUMLP(_TiledMLP):
    """``down_proj(silu(gate_proj(x)) * up_proj(x))``, a shard of tokens at a time, by :func:`liger.tiled_mlp`.

    Args:
        config: of a Hugging Face model, or any object with ``hidden_size``, ``intermediate_size``, ``hidden_act`` and,
            if the projections have biases, ``mlp_bias=True``.
        num_shards, memory_budget: as in :func:`liger.tiled_mlp`. With fewer tokens than shards, each shard has one
            token.
        device, dtype: of the parameters.

    Shape:
        x: (..., hidden_size), the dtype of the parameters; the result has the shape and dtype of x.

    The submodules have the names of LlamaMLP's, so state dicts are compatible. Weights may be DTensors, sharded
    column-wise (gate_proj, up_proj) and row-wise (down_proj) along one dimension of a mesh, and replicated along the
    others. Projections that are no plain linear layers (LoRA, quantised) or have hooks run by :func:`liger.tiled`,
    which recomputes more and takes no memory_budget; hooks are called for each shard, also in the backward.

    Raises:
        TypeError: an option of another type, an x that is not a tensor.
        ValueError: an unsupported activation in the configuration, a number of shards or bytes below one.
        RuntimeError: in the forward, DTensors with another sharding, and as :func:`liger.tiled_mlp`.

    Source: shards of tokens as in Arctic Long Sequence Training, arXiv 2506.13996.
    """

    _activations = _SILU


class TiledGEGLUMLP(_TiledMLP):
    """``down_proj(gelu(gate_proj(x)) * up_proj(x))``, a shard of tokens at a time, by :func:`liger.tiled_mlp`.

    Args:
        config: as of :class:`TiledSwiGLUMLP`, with ``hidden_activation`` or, without it, ``hidden_act``, which selects
            the exact GELU (``"gelu"``) or its tanh approximation (``"gelu_pytorch_tanh"``, ``"gelu_new"``).
        num_shards, memory_budget, device, dtype: as in :class:`TiledSwiGLUMLP`.

    Shape:
        x: (..., hidden_size), the dtype of the parameters; the result has the shape and dtype of x.

    Raises:
        TypeError, ValueError, RuntimeError: as :class:`TiledSwiGLUMLP`.

    Source: as :class:`TiledSwiGLUMLP`.
    """

    _activations = _GELU
