# SPDX-License-Identifier: BSD-3-Clause
"""Decoder layers that are recomputed without their attention.

Attention is the one part of a layer whose cost grows with the length, and what its backward needs beyond its
inputs is small: the output and the logarithms of the sums. A layer in this state runs under torch's
non-reentrant checkpoint, and its attention kernel saves through hooks of its own. A tensor in the memory of
an input goes on to the hooks of the checkpoint, which recompute it; all others are kept. In the recomputation
the same call hands its inputs to the checkpoint and returns the kept output, and the kernel does not run. The
autograd node is the kernel's own, so every kernel keeps its own bits, layouts, masks and dropout.

A layer calls attention through the interface of transformers, a table of functions by name. Each function
there that a planned model uses is replaced, once in a process, by one that asks whether such a layer is
running in this thread. SDPA is intercepted where transformers calls it, after keys and values were repeated.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import weakref
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from ..recipe import trials
from ..recipe.recomputed import _check
from ..recipe.rename import rename_global, uses_global

_MATH, _EFFICIENT, _CUDNN = 0, 2, 3  # torch.nn.attention.SDPBackend
# Older versions convert a boolean mask for cuDNN's kernel in another way than for the others.
_CONVERTS_ALIKE = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 12)
_TABLE = "ALL_ATTENTION_FUNCTIONS"


class _Local(threading.local):
    # What the attention calls of the running layer report to; None outside of such layers.
    observer: Any = None


_local = _Local()


@contextlib.contextmanager
def observed(observer):
    """Inside, each attention call of this thread goes to ``observer.attend(call)``."""
    before, _local.observer = _local.observer, observer
    try:
        yield
    finally:
        _local.observer = before


# --- where kept tensors are -------------------------------------------------------------------------------


class OnDevice:
    """A store that keeps the tensors where they are.

    A store has ``put(tensor)``, which returns a handle. ``handle.get()`` returns the tensor with its strides.
    It may be called again in a later backward of the same graph. The tensor may be freed with its handle.
    """

    class Handle:
        """A tensor, which nobody may write until it is read."""

        def __init__(self, tensor):
            self.tensor, self.version = tensor, tensor._version

        def get(self):
            """The tensor.

            Raises:
                RuntimeError: it has been written since.
            """
            _check(self.tensor, self.version)
            return self.tensor

    def put(self, tensor):
        """Keeps a tensor, and returns its handle."""
        return self.Handle(tensor)


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


# --- calls of attention -----------------------------------------------------------------------------------


class _SDPA:
    """A call of torch's scaled_dot_product_attention."""

    def __init__(self, query, key, value, mask, dropout, is_causal, scale, enable_gqa):
        self.tensors = [query, key, value, mask]
        self.dropout, self.is_causal, self.scale, self.enable_gqa = dropout, is_causal, scale, enable_gqa
        self.kernel, self._inputs = None, None

    def plain(self):
        return self.run(self.tensors)

    def run(self, tensors):
        return scaled_dot_product_attention(
            *tensors, self.dropout, self.is_causal, scale=self.scale, enable_gqa=self.enable_gqa
        )

    def inputs(self):
        """The tensors of the kernel.

        SDPA would convert and pad a mask into a tensor that the node saves. Here the recomputation does so
        again.
        """
        if self._inputs is None:
            *others, mask = self.tensors
            if mask is not None and mask.dtype is torch.bool:
                mask = torch.zeros_like(mask, dtype=others[0].dtype).masked_fill_(~mask, -torch.inf)
            if mask is not None and self.kernel == _EFFICIENT:
                mask = torch.nn.functional.pad(mask, (0, -mask.shape[-1] % 16))[..., : mask.shape[-1]]
            self._inputs = [*others, mask]
        return self._inputs

    def refusal(self):
        """The reason why the kernel's output cannot be kept, or None; sets ``kernel``, which SDPA takes."""
        if any(t is not None and type(t) is not torch.Tensor for t in self.tensors):
            return "its tensors are of another class than torch.Tensor"
        self.kernel = self._chosen(self.tensors)
        if self.kernel == _MATH:
            return "SDPA takes its math kernel, which saves all weights of attention"
        mask = self.tensors[3]
        if mask is None:
            return None
        if mask.dtype is torch.bool and self.kernel == _CUDNN and not _CONVERTS_ALIKE:
            return "this torch converts a boolean mask for cuDNN in its own way"
        if self._chosen(self.inputs()) != self.kernel:
            return "SDPA takes another kernel for a converted mask"
        return None

    def _chosen(self, tensors):
        return torch._fused_sdp_choice(
            *tensors, self.dropout, self.is_causal, scale=self.scale, enable_gqa=self.enable_gqa
        )

    @property
    def flops(self):
        """Of the forward."""
        query, key, value, _ = self.tensors
        rows = query.numel() // query.shape[-1]
        product = 2 * rows * key.shape[-2] * (query.shape[-1] + value.shape[-1])
        return product // 2 if self.is_causal else product


class _Function:
    """A call of another function of the interface, which takes the arguments of transformers."""

    kernel = None

    def __init__(self, function, args, kwargs):
        self.function, self.args, self.kwargs = function, args, kwargs
        self.dropout = kwargs.get("dropout") or 0.0

    def plain(self):
        return self.function(*self.args, **self.kwargs)

    def run(self, tensors):
        return self.plain()

    def inputs(self):
        """All tensors of the call, and the parameters of the module, such as sinks."""
        module = self.args[0]
        own = (*module._parameters.values(), *module._buffers.values())
        leaves = tree_leaves((self.args[1:], self.kwargs))
        return [t for t in (*leaves, *own) if isinstance(t, torch.Tensor)]

    def refusal(self):
        if any(type(t) is not torch.Tensor for t in self.args[1:4]):
            return "its tensors are of another class than torch.Tensor"
        return None

    @property
    def flops(self):
        query, key = self.args[1:3]
        return 2 * query.numel() * key.shape[-2]


# --- layers -----------------------------------------------------------------------------------------------


class KeptAttention:
    """Recomputes a layer without its attention.

    Args:
        recompute: torch's non-reentrant checkpoint, which gets the layer and its arguments.
        store: where the kept tensors are, an object like :class:`OnDevice`.
    """

    is_planned = True

    def __init__(self, recompute, store=None):
        self.recompute, self.store = recompute, OnDevice() if store is None else store

    def __call__(self, function, *args, **kwargs):
        if torch.compiler.is_compiling():
            return self.recompute(function, *args, context_fn=_compiled, **kwargs)
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
        # The node has the only reference, so that its backward frees the tensor.
        kept, base = memory.get(_address(leaf), (None, None))
        if kept is None or leaf.dtype != base[0]:
            kept, view = _Kept(store.put(leaf.detach())), _whole(leaf)
        else:
            kept, view = weakref.ref(kept), _view(leaf, base[1])
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
        self._memory[_address(tensor)] = kept, (tensor.dtype, tensor.storage_offset())
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


def _whole(tensor):
    return _view(tensor, tensor.storage_offset())


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


def _compiled():
    """What compiled code saves of a layer in this state: the outputs of SDPA's kernels."""
    aten = torch.ops.aten
    return create_selective_checkpoint_contexts(
        [
            aten._scaled_dot_product_flash_attention.default,
            aten._scaled_dot_product_efficient_attention.default,
            aten._scaled_dot_product_cudnn_attention.default,
            aten._scaled_dot_product_flash_attention_for_cpu.default,
        ]
    )


# --- measurements -----------------------------------------------------------------------------------------


class Counter:
    """Counts what the attention calls of a layer would keep. All tensors go on to the hooks around it.

    Attributes:
        bytes: of kept tensors. Each storage counts once per call.
        flops: of all calls.
        refusal: the reason why a call keeps nothing, or None.
    """

    def __init__(self):
        self.bytes = self.flops = 0
        self.refusal: str | None = "its attention is not called through transformers' attention interface"

    def attend(self, call):
        self.refusal = call.refusal()
        if self.refusal is not None:
            return call.plain()
        inputs, kept = call.inputs(), {}
        outside = {_address(t) for t in inputs if t is not None}
        pack_around, unpack_around = _hooks()

        def pack(tensor):
            if tensor.numel() and _address(tensor) not in outside:
                kept[_address(tensor)] = tensor.untyped_storage()
            return pack_around(tensor)

        with saved_tensors_hooks(pack, unpack_around):
            output = call.run(inputs)
        for leaf in tree_leaves(output):
            if isinstance(leaf, torch.Tensor):
                kept[_address(leaf)] = leaf.untyped_storage()
        self.bytes += sum(storage.nbytes() for storage in kept.values())
        self.flops += call.flops
        return output


# --- the interface of transformers ------------------------------------------------------------------------


def intercept(layer):
    """Replaces the functions of transformers' interface that the attention of a layer calls."""
    for module in layer.modules():
        table = getattr(sys.modules.get(trials.original(module).__module__), _TABLE, None)
        name = getattr(getattr(module, "config", None), "_attn_implementation", None)
        if table is None or name is None or name not in table:
            continue
        function = table[name]
        if not hasattr(function, "_liger_original"):
            replaced = _intercepting(function)
            if name in getattr(table, "_local_mapping", {}):
                table[name] = replaced
            else:
                type(table).register(name, replaced)


def _intercepting(function):
    inside = _with_sdpa(function)

    @functools.wraps(function)
    def attention(*args, **kwargs):
        if torch.compiler.is_compiling() or _local.observer is None:
            return function(*args, **kwargs)
        if inside is not None:
            return inside(*args, **kwargs)
        observer = _local.observer
        with observed(None):
            return observer.attend(_Function(function, args, kwargs))

    attention._liger_original = function
    return attention


class _Torch:
    """The module torch with another ``nn.functional.scaled_dot_product_attention``."""

    def __init__(self, module, **replaced):
        self._module = module
        vars(self).update(replaced)

    def __getattr__(self, name):
        return getattr(self._module, name)


def _observed_sdpa(
    query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False
):
    call = _SDPA(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    return call.plain() if _local.observer is None else _local.observer.attend(call)


_functional = _Torch(torch.nn.functional, scaled_dot_product_attention=_observed_sdpa)
_torch = _Torch(torch, nn=_Torch(torch.nn, functional=_functional))
_NAME = "_liger_observed_torch"


def _with_sdpa(function):
    """A copy of transformers' function for SDPA that reports its call of SDPA; None for other functions."""
    if not str(getattr(function, "__module__", "")).endswith("sdpa_attention"):
        return None
    found = uses_global(function, "torch")
    if found is None or found["torch"] is not torch:
        return None
    found[_NAME] = _torch
    return rename_global(function, "torch", _NAME)
