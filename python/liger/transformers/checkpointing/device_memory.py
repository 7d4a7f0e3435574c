# SPDX-License-Identifier: BSD-3-Clause
"""The memory of a device during a step: measured by the allocator of CUDA, counted on a CPU."""

from __future__ import annotations

import weakref
from typing import ClassVar

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .gradient_release import is_released

# Part of the device's memory that a plan leaves free: at least, at most. Between them it is what the caching
# allocator had reserved beyond the peak of allocated memory.
MIN_HEADROOM, MAX_HEADROOM = 0.03, 0.08


def check(memory):
    """Raises TypeError or ValueError for a ``memory`` that is neither bytes, a share nor "auto"."""
    name = "liger.transformers.checkpoint: memory"
    if isinstance(memory, bool) or not isinstance(memory, int | float | str):
        raise TypeError(f"{name} must be an int, a float, 'auto' or None, not {type(memory).__name__}")
    if isinstance(memory, str):
        if memory != "auto":
            raise ValueError(f"{name} must be bytes, a share or 'auto', got '{memory}'")
    elif isinstance(memory, int):
        if memory < 1:
            raise ValueError(f"{name} in bytes must be positive, got {memory}")
    elif not 0 < memory <= 1:
        raise ValueError(
            f"{name} as a float is a share of the device in (0, 1], got {memory}; bytes are an int"
        )
    if not isinstance(memory, int) and not torch.cuda.is_available():
        raise ValueError(f"{name} must be in bytes without a CUDA device, got {memory!r}")


def check_parameters(memory, model, device):
    """Raises ValueError if the parameters of a model on a device, as far as they are in the memory of this
    rank, need more than a ``memory`` that is not "auto"."""
    if isinstance(memory, str):
        return
    limit = memory if isinstance(memory, int) else int(memory * torch.cuda.mem_get_info(device)[1])
    tensors = (t for parameter in model.parameters() for t in plain_tensors(parameter) if t.device == device)
    size = sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())
    if size > limit:
        raise ValueError(
            f"liger.transformers.checkpoint: memory is {limit} bytes, and the parameters of {type(model).__name__} on "
            f"{device} alone take {size} bytes"
        )


class CudaMemory:
    """Allocated bytes by the statistics of the caching allocator.

    ``read`` costs about 20 microseconds and does not synchronise. The allocator has one peak for a device,
    which every meter resets, and other code as well: so each remembers the peak until then (:meth:`note`).
    """

    exact = False
    _meters: ClassVar[weakref.WeakSet[CudaMemory]] = weakref.WeakSet()

    def __init__(self, memory, device):
        self.memory, self.device = memory, device
        self.limit = self.noted = 0
        self._meters.add(self)

    def __setstate__(self, state):
        vars(self).update(state)
        self._meters.add(self)

    def read(self):
        """(allocated bytes, retries after a flush of the cache, errors for lack of memory)."""
        stats = torch.cuda.memory_stats_as_nested_dict(self.device)
        return stats["allocated_bytes"]["all"]["current"], stats["num_alloc_retries"], stats["num_ooms"]

    def start(self):
        for meter in self._meters:
            if meter.device == self.device:
                meter.note()
        torch.cuda.reset_peak_memory_stats(self.device)
        self.noted = 0

    def note(self):
        """Remembers the peak of allocated bytes, before it is reset."""
        stats = torch.cuda.memory_stats_as_nested_dict(self.device)
        self.noted = max(self.noted, stats["allocated_bytes"]["all"]["peak"])

    def peak(self, counted):
        """Peak of allocated bytes since :meth:`start`; sets ``limit``, the bytes that a step may have."""
        self.note()
        peak = self.noted
        stats = torch.cuda.memory_stats_as_nested_dict(self.device)
        free, total = torch.cuda.mem_get_info(self.device)
        available = free + stats["reserved_bytes"]["all"]["current"]
        if hasattr(torch.cuda, "get_per_process_memory_fraction"):
            available = min(available, int(torch.cuda.get_per_process_memory_fraction(self.device) * total))
        slack = max(stats["reserved_bytes"]["all"]["peak"] - peak, 0)
        headroom = min(max(slack, MIN_HEADROOM * total), MAX_HEADROOM * total)
        self.limit = int(available - headroom)
        if isinstance(self.memory, int):
            self.limit = min(self.limit, self.memory)
        elif isinstance(self.memory, float):
            self.limit = min(self.limit, int(self.memory * total))
        return peak


class CountedMemory:
    """Bytes of parameters, buffers and gradients, and a peak from counted activations.

    Optimizer states, the loss and temporary tensors are not counted.
    """

    exact = True

    def __init__(self, memory, model):
        if not isinstance(memory, int):
            raise ValueError(
                f"liger.transformers.checkpoint: memory must be in bytes for a model on the CPU, got {memory!r}"
            )
        self.limit, self.model = memory, model
        self._start = 0

    def read(self):
        tensors = [*self.model.parameters(), *self.model.buffers()]
        return sum(_local_bytes(t) + _local_bytes(t.grad) for t in tensors), 0, 0

    def start(self):
        missing = [p for p in self.model.parameters() if p.requires_grad and p.grad is None]
        sizes = {True: [0], False: [0]}
        for parameter in missing:
            sizes[is_released(parameter)].append(_local_bytes(parameter))
        # Of released gradients one exists at a time.
        self._start = self.read()[0] + sum(sizes[False]) + max(sizes[True])

    def note(self):
        pass

    def peak(self, counted):
        return self._start + counted


def _local_bytes(tensor):
    """Bytes of a tensor on this rank; 0 for None."""
    return sum(t.nbytes for t in plain_tensors(tensor))


def plain_tensors(x):
    """The tensors that a tensor consists of: itself, or those inside a DTensor or another wrapper."""
    if not isinstance(x, torch.Tensor):
        return
    if is_traceable_wrapper_subclass(x):
        for name in x.__tensor_flatten__()[0]:
            yield from plain_tensors(getattr(x, name))
    else:
        yield x


def size_text(count):
    """Bytes in words."""
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 / 100 else f"{count / 2**20:.2f} MiB"
