# SPDX-License-Identifier: BSD-3-Clause
"""Decoder layers that are recomputed without their attention.

Attention is the one part of a layer whose cost grows with the length, and what its backward needs beyond its
inputs is small: the output and the logarithms of the sums. A layer in this state runs under torch's
non-reentrant checkpoint, and its attention kernel saves through hooks of its own. A tensor in the memory of
an input goes on to the hooks of the checkpoint, which recompute it; all others are kept in a store. In the
recomputation the same call hands its inputs to the checkpoint and returns the kept output, and the kernel
does not run. The autograd node is the kernel's own, with its bits, layouts, masks and dropout.
"""

import contextlib
import functools
import weakref

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from .attention_calls import is_named, observed
from .offload import OnDevice, can_move, with_own_choice


class _Kept:
    """A kept tensor. The recomputation reads it first, the backward of the kernel right after."""

    __slots__ = ("__weakref__", "_read", "handle")

    def __init__(self, handle):
        self.handle, self._read = handle, None

    def for_recomputation(self):
        self._read = self.handle.get()
        return self._read

    def for_backward(self):
        tensor, self._read = self._read, None
        return self.handle.get() if tensor is None else tensor


# --- layers -----------------------------------------------------------------------------------------------


class KeptAttention:
    """Recomputes a layer without its attention.

    Args:
        recompute: torch's non-reentrant checkpoint, which gets the layer and its arguments.
        store: where the kept tensors are, :class:`OnDevice` or a :class:`HostStore`.
        selective: whether torch's selective checkpointing keeps them, on the device: in a layer that calls
            SDPA in another way than by transformers' interface.
    """

    is_planned = True

    def __init__(self, recompute, store=None, selective=False):
        self.recompute, self.store = recompute, OnDevice() if store is None else store
        self.selective = selective

    def __call__(self, function, *args, **kwargs):
        if torch.compiler.is_compiling():
            return self.recompute(function, *args, context_fn=_selective, **kwargs)
        if self.selective:
            recompute = with_own_choice(functools.partial(self.recompute, context_fn=_selective))
            return recompute(function, *args, **kwargs)
        calls = _Calls(self.store)
        return self.recompute(functools.partial(calls.run, function), *args, **kwargs)


def refusal_of(recompute):
    """The reason why layers that a function recomputes cannot keep their attention, or None."""
    settings = getattr(recompute, "keywords", {})
    if getattr(recompute, "func", None) is checkpoint and settings.get("use_reentrant") is False:
        return None if "context_fn" not in settings else "a context_fn decides what is recomputed"
    return "another function than torch's non-reentrant checkpoint recomputes the layers"


class _Calls:
    """The attention calls of one layer in one forward, in their order."""

    def __init__(self, store):
        self.store = store
        # By call: a _Record, or None for a call that is recomputed.
        self.records: list[_Record | None] = []
        self.runs = self.number = 0

    def run(self, function, *args, **kwargs):
        """Calls the layer: the first time in the forward, then in recomputations."""
        self.runs, self.number = self.runs + 1, 0
        with observed(self):
            return function(*args, **kwargs)

    def attend(self, call):
        self.number += 1
        if self.runs == 1:
            self.records.append(None)
            # Without these hooks nothing is saved, or not for a recomputation.
            if _hooks() is None or not torch.is_grad_enabled() or call.refusal() is not None:
                return call.plain()
            output, self.records[-1] = _recorded(call, self.store)
            return output
        record = self.records[self.number - 1] if self.number <= len(self.records) else None
        return call.plain() if record is None else record.replayed(call)


def _hooks():
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


class _Record:
    """What a recomputation needs for a call that it does not run.

    Attributes:
        given: the number of an input and a view of it, for each tensor that the checkpoint saves, in order.
        outputs: for each tensor of the output a reference to the kept tensor, a view of it, and whether it
            has a gradient; or an output that is no tensor.
        kernel: of SDPA; another one may be chosen in the recomputation.
        generator: the state of the random numbers after the call, if it draws any.
    """

    __slots__ = ("generator", "given", "kernel", "outputs", "spec")

    def __init__(self, kernel):
        self.given, self.outputs, self.spec, self.kernel, self.generator = [], [], None, kernel, None

    def replayed(self, call):
        """Hands the inputs of the call to the hooks of the checkpoint; returns the kept output."""
        call.kernel = self.kernel
        inputs = call.inputs()
        if self.generator is not None:
            _set_generator(inputs[0].device, self.generator)
        pack = _hooks()[0]
        for index, view in self.given:
            pack(_viewed(inputs[index], view))
        return tree_unflatten([self._output(*output) for output in self.outputs], self.spec)

    def _output(self, kept, view, has_gradient):
        if view is None:
            return kept
        if isinstance(kept, weakref.ref):
            kept = kept()
        return _viewed(kept.for_recomputation(), view).detach().requires_grad_(has_gradient)


def _recorded(call, store):
    """(output, record) of a call; the record is None if the output has no gradient."""
    inputs, record, memory = call.inputs(), _Record(call.kernel), {}
    hooks = _Hooks(inputs, record, store, memory, *_hooks())
    with saved_tensors_hooks(hooks.pack, hooks.unpack):
        output = call.run(inputs)
    hooks.forget_inputs()
    leaves, record.spec = tree_flatten(output)
    if not any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in leaves):
        return output, None
    for leaf in leaves:
        if not isinstance(leaf, torch.Tensor):
            record.outputs.append((leaf, None, False))
            continue
        kept, saved = memory.get(_address(leaf), (None, None))
        if kept is None or not _is_inside(leaf, saved):
            kept, view = _Kept(store.put(leaf)), _view(leaf, leaf.storage_offset())
        else:
            # The node has the only reference, so that its backward frees the tensor.
            kept, view = weakref.ref(kept), _view(leaf, saved.storage_offset())
        record.outputs.append((kept, view, leaf.requires_grad))
    if call.dropout:
        record.generator = _generator(inputs[0].device)
    return output, record


class _Hooks:
    """The hooks of one call of attention, inside the hooks of the checkpoint."""

    def __init__(self, inputs, record, store, memory, pack, unpack):
        self._inputs = {_address(t): (n, t) for n, t in enumerate(inputs) if t is not None and t.numel()}
        self._record, self._store, self._memory = record, store, memory
        self._pack, self._unpack = pack, unpack

    def pack(self, tensor):
        number, given = self._inputs.get(_address(tensor), (None, None))
        if given is not None and tensor.dtype == given.dtype:
            self._record.given.append((number, _view(tensor, given.storage_offset())))
            return self._pack(tensor)
        kept = _Kept(self._store.put(tensor))
        self._memory[_address(tensor)] = kept, tensor.detach()
        return kept

    def unpack(self, packed):
        return packed.for_backward() if isinstance(packed, _Kept) else self._unpack(packed)

    def forget_inputs(self):
        """The node has these hooks as long as it lives."""
        self._inputs = self._record = self._memory = None


def _address(tensor):
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else None


def _view(tensor, offset):
    """Size, strides and offset of a view of another tensor, which starts at an offset of the storage."""
    return tensor.size(), tensor.stride(), tensor.storage_offset() - offset


def _is_inside(tensor, other):
    """True if the elements of a tensor are in the part of the same memory that another one spans."""
    starts, ends = zip(*map(_span, (tensor, other)), strict=True)
    return tensor.dtype == other.dtype and starts[0] >= starts[1] and ends[0] <= ends[1]


def _span(tensor):
    steps = zip(tensor.size(), tensor.stride(), strict=True)
    return tensor.storage_offset(), tensor.storage_offset() + sum((size - 1) * step for size, step in steps)


def _viewed(tensor, view):
    size, stride, offset = view
    if not offset and tensor.size() == size and tensor.stride() == stride:
        return tensor
    return tensor.as_strided(size, stride, tensor.storage_offset() + offset)


# A checkpoint restores the random numbers of the forward before it recomputes. A call that does not run draws
# none, so the state after it is set.


def _generator(device):
    if device.type == "cuda":
        return torch.cuda._get_rng_state_offset(device)
    return torch.get_rng_state()


def _set_generator(device, state):
    if device.type == "cuda":
        torch.cuda._set_rng_state_offset(state, device)
    else:
        torch.set_rng_state(state)


_aten = torch.ops.aten
_KERNELS = [
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
]


def _selective():
    """What torch's selective checkpointing keeps: the outputs of SDPA's kernels."""
    return create_selective_checkpoint_contexts(_KERNELS)


# --- measurements -----------------------------------------------------------------------------------------


class Counter:
    """Counts what the attention calls of a layer would keep. All tensors go on to the hooks around it.

    Attributes:
        bytes: of kept tensors. Each storage counts once per call.
        movable: bytes that a :class:`HostStore` would move.
        flops: of all calls.
        refusal: the reason why a call keeps nothing, or None.
        is_selective: whether only torch's selective checkpointing can keep it.
        way: how it is kept, in words.
    """

    def __init__(self):
        self.is_selective, self.way = False, ""
        self.bytes = self.movable = self.flops = 0
        self.refusal: str | None = (
            "its attention is neither called through transformers' attention interface nor a fused kernel of SDPA"
        )

    def kernels(self, layer):
        """Context manager that counts kernels of SDPA in a layer that calls no attention by name."""
        return contextlib.nullcontext() if is_named(layer) else _Kernels(self)

    def attend(self, call):
        self.refusal = call.refusal()
        if self.refusal is not None:
            return call.plain()
        self.way = call.name
        inputs, kept = call.inputs(), {}
        outside = {_address(t) for t in inputs if t is not None}
        pack_around, unpack_around = _hooks()

        def pack(tensor):
            if tensor.numel() and _address(tensor) not in outside:
                kept[_address(tensor)] = tensor.detach()
            return pack_around(tensor)

        with saved_tensors_hooks(pack, unpack_around):
            output = call.run(inputs)
        for leaf in tree_leaves(output):
            if isinstance(leaf, torch.Tensor):
                kept.setdefault(_address(leaf), leaf.detach())
        self.bytes += sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
        self.movable += sum(tensor.nbytes for tensor in kept.values() if can_move(tensor))
        self.flops += call.flops
        return output


class _Kernels(TorchDispatchMode):
    def __init__(self, counter):
        super().__init__()
        self.counter = counter

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        if func in _KERNELS:
            counter, (query, key) = self.counter, args[:2]
            counter.refusal, counter.is_selective = None, True
            counter.way = "torch's selective checkpointing"
            counter.bytes += sum(
                leaf.nbytes for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)
            )
            counter.flops += 4 * query.numel() * key.shape[-2]
        return output
