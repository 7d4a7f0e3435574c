# SPDX-License-Identifier: BSD-3-Clause
"""``checkpoint``: recomputes as much of the decoder layers as the memory asks for, and no more.

planner.py has a plan's steps, memory_plan.py its arithmetic, docs/guides/checkpointing.md the method.
"""

from typing import Any, TypeVar

from torch import nn

from ..recipe.classes import require_module
from . import decoder_layers, device_memory
from .agreement import Agreement
from .agreement import check as check_group
from .offload import HostStore
from .offload import check as check_offload
from .planner import Planner

_Model = TypeVar("_Model", bound=nn.Module)


def checkpoint(
    model: _Model,
    memory: int | float | str | None = "auto",
    *,
    offload: bool | int | None = None,
    tokens: int | None = None,
    group: Any = None,
) -> _Model:
    """Gradient checkpointing of as much of the decoder layers as the memory asks for.

    Each layer recomputes everything, everything but its attention kernel, or nothing. The first step runs
    with full checkpointing and is measured. Each later step recomputes as little as the memory allows, and
    keeps first what spares the most time per byte. A step with more tokens than any before gets a new plan
    before it starts. Losses and gradients are as without checkpointing. Each change of the plan prints one
    line on stderr, and :func:`liger.transformers.patch_report` shows the plan. Calling it again replaces the
    plan.

    Call it before or after ``liger.patch``, adapters and wrappers (``fully_shard``, DDP,
    ``deepspeed.initialize``), and before ``torch.compile``: compiled code neither measures nor changes the
    plan. Models without layers of transformers must be patched first. ``liger.unpatch`` also ends it.

    Args:
        model: a model of transformers, a module that contains one (PEFT, DDP), or a module with a list of
            layers.
        memory: what the process may allocate on the device at the peak of a step, weights and optimizer
            included: bytes (int), a share of the memory of the device (float in (0, 1]), or "auto" for what
            is free after the first step. A part of the device is left free in any case, 3 to 8 percent by
            measurement. On a CPU it must be in bytes and counts parameters, gradients and the activations of
            layers alone. None ends the planning and restores the checkpointing that the model had before, or
            that other code has turned on or off since.
        offload: True for the inputs of recomputed layers, and the attention that they keep, in pinned host
            memory until the backward, or the bytes of host memory that they may have. Copies overlap with
            the work of other layers. What has no room on the host stays on the device. None: as
            ``activation_checkpointing_enable(offload=)`` of transformers asks, and with memory="auto" also
            where full checkpointing does not fit, as measured steps or an error show.
        tokens: the tokens of the longest step that will come, padding included, on any rank. None: the
            longest step so far.
        group: the process group that runs this model and must agree on a plan. None: all processes.

    Returns:
        The same model.

    Raises:
        TypeError: model is not a module, or memory, offload, tokens or group have another type.
        ValueError: memory, offload or tokens out of range, or more host memory than there is; other
            arguments with memory=None; memory not in bytes without a CUDA device; a model without decoder
            layers, or with torch's CheckpointWrapper around them. In the first step: such a wrapper; memory
            not in bytes for a model on the CPU; memory below the bytes of the parameters; ranks with
            different numbers of layers, or without a plan.

    Example::

        >>> model = liger.patch(model)
        >>> model = liger.transformers.checkpoint(model, memory=60 * 2**30)
    """
    require_module("liger.transformers.checkpoint", model)
    if memory is not None:
        device_memory.check(memory)
    else:
        given = {"offload": offload, "tokens": tokens, "group": group}
        words = ", ".join(f"{name}={value!r}" for name, value in given.items() if value is not None)
        if words:
            raise ValueError(
                f"liger.transformers.checkpoint: memory=None ends a plan, and {words} belongs to one"
            )
    check_offload(offload)
    check_group(group)
    if tokens is not None and (isinstance(tokens, bool) or not isinstance(tokens, int)):
        raise TypeError(
            f"liger.transformers.checkpoint: tokens must be an int or None, not {type(tokens).__name__}"
        )
    if tokens is not None and tokens < 1:
        raise ValueError(f"liger.transformers.checkpoint: tokens must be positive, got {tokens}")
    release(model)
    if memory is not None:
        layers = decoder_layers.find(model)
        if not layers:
            raise ValueError(
                f"liger.transformers.checkpoint: {type(model).__name__} has no decoder layers; looked for a list of "
                "transformers' GradientCheckpointingLayer or of modules whose class is named ...Layer or ...Block"
            )
        decoder_layers.check_wrappers(model, layers)
        Planner(model, layers, memory, tokens, Agreement(group), HostStore(offload))
    return model


def release(model):
    """Ends the planning of a model; no effect without any."""
    for planner in planners(model):
        planner.release()


def forget(model):
    """Has the layers measured again, because what they save has changed; no effect without a plan."""
    for planner in planners(model):
        planner.forget()


def planners(model):
    """The planners of the layers of a model."""
    hooks = (hook for module in model.modules() for hook in module._forward_pre_hooks.values())
    found = (getattr(hook, "__self__", None) for hook in hooks)
    return [owner for owner in found if isinstance(owner, Planner)]
