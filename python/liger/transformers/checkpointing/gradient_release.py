# SPDX-License-Identifier: BSD-3-Clause
"""Optimizer steps in the backward, one parameter at a time, which free its gradient."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.utils.hooks import RemovableHandle

from ..._core.dtensor.inputs import is_dtensor

_NAME = "liger.transformers.release_gradients"


def release_gradients(optimizer: torch.optim.Optimizer) -> _Release:
    """Has the optimizer make its steps in the backward, one parameter at a time, and frees each gradient
    behind its step.

    At most a few gradients exist at a time, so a step needs less memory by the size of the gradients: 2 bytes
    per parameter in bfloat16. Weights and states are as with a step after the backward, bit for bit. The
    training loop stays as it is: its ``optimizer.step()`` finds no gradients and ends the step,
    ``zero_grad`` has nothing to do. Learning rate schedulers and ``state_dict`` work as before. The memory
    that :func:`checkpoint` measures has the gradients released.

    A gradient is used before the next one exists, so what reads all of them at once is not possible:

    - Clipping by the norm of all gradients. ``clip_grad_norm_`` finds none and returns 0; in the Trainer set
      ``max_grad_norm=0``. Clip single values in a hook of the parameter (``register_hook``).
    - Accumulation over several backwards: the second one before ``optimizer.step()`` raises. Several forwards
      and one backward of the sum of their losses work. After an error in a backward, whose first steps stay,
      call ``zero_grad()`` and then ``optimizer.step()``, which ends it.
    - ``torch.amp.GradScaler``, which scales gradients until they are all known: its ``step`` raises.
    - Several ranks, except with ``fully_shard``: other wrappers reduce gradients after the hooks.

    The method is known as gradient release or optimizer in backward (LOMO, arXiv 2306.09782; torch's tutorial
    on optimizer steps in the backward).

    Args:
        optimizer: of any class that keeps its states by parameter, such as AdamW, SGD or an 8-bit Adam, with
            all parameters. Call it after ``fully_shard``.

    Returns:
        A handle, whose ``remove()`` ends it.

    Raises:
        TypeError: optimizer is not a torch.optim.Optimizer.
        ValueError: it has released gradients already, or parameters of ZeRO-3.
        RuntimeError: in the backward, in the cases above; for an optimizer that keeps states in its
            parameter groups; for a gradient that is elsewhere (``main_grad``).

    Example::

        >>> optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
        >>> handle = liger.transformers.release_gradients(optimizer)
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"{_NAME}: optimizer must be a torch.optim.Optimizer, not {type(optimizer).__name__}")
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if any(is_released(p) for p in parameters):
        raise ValueError(f"{_NAME}: the gradients of this optimizer are released already")
    if any(hasattr(p, "ds_id") for p in parameters):
        raise ValueError(f"{_NAME}: DeepSpeed has the gradients of these parameters, which are partitioned")
    return _Release(optimizer)


def is_released(parameter):
    """True if a hook frees the gradient of a parameter in the backward."""
    hooks = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
    return any(isinstance(getattr(hook, "__self__", None), _Release) for hook in hooks.values())


class _Release:
    """The hooks of :func:`release_gradients`."""

    def __init__(self, optimizer):
        self._optimizer = optimizer
        # Parameter groups are replaced by load_state_dict, so they are known by their numbers.
        self._group_of = {
            p: number for number, group in enumerate(optimizer.param_groups) for p in group["params"]
        }
        self._stepped, self._inside = set(), False
        self._handles: list[RemovableHandle] = [
            p.register_post_accumulate_grad_hook(self._step) for p in self._group_of if p.requires_grad
        ]
        self._handles.append(optimizer.register_step_post_hook(self._end))

    def remove(self):
        """Ends it: gradients stay, and the optimizer makes its steps after the backward."""
        for handle in self._handles:
            handle.remove()

    def _end(self, *_):
        if not self._inside:
            self._stepped.clear()

    def _step(self, parameter):
        self._check(parameter)
        optimizer, groups = self._optimizer, self._optimizer.param_groups
        group = groups[self._group_of[parameter]]
        alone = {**group, "params": [parameter]}
        optimizer.param_groups, self._inside = [alone], True
        try:
            optimizer.step()
        finally:
            optimizer.param_groups, self._inside = groups, False
        changed = [key for key in alone if key != "params" and alone[key] is not group.get(key)]
        if changed:
            raise RuntimeError(
                f"{_NAME}: {type(optimizer).__name__} keeps states of all parameters together, in its parameter "
                f"groups ({', '.join(changed)}); expected states by parameter"
            )
        self._stepped.add(parameter)
        parameter.grad = None

    def _check(self, parameter):
        if parameter in self._stepped:
            raise RuntimeError(
                f"{_NAME}: a second gradient of a parameter of shape {tuple(parameter.shape)} before "
                "optimizer.step(): its first one has been used and freed. Gradients cannot be accumulated over several "
                "backwards; add the losses and call backward once. After an error in a backward, call zero_grad() and "
                "then optimizer.step() before the next one"
            )
        if parameter.grad is None:
            raise RuntimeError(
                f"{_NAME}: the gradient of a parameter of shape {tuple(parameter.shape)} is not in its grad "
                "(main_grad?), where the optimizer expects it"
            )
        is_joint = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        if is_joint and not is_dtensor(parameter):
            raise RuntimeError(
                f"{_NAME}: on {dist.get_world_size()} ranks the parameters must be sharded by fully_shard. Other "
                "wrappers, such as DistributedDataParallel, reduce gradients after this hook"
            )
