"""Recipes for norms, MLPs and attention: the forward of a patched class.

The original code runs for inputs that an op does not support: mixed dtypes, DTensors beside plain tensors, unusual
arguments.
"""

import functools
from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from .._core.dtensor import is_dtensor
from .._core.gated import GELU_NAMES
from .._tiled import tiled
from ..ops.geglu import geglu, geglu_packed
from ..ops.rms_norm import rms_norm
from ..ops.rope import rope
from ..ops.swiglu import swiglu, swiglu_packed
from ..ops.tiled_mlp import tiled_mlp
from ._rename import rename_global, uses_global
from ._reuse import linear_over

ROPE_NAME = "apply_rotary_pos_emb"
_NEW_ROPE_NAME = "_liger_apply_rotary_pos_emb"


@dataclass(frozen=True)
class NormRecipe:
    eps_name: str
    offset: float
    casting_mode: str
    kind: ClassVar[str] = "rms_norm"

    def run(self, x, weight, eps):
        return rms_norm(x, weight, eps, self.offset, self.casting_mode)

    def members(self, original):
        recipe = self

        def forward(self, *args, **kwargs):
            weight = self.weight
            # If the weight is wider than x, as under autocast, the original returns the dtype of the weight.
            if (
                kwargs
                or len(args) != 1
                or args[0].dtype != weight.dtype
                or is_dtensor(args[0]) != is_dtensor(weight)
            ):
                return original.forward(self, *args, **kwargs)
            return recipe.run(args[0], weight, getattr(self, recipe.eps_name))

        return {"forward": functools.wraps(original.forward)(forward)}


# Activation -> (option of patch, op for separate gate and up, op for packed gate and up).
_GATED = {
    "silu": ("swiglu", swiglu, swiglu_packed),
    **{
        name: (
            "geglu",
            functools.partial(geglu, approximate=approximate),
            functools.partial(geglu_packed, approximate=approximate),
        )
        for approximate, name in GELU_NAMES.items()
    },
}


@dataclass(frozen=True)
class MLPRecipe:
    """``down_proj(activation(gate) * up)``, from two projections or, packed, from one."""

    inputs: tuple
    act_name: str
    activation: str
    inplace: bool

    @property
    def kind(self):
        return _GATED[self.activation][0]

    @property
    def packed(self):
        return len(self.inputs) == 1

    def run(self, module, x):
        projections = [getattr(module, name) for name in self.inputs]
        # Only this call refers to gate and up, unless a forward hook has stored them.
        inplace = self.inplace and not any(p._forward_hooks for p in projections)
        gate_up = [projection(x) for projection in projections]
        # A packed DTensor may be sharded across the border of gate and up; the packed op would have to gather it.
        if (self.packed and is_dtensor(gate_up[0])) or gate_up[0].dtype != gate_up[-1].dtype:
            gate, up = gate_up[0].chunk(2, dim=-1) if self.packed else gate_up
            product = getattr(module, self.act_name)(gate) * up
        else:
            _, separate, packed = _GATED[self.activation]
            product = (packed if self.packed else separate)(*gate_up, inplace=inplace)
        # Only this call refers to the product, too.
        return linear_over(module.down_proj, product) if inplace else module.down_proj(product)

    def members(self, original):
        recipe = self

        def forward(self, *args, **kwargs):
            if kwargs or len(args) != 1:
                return original.forward(self, *args, **kwargs)
            return recipe.run(self, args[0])

        return {"forward": functools.wraps(original.forward)(forward)}


@dataclass(frozen=True)
class TiledMLPRecipe:
    """``down_proj(activation(gate) * up)``, one shard of tokens at a time.

    If a projection is not a plain linear layer (LoRA, quantised, with hooks), the original forward runs per shard and
    is recomputed in the backward.
    """

    inputs: tuple
    activation: str
    num_shards: int | None
    kind: ClassVar[str] = "tiled_mlp"

    def run(self, module, x):
        gate, *up = (getattr(module, name) for name in self.inputs)
        up = up[0] if up else None
        return tiled_mlp(
            x,
            gate.weight,
            None if up is None else up.weight,
            module.down_proj.weight,
            gate.bias,
            None if up is None else up.bias,
            module.down_proj.bias,
            self.activation,
            self._shards(x),
        )

    def _shards(self, x):
        return None if self.num_shards is None else max(min(self.num_shards, x.shape[:-1].numel()), 1)

    def members(self, original):
        recipe = self

        def forward(self, *args, **kwargs):
            if kwargs or len(args) != 1 or is_dtensor(args[0]):
                return original.forward(self, *args, **kwargs)
            projections = [getattr(self, name) for name in (*recipe.inputs, "down_proj")]
            if all(map(_is_plain_linear, projections)):
                return recipe.run(self, args[0])
            function = functools.partial(original.forward, self)
            return tiled(function, args[0], num_shards=recipe._shards(args[0]))

        return {"forward": functools.wraps(original.forward)(forward)}


def _is_plain_linear(projection):
    """Whether a layer is a plain nn.Linear with an unsharded weight and without hooks."""
    own_forward = type(projection).forward is not nn.Linear.forward or "forward" in projection.__dict__
    if own_forward or is_dtensor(projection.weight):
        return False
    # The hooks of ZeRO-3 only gather the weight, and reading the weight gathers it as well.
    partitioned = hasattr(projection.weight, "ds_id")
    hooks = (projection._forward_hooks, projection._forward_pre_hooks, projection._backward_hooks)
    return partitioned or not any(hooks)


@dataclass(frozen=True)
class RopeRecipe:
    """An attention whose forward calls liger.rope instead of its module's apply_rotary_pos_emb."""

    interleaved: bool
    kind: ClassVar[str] = "rope"

    def members(self, original):
        namespace = uses_global(original.forward, ROPE_NAME)
        namespace.setdefault(_NEW_ROPE_NAME, rotary_function(namespace[ROPE_NAME], self.interleaved))
        return {"forward": rename_global(original.forward, ROPE_NAME, _NEW_ROPE_NAME)}


def rotary_function(original, interleaved):
    """liger.rope with the signature of transformers' apply_rotary_pos_emb."""

    @functools.wraps(original)
    def apply(q, k=None, cos=None, sin=None, *args, unsqueeze_dim=1, **kwargs):
        # Functions with an optional k rotate q alone.
        unusual = args or kwargs or k is None or cos is None or sin is None
        heads_at = 0 if unusual else _heads_at(cos, unsqueeze_dim)
        if heads_at not in (1, 2) or not _rope_takes(q, k, cos):
            return original(q, k, cos, sin, *args, unsqueeze_dim=unsqueeze_dim, **kwargs)
        return rope(q, k, cos, sin, heads_at, interleaved)

    return apply


def _heads_at(cos, unsqueeze_dim):
    """The dimension of q and k, of four, along which ``cos.unsqueeze(unsqueeze_dim)`` is broadcast."""
    dims = cos.dim() + 1
    return 4 - dims + (unsqueeze_dim if unsqueeze_dim >= 0 else unsqueeze_dim + dims)


def _rope_takes(q, k, cos):
    return (
        q.dim() == 4
        and cos.dim() in (2, 3)
        and q.dtype == k.dtype
        and not cos.requires_grad
        and is_dtensor(q) == is_dtensor(cos)
    )
