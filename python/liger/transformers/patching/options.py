# SPDX-License-Identifier: BSD-3-Clause
"""The options of ``liger.patch``."""

from __future__ import annotations

import difflib
import inspect
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from types import NoneType
from typing import Any, ClassVar, TypedDict, TypeVar

from ..mlp.gated_mlp import GEGLU_ACTIVATIONS, SWIGLU_ACTIVATIONS

logger = logging.getLogger("liger.transformers")


class PatchOptions(TypedDict, total=False):
    """Types of the options of :func:`liger.patch`, for type checkers. :class:`Options` has their defaults."""

    rope: bool
    rms_norm: bool
    rms_norm_gated: bool
    layer_norm: bool
    fused_add_rms_norm: bool
    qk_norm_rope: bool
    swiglu: bool
    geglu: bool
    relu_squared: bool
    gelu: bool
    lora_linear: bool
    cross_entropy: bool
    fused_linear_cross_entropy: bool
    mlp: bool | None
    inplace: bool
    tiled_mlp: bool
    tiled_mlp_num_shards: int | None
    recompute: bool
    accumulate_grad_weight: bool


@dataclass(frozen=True)
class Options:
    """The options of :func:`liger.patch`, checked."""

    rope: bool = True
    rms_norm: bool = True
    rms_norm_gated: bool = True
    layer_norm: bool = True
    fused_add_rms_norm: bool = True
    qk_norm_rope: bool = True
    swiglu: bool = True
    geglu: bool = True
    relu_squared: bool = True
    gelu: bool = True
    lora_linear: bool = True
    cross_entropy: bool = False
    fused_linear_cross_entropy: bool = True
    mlp: bool | None = None
    inplace: bool = True
    tiled_mlp: bool = False
    tiled_mlp_num_shards: int | None = None
    recompute: bool = False
    accumulate_grad_weight: bool = False

    # A call with the fused loss takes labels and skip_logits as liger_kernel does (head/loss.py).
    like_liger_kernel: ClassVar[bool] = False

    def __post_init__(self) -> None:
        self._check_types()
        if self.cross_entropy and self.fused_linear_cross_entropy:
            logger.warning(
                "liger: cross_entropy and fused_linear_cross_entropy are both True: the fused loss is used, because "
                "it has no logits to compute a cross entropy from"
            )
            object.__setattr__(self, "cross_entropy", False)
        shards = self.tiled_mlp_num_shards
        if shards is not None and (not self.tiled_mlp or shards < 1):
            raise ValueError(
                f"tiled_mlp_num_shards is {shards}, expected at least 1, and only together with tiled_mlp=True"
            )
        if self.accumulate_grad_weight and not self.fused_linear_cross_entropy:
            raise ValueError(
                "accumulate_grad_weight is True, expected False without fused_linear_cross_entropy, the loss of the "
                "head that it is for"
            )
        if self.mlp is not None:
            object.__setattr__(self, "swiglu", self.mlp)
            object.__setattr__(self, "geglu", self.mlp)

    def _check_types(self) -> None:
        for name in NAMES:
            # Not isinstance: a bool is an int, but no number of shards.
            value, types = getattr(self, name), _TYPES.get(name, (bool,))
            if type(value) not in types:
                expected = ", or ".join(_WORDS[kind] for kind in types)
                raise TypeError(f"liger: the option {name} is {value!r}, expected {expected}")

    @property
    def complete(self) -> Options:
        """The same with every part that is replaced by default."""
        names = PARTS if self.cross_entropy else (*PARTS, "fused_linear_cross_entropy")
        if all(getattr(self, name) for name in names):
            return self
        return replace(self, **dict.fromkeys(names, True), mlp=None)

    @property
    def any(self) -> bool:
        """True if anything is to be replaced. Fused ops alone are not: they need a patched norm."""
        return self.asks_common_parts or any(
            (self.rms_norm_gated, self.layer_norm, self.relu_squared, self.gelu, self.lora_linear)
        )

    @property
    def asks_common_parts(self) -> bool:
        """True if a part that most models have was requested; patch() then raises if it finds none."""
        losses = (self.cross_entropy, self.fused_linear_cross_entropy)
        return any((self.rope, self.rms_norm, *self.activations, self.tiled_mlp, *losses))

    @property
    def looked_for(self) -> str:
        """The options that are on, in one line."""
        values = ((name, getattr(self, name)) for name in NAMES if name not in _HOW)
        return ", ".join(name for name, value in values if value is True)

    @property
    def norms(self) -> tuple[str, ...]:
        """Kinds of norms to patch."""
        return tuple(kind for kind in ("rms_norm", "layer_norm") if getattr(self, kind))

    @property
    def activations(self) -> tuple[str, ...]:
        """Activations of the gated MLPs to patch."""
        swiglu = SWIGLU_ACTIVATIONS if self.swiglu else ()
        return (*swiglu, *GEGLU_ACTIVATIONS) if self.geglu else swiglu

    @property
    def plain_activations(self) -> tuple[str, ...]:
        """Kinds of activation modules to patch."""
        return tuple(kind for kind in ("relu_squared", "gelu") if getattr(self, kind))


# Types of the options that are more than a flag, and all types in words.
_TYPES: dict[str, tuple[type, ...]] = {"mlp": (bool, NoneType), "tiled_mlp_num_shards": (int, NoneType)}
_WORDS: dict[type, str] = {bool: "True or False", int: "an integer", NoneType: "None"}
# Options that say how a part is replaced.
_HOW = ("inplace", "mlp", "recompute", "accumulate_grad_weight")
NAMES = tuple(field.name for field in fields(Options))
LOSSES = ("cross_entropy", "fused_linear_cross_entropy")
# Options that say what is replaced, besides the loss, where no option asks for something else.
PARTS = tuple(
    field.name for field in fields(Options) if field.default is True and field.name not in (*_HOW, *LOSSES)
)

_Function = TypeVar("_Function", bound=Callable[..., Any])


def with_options(function: _Function) -> _Function:
    """Shows every option and its default, instead of ``**options``, in help and notebooks."""
    signature = inspect.signature(function, eval_str=False)
    own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    options = inspect.signature(Options).parameters.values()
    keywords = [option.replace(kind=option.KEYWORD_ONLY) for option in options]
    function.__signature__ = signature.replace(parameters=[*own, *keywords])  # type: ignore[attr-defined]
    return function


def check_names(caller: str, names: Iterable[str]) -> None:
    """Raises TypeError for a keyword that is no option, and names the options and the most similar."""
    for name in names:
        if name not in NAMES:
            similar = difflib.get_close_matches(name, NAMES, n=1)
            hint = f" Did you mean {similar[0]}?" if similar else ""
            raise TypeError(
                f"{caller}: there is no option '{name}'.{hint} The options are {', '.join(NAMES)}"
            )
