# SPDX-License-Identifier: BSD-3-Clause
"""Outputs that the backward recomputes instead of saving: norms, gated products, rotated queries and keys.

Autograd saves the input of each linear layer for the gradient of its weight. Where that input is the output
of a cheap op whose own inputs are saved anyway, the backward can run the op again instead. Inside a decoder
layer, ``saved_tensors_hooks`` recognise such an output by its memory and save a reference to the computation.
The linear layers are not involved, so nothing is special about adapters. GEMMs are never recomputed.

Hooks switch off autograd's own test for in-place writes, so :func:`_unpack` repeats it for every tensor.
"""

import contextlib
import functools
from dataclasses import dataclass

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.compiler import is_compiling
from torch.multiprocessing.reductions import StorageWeakRef

from ..._core.op.autograd import is_transformed
from .local import Local

# Address of an output -> its _Output, inside a decoder layer.
_outputs = Local()
# A hook ``pack`` of ``saved_tensors_hooks`` that sees all tensors a layer saves, and may ask is_recomputed.
_counter = Local()
counting = _counter.holding


# --- saved tensors ------------------------------------------------------------------------------------------


def check_version(tensor, version):
    """Raises RuntimeError if the tensor has been written since it had this version."""
    if tensor._version != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"{tensor.dtype} tensor of shape {tuple(tensor.shape)} is at version {tensor._version}; expected version "
            f"{version} instead"
        )


class _Kept:
    """An input of a computation, and its version at that time."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor):
        self.tensor, self.version = tensor, tensor._version

    def read(self):
        self.check()
        return self.tensor

    def check(self):
        check_version(self.tensor, self.version)


class _Computation:
    """A call of an op; autograd references its results instead of saving them.

    Several nodes may reference the results (the projections of q, k and v). The first one to run recomputes
    them, and the last one drops them.
    """

    __slots__ = ("_function", "_inputs", "_results", "_unread", "references")

    def __init__(self, function, inputs):
        self._function, self._inputs = function, inputs
        self._results, self._unread, self.references = None, 0, 0

    def results(self):
        """The results, for one of the references."""
        results, unread = self._results, self._unread
        if results is None:
            results, unread = self.results_once(), self.references
        else:
            self.check()
        self._unread = unread - 1
        self._results = results if unread > 1 else None
        return results

    def results_once(self):
        """The results, for another computation."""
        inputs = [None if source is None else source.read() for source in self._inputs]
        with torch.no_grad():
            return self._function(*inputs)

    def check(self):
        for source in self._inputs:
            if source is not None:
                source.check()


class _Output:
    """One result of a computation, found by its address as long as its memory has not been freed."""

    __slots__ = ("computation", "dtype", "index", "numel", "storage", "version")

    def __init__(self, tensor, computation, index):
        # Views of a tensor may outlive it, so the reference is to the storage.
        self.storage = StorageWeakRef(tensor.untyped_storage())
        self.computation, self.index = computation, index
        self.dtype, self.numel, self.version = tensor.dtype, tensor.numel(), tensor._version

    def is_memory_of(self, tensor):
        """True if a tensor at the address of this output has all of its elements, unchanged."""
        return (
            not self.storage.expired()
            and tensor.numel() == self.numel
            and tensor.dtype == self.dtype
            and tensor._version == self.version
        )


class _Reference:
    """A saved tensor: a view of one result of a computation. ``counted``: referenced by an autograd node."""

    __slots__ = ("_computation", "_counted", "_index", "_size", "_stride")

    def __init__(self, output, tensor, counted):
        self._computation, self._index, self._counted = output.computation, output.index, counted
        self._size, self._stride = tensor.size(), tensor.stride()
        if counted:
            self._computation.references += 1

    def read(self):
        computation = self._computation
        result = (computation.results() if self._counted else computation.results_once())[self._index]
        # The op gives its result the same strides again.
        return result.as_strided(self._size, self._stride, result.storage_offset())

    def check(self):
        self._computation.check()


def _found(tensor):
    """The output in the memory of a tensor, or None."""
    # Other types and layouts may have no address.
    if type(tensor) is torch.Tensor and tensor.layout is torch.strided:
        output = _outputs.value.get(tensor.data_ptr())
        if output is not None and output.is_memory_of(tensor):
            return output
    return None


def _pack(tensor):
    output = _found(tensor)
    # A pair takes a third of the host time of an object, and a layer saves some thirty tensors.
    return (tensor, tensor._version) if output is None else _Reference(output, tensor, counted=True)


def _unpack(saved):
    if type(saved) is not tuple:
        return saved.read()
    check_version(*saved)
    return saved[0]


# --- the ops of a layer -------------------------------------------------------------------------------------


def is_active():
    """True if the outputs of ops are to be registered: inside :func:`recomputing`, not traced."""
    return not is_compiling() and _outputs.value is not None


def register(function, inputs, outputs):
    """Registers ``outputs = function(*inputs)``, a tuple of new tensors, if it may be recomputed.

    Args:
        function: the op; it gives the same bits for the same inputs, and autograd saves its inputs anyway.
        inputs: tensors or None.
        outputs: its results.
    """
    _register(function, [None if t is None else _Kept(t.detach()) for t in inputs], outputs)


def register_derived(function, tensors, others, outputs):
    """The same for a function of ``tensors`` that are outputs themselves; no effect unless all of them are.

    ``others``: further tensors, which other nodes save.
    """
    found = [(_found(t), t) for t in tensors]
    if all(output is not None for output, _ in found):
        inputs = [_Reference(output, t.detach(), counted=False) for output, t in found]
        _register(function, inputs + [_Kept(t.detach()) for t in others], outputs)


def _register(function, inputs, outputs):
    # Without a gradient no node saves the inputs of the op.
    if not all(type(t) is torch.Tensor and t.requires_grad and t.numel() for t in outputs):
        return
    computation = _Computation(function, inputs)
    for index, output in enumerate(outputs):
        _outputs.value[output.data_ptr()] = _Output(output, computation, index)


def _applies():
    """True if autograd alone records: neither transforms nor other hooks that decide what is saved.

    Checkpointing and offloading (``save_on_cpu``) are such hooks; ours, the innermost, would disable them.
    """
    return (
        torch.is_grad_enabled()
        and not torch.is_inference_mode_enabled()
        and _outputs.value is None
        and torch._C._autograd._saved_tensors_hooks_is_enabled()
        and (_innermost_hook() is None or _is_counted())
        and not is_transformed()
    )


def _innermost_hook():
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return None if hooks is None else hooks[0]


def _is_counted():
    return _counter.value is not None and _innermost_hook() is _counter.value


def is_recomputed(tensor):
    """True if the backward of the running layer recomputes a tensor that autograd wants to save."""
    return _outputs.value is not None and _found(tensor) is not None


def recomputing(function):
    """A decoder layer's forward, in which autograd references outputs of cheap ops, not saves them."""

    @functools.wraps(function)
    def forward(*args, **kwargs):
        # Compilers choose themselves what is recomputed.
        if is_compiling() or not _applies():
            return function(*args, **kwargs)
        # A hook that counts sees all tensors, those that would not be saved as well.
        hooks = contextlib.nullcontext() if _is_counted() else saved_tensors_hooks(_pack, _unpack)
        with _outputs.holding({}), hooks:
            return function(*args, **kwargs)

    return forward


@dataclass(frozen=True)
class RecomputeRecipe:
    """A decoder layer with an otherwise unchanged forward."""

    kind = None
    recompute = True

    def members(self, original):
        return {"forward": recomputing(original.forward)}


def recomputes(module):
    """True if the backward of a patched module recomputes outputs."""
    return bool(getattr(getattr(type(module), "_liger_recipe", None), "recompute", False))
