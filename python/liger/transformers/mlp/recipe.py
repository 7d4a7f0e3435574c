# SPDX-License-Identifier: BSD-3-Clause
"""Recipes for gated MLPs: the forward of a patched class.

The original code runs for inputs that an op does not support: mixed dtypes, DTensors mixed with plain
tensors, unusual arguments.
"""

import functools
from dataclasses import dataclass
from typing import ClassVar

from ..._core.dtensor.inputs import is_dtensor
from ..._core.modules.linear_layers import caller_owns_output, needs_no_call
from ...ops.gated import GELU_NAMES
from ...ops.geglu import geglu, geglu_packed
from ...ops.swiglu import swiglu, swiglu_packed
from ...ops.tiled_mlp.op import tiled_mlp
from ...ops.tiled_mlp.tiled import tiled
from ..recipe import recomputed
from ..recipe.classes import is_hooked
from ..recipe.reuse import linear_over
from .gated_linear import Form, applies, gated_linear
from .lora_mlp import gated_lora, parts_of

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


ACTIVATION_NAMES = ("act_fn", "activation_fn")
HOOKED = "its activation has hooks, which the op would not call"
DROPS = "its dropout has a rate above 0 or hooks, which the op would not apply"


def _drops(module, names):
    """True if one of these dropouts drops anything in training, or has hooks: an op calls none of them."""
    return any(getattr(module, name).p > 0 or is_hooked(getattr(module, name)) for name in names)


@functools.cache
def _form(activation, packed):
    if activation == "silu":
        return Form("swiglu", packed, (), emits=True)
    approximate = next(a for a, name in GELU_NAMES.items() if name == activation)
    # By tanh, the backward kernel has other bits than the forward kernel.
    return Form("geglu", packed, (approximate,), emits=activation == "gelu")


@dataclass(frozen=True)
class MLPRecipe:
    """``down_proj(activation(gate) * up)``, from two projections or, packed, from one.

    dropouts: names of submodules that had rate 0 in the trial.
    """

    inputs: tuple
    act_name: str
    activation: str
    inplace: bool
    # True if the backward recomputes the product of gate and up.
    recompute: bool = False
    dropouts: tuple = ()
    # True if LoRA adapters of the projections are a part of the op.
    lora_linear: bool = False

    @property
    def kind(self):
        return _GATED[self.activation][0]

    @property
    def packed(self):
        return len(self.inputs) == 1

    def unused_because(self, module):
        """Why each call reaches the original forward although the module is patched; None if it does not."""
        if is_hooked(getattr(module, self.act_name, None)):
            return HOOKED
        return DROPS if _drops(module, self.dropouts) else None

    def run(self, module, x):
        projections = [getattr(module, name) for name in self.inputs]
        parts = parts_of(projections, module.down_proj, x) if self.lora_linear else None
        if parts is not None:
            return gated_lora(_form(self.activation, self.packed), parts, x, self.inplace)
        inplace = self.inplace and all(map(caller_owns_output, projections))
        gate_up = [projection(x) for projection in projections]
        # A DTensor may be sharded across the border of gate and up; the packed op would gather it.
        if (self.packed and is_dtensor(gate_up[0])) or gate_up[0].dtype != gate_up[-1].dtype:
            gate, up = gate_up[0].chunk(2, dim=-1) if self.packed else gate_up
            product = getattr(module, self.act_name)(gate) * up
        else:
            if self.recompute and applies(module.down_proj, gate_up):
                return gated_linear(_form(self.activation, self.packed), module.down_proj, gate_up, inplace)
            _, separate, packed = _GATED[self.activation]
            product = (packed if self.packed else separate)(*gate_up, inplace=inplace)
            if self.recompute and recomputed.is_active():
                op = _form(self.activation, self.packed).product
                recomputed.register(lambda *tensors: (op(*tensors),), gate_up, (product,))
                return module.down_proj(product)
        # Only this call refers to the product as well.
        return linear_over(module.down_proj, product) if inplace else module.down_proj(product)

    def members(self, original):
        recipe = self

        def forward(self, *args, **kwargs):
            if kwargs or len(args) != 1 or recipe.unused_because(self) is not None:
                return original.forward(self, *args, **kwargs)
            return recipe.run(self, args[0])

        return {"forward": functools.wraps(original.forward)(forward)}


@dataclass(frozen=True)
class TiledMLPRecipe:
    """``down_proj(activation(gate) * up)``, one shard of tokens at a time.

    If a projection is not a plain linear layer (LoRA, quantised, with hooks), the projections are called per
    shard, and again in the backward.
    """

    inputs: tuple
    activation: str
    num_shards: int | None
    dropouts: tuple = ()
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

    def of_shard(self, act_name):
        """The MLP of a shard whose projections are called."""
        return MLPRecipe(self.inputs, act_name, self.activation, inplace=False)

    def _shards(self, x):
        return None if self.num_shards is None else max(min(self.num_shards, x.shape[:-1].numel()), 1)

    def members(self, original):
        recipe = self

        def forward(self, *args, **kwargs):
            if kwargs or len(args) != 1 or is_dtensor(args[0]):
                return original.forward(self, *args, **kwargs)
            x, act_name = args[0], next(name for name in ACTIVATION_NAMES if hasattr(self, name))
            if is_hooked(getattr(self, act_name)) or _drops(self, recipe.dropouts):
                function = functools.partial(original.forward, self)
                return tiled(function, x, num_shards=recipe._shards(x))
            projections = [getattr(self, name) for name in (*recipe.inputs, "down_proj")]
            if all(needs_no_call(p, x) and not is_dtensor(p.weight) for p in projections):
                return recipe.run(self, x)
            function = functools.partial(recipe.of_shard(act_name).run, self)
            return tiled(function, x, num_shards=recipe._shards(x))

        return {"forward": functools.wraps(original.forward)(forward)}
