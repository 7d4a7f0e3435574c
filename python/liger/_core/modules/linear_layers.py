# SPDX-License-Identifier: BSD-3-Clause
"""Recognition of modules that are linear layers and nothing else, and of outputs that their caller may
overwrite."""

from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import _global_forward_hooks

from .hooks import ZERO, first_hook, hooks_of
from .quantised import is_quantised

# Packages with linear layers, and adapters around them, that save no output of theirs for the backward.
_KNOWN_PACKAGES = ("peft.tuners.", "bitsandbytes.", "torchao.")


def is_forward_of_class(module: nn.Module, name: str) -> bool:
    """True if an attribute of the instance is the forward of its class, bound to some instance."""
    return getattr(module.__dict__.get(name), "__func__", None) is type(module).forward


def overrides_forward(module: nn.Module) -> bool:
    """True if the instance has a forward other than its class.

    accelerate stores the forward of the class in the instance when it removes its hooks.
    """
    forward: Any = module.__dict__.get("forward")
    return forward is not None and not (is_forward_of_class(module, "forward") and forward.__self__ is module)


def moves_nothing(module: nn.Module, x: torch.Tensor) -> bool:
    """True if the forward of the instance is accelerate's, and finds weights and x on the device where they
    belong."""
    hook: Any = getattr(module, "_hf_hook", None)
    forward: Any = module.__dict__.get("forward")
    return (
        getattr(getattr(forward, "func", None), "__module__", None) == "accelerate.hooks"
        and is_forward_of_class(module, "_old_forward")
        and type(hook).__name__ == "AlignDevicesHook"
        and not (hook.offload or hook.io_same_device or hook.no_grad)
        and hook.execution_device is not None
        and torch.device(hook.execution_device) == x.device
    )


def computes_linear_alone(layer: nn.Module, x: torch.Tensor) -> bool:
    """True if ``layer(x)``, without hooks, is ``F.linear`` of its weight and bias: not LoRA, not
    quantised."""
    return (
        type(layer).forward is nn.Linear.forward
        and (not overrides_forward(layer) or moves_nothing(layer, x))
        and not is_quantised(layer.weight)
    )


def needs_no_call(layer: nn.Module, x: torch.Tensor) -> bool:
    """True if an op may read weight and bias of a layer instead of calling it with x: no LoRA, not quantised,
    no hooks.

    Global hooks do not count.
    """
    if not computes_linear_alone(layer, x):
        return False
    # The hooks of ZeRO-3 only gather the weight, and reading the weight gathers it as well.
    return first_hook(hooks_of(layer), ZERO if hasattr(layer.weight, "ds_id") else ()) is None


def caller_owns_output(layer: nn.Module) -> bool:
    """True if the caller of a linear layer alone has its output, so that a later backward may overwrite it.

    False if a forward hook (other than a hook of ZeRO-3) has seen the output, and for a layer of an unknown
    class or forward: its backward may read the output, as the backward of a sigmoid does. False in compiled
    code, where nothing is written in place.
    """
    if torch.compiler.is_compiling() or _global_forward_hooks:
        return False
    inner: Any = layer
    while _saves_no_output(inner) and first_hook((inner._forward_hooks,), ZERO) is None:
        # An adapter that is merged or disabled returns the output of its base layer.
        adapted = inner._modules.get("base_layer")
        if adapted is None:
            return True
        inner = adapted
    return False


def _saves_no_output(layer: Any) -> bool:
    forward = getattr(type(layer), "forward", None)
    if "forward" in layer.__dict__ and not _calls_forward_of_class(layer):
        return False
    return forward is nn.Linear.forward or (getattr(forward, "__module__", None) or "").startswith(
        _KNOWN_PACKAGES
    )


def _calls_forward_of_class(layer: Any) -> bool:
    """True if the forward of the instance is a known wrapper of its class's forward: accelerate's, which
    moves tensors between devices, or the wrapper of transformers for tensor parallelism."""
    if is_forward_of_class(layer, "_old_forward"):
        return type(getattr(layer, "_hf_hook", None)).__name__ == "AlignDevicesHook"
    source = getattr(layer.__dict__["forward"], "__module__", None) or ""
    moved = source.startswith("transformers.") and source.endswith(".tensor_parallel")
    return moved or not overrides_forward(layer)
