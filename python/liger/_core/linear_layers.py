"""Which modules are linear layers and nothing else."""

from __future__ import annotations

from typing import Any

from torch import nn

from .quantised import is_quantised


def is_forward_of_class(module: nn.Module, name: str) -> bool:
    """Whether an attribute of the instance is the forward of its class, bound to some instance."""
    return getattr(module.__dict__.get(name), "__func__", None) is type(module).forward


def overrides_forward(module: nn.Module) -> bool:
    """Whether the instance has a forward other than that of its class.

    accelerate stores the forward of the class in the instance when it removes its hooks.
    """
    forward: Any = module.__dict__.get("forward")
    return forward is not None and not (is_forward_of_class(module, "forward") and forward.__self__ is module)


def computes_linear_alone(layer: nn.Module) -> bool:
    """Whether a layer, without its hooks, is ``F.linear`` of its weight and bias: not LoRA, not quantised."""
    return (
        type(layer).forward is nn.Linear.forward
        and not overrides_forward(layer)
        and not is_quantised(layer.weight)
    )
