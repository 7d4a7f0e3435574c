# SPDX-License-Identifier: BSD-3-Clause
"""Gated MLPs that process one shard of tokens at a time."""

from __future__ import annotations

from typing import Any

import torch

from .._core.dtensor.inputs import is_dtensor
from .._core.modules.linear_layers import computes_linear_alone, needs_no_call
from .._core.op.arguments import BYTES, COUNT, arguments
from .._core.op.types import Activation, Approximate, Device
from ..ops.gated import GELU_NAMES
from ..ops.geglu import geglu
from ..ops.swiglu import swiglu
from ..ops.tiled_mlp.op import tiled_mlp
from ..ops.tiled_mlp.tiled import tiled
from .mlp import GELU, OPTIONS, SILU, Projections, options_of

_OPTIONS: dict[str, Any] = {**OPTIONS, "num_shards": COUNT, "memory_budget": BYTES}


class TiledMLP(Projections):
    """``down_proj(activation(gate_proj(x)) * up_proj(x))``.

    Plain projections are modules only for the names of their parameters: the forward does not call them. With
    others (LoRA, quantised, with hooks) the forward calls all of them, shard by shard. DDP, FSDP and ZeRO-1
    and 2 have their hooks on this module, on a layer around it, or on the parameters; ZeRO-3 gathers a
    parameter when a module's attribute is read.
    """

    activation: Activation = "silu"

    @arguments(**_OPTIONS)
    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        bias: bool = False,
        num_shards: int | None = None,
        memory_budget: int | None = None,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(hidden_size, intermediate_size, bias, device, dtype)
        self.num_shards, self.memory_budget = num_shards, memory_budget

    @arguments()
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up, down = projections = self.gate_proj, self.up_proj, self.down_proj
        # Frameworks that shard a weight leave hooks on its layer. For DTensors this module does what the
        # hooks do.
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
        """Every rank computes with its shard of the intermediate size. x and the result are replicated along
        the dimension of the mesh that has these shards; along others the ranks have tokens of their own."""
        from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

        from .._core.dtensor.placements import wrapped

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
        result = wrapped(y, mesh, along(tokens, Partial()), shape).redistribute(placements=tokens)
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


class TiledSwiGLUMLP(TiledMLP):
    """:class:`SwiGLUMLP`, a shard of tokens at a time, by :func:`liger.tiled_mlp`.

    Args:
        hidden_size, intermediate_size, bias, device, dtype: as in :class:`SwiGLUMLP`.
        num_shards, memory_budget: as in :func:`liger.tiled_mlp`. With fewer tokens than shards, each shard
            has one token.

    Shape:
        x: (..., hidden_size), the dtype of the parameters; the result has the shape and dtype of x.

    The submodules have the names of LlamaMLP's, so state dicts are compatible. Weights may be DTensors,
    sharded column-wise (gate_proj, up_proj) and row-wise (down_proj) along one dimension of a mesh, and
    replicated along the others. Projections that are no plain linear layers (LoRA, quantised) or have hooks
    run by :func:`liger.tiled`, which recomputes more and takes no memory_budget; hooks are called for each
    shard, also in the backward.

    Raises:
        TypeError: an option of another type, an x that is not a tensor.
        ValueError: a size, a number of shards or a number of bytes below one.
        RuntimeError: in the forward, DTensors with another sharding, and as :func:`liger.tiled_mlp`.

    Example::

        >>> mlp = liger.nn.TiledSwiGLUMLP(64, 192, num_shards=4)
        >>> y = mlp(torch.randn(2, 1000, 64))

    Source: shards of tokens as in Arctic Long Sequence Training, arXiv 2506.13996.
    """

    @classmethod
    def from_config(
        cls,
        config: Any,
        num_shards: int | None = None,
        memory_budget: int | None = None,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> TiledSwiGLUMLP:
        """As :meth:`SwiGLUMLP.from_config`."""
        given = options_of(cls.__name__, config, SILU)
        return cls(**given, num_shards=num_shards, memory_budget=memory_budget, device=device, dtype=dtype)


class TiledGEGLUMLP(TiledMLP):
    """:class:`GEGLUMLP`, a shard of tokens at a time, by :func:`liger.tiled_mlp`.

    Args:
        hidden_size, intermediate_size, bias, approximate, device, dtype: as in :class:`GEGLUMLP`.
        num_shards, memory_budget: as in :class:`TiledSwiGLUMLP`.

    Shape:
        x: (..., hidden_size), the dtype of the parameters; the result has the shape and dtype of x.

    Raises:
        TypeError, RuntimeError: as :class:`TiledSwiGLUMLP`.
        ValueError: as :class:`TiledSwiGLUMLP`, and an unknown approximation.

    Example::

        >>> mlp = liger.nn.TiledGEGLUMLP(64, 192, approximate="tanh")
        >>> y = mlp(torch.randn(2, 1000, 64))

    Source: as :class:`TiledSwiGLUMLP`.
    """

    @arguments(**_OPTIONS)
    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        bias: bool = False,
        approximate: Approximate = "none",
        num_shards: int | None = None,
        memory_budget: int | None = None,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(hidden_size, intermediate_size, bias, num_shards, memory_budget, device, dtype)
        self.activation = GELU_NAMES[approximate]

    @classmethod
    def from_config(
        cls,
        config: Any,
        num_shards: int | None = None,
        memory_budget: int | None = None,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> TiledGEGLUMLP:
        """As :meth:`GEGLUMLP.from_config`."""
        given = options_of(cls.__name__, config, GELU)
        return cls(**given, num_shards=num_shards, memory_budget=memory_budget, device=device, dtype=dtype)
