# SPDX-License-Identifier: BSD-3-Clause
"""Tensors that wait for the backward in host memory: inputs of recomputed layers, and attention they keep.

A store has ``put(tensor)``, which returns a handle, and ``handle.get()`` returns the tensor with its strides
and without a graph, also in a later backward of the same graph. The tensor is freed with its handle.

A copy to the host runs on a stream of its own while the next layer computes. The store refers to the tensor
until the stream that computes has waited for that copy, so the caching allocator cannot hand out its memory
too early, and the memory is free at a fixed point of the forward, however far the host runs ahead
(``record_stream`` would free it when the host finds the copy done). In the backward, the first tensor that a
layer asks for starts the copies of the layer before. The last layer leaves its tensors where they are, since
the backward asks for them at once.
"""

import contextlib
import functools
import inspect
import weakref
from collections import deque

import torch
import torch.utils.checkpoint

from ..recipe.recomputed import check_version
from . import host_pool
from .copy_streams import Streams
from .device_memory import size_text

# Smaller tensors stay on the device: a copy costs about 10 microseconds of host time.
WORTH_MOVING = 2**20


def check(offload):
    """Raises TypeError or ValueError for an argument ``offload`` that is no choice and no bytes."""
    name = "liger.transformers.checkpoint: offload"
    if offload is None or isinstance(offload, bool):
        return
    if not isinstance(offload, int):
        raise TypeError(
            f"{name} must be a bool, an int (bytes of host memory) or None, not {type(offload).__name__}"
        )
    if offload < 1:
        raise ValueError(f"{name} in bytes must be positive, got {offload}")
    left = host_pool.available()
    if left is not None and offload > left:
        raise ValueError(f"{name} asks for {offload} bytes of host memory, {left} are available")


class Kept:
    """A tensor that stays on the device, and has the methods of one that does not.

    Attributes:
        group: the layer that it belongs to, or None.
    """

    def __init__(self, tensor, group=None):
        # Without its node: a node that saves its own output would keep itself alive.
        self._tensor, self._version, self._group = tensor.detach(), tensor._version, group

    def get(self):
        """The tensor.

        Raises:
            RuntimeError: it has been written since it was put.
        """
        check_version(self._tensor, self._version)
        if self._group is not None:
            self._group.reach()
        return self._tensor


class OnDevice:
    """A store that keeps the tensors where they are."""

    put = staticmethod(Kept)


class HostStore:
    """A store in host memory. It takes tensors from :meth:`begin` to :meth:`flush`, within :meth:`layer`.

    Args:
        offload: True, or bytes of host memory; None: off until :meth:`turn_on`; False: always off.
    """

    def __init__(self, offload):
        self.offload = offload
        self._reset()

    def _reset(self):
        self.is_on = bool(self.offload)
        self.limit = None if self.offload is None or isinstance(self.offload, bool) else self.offload
        self.pool = self.streams = None
        # Bytes that this step has moved, the inputs of layers among them, bytes that it could not move for
        # lack of host memory, moved and refused bytes of the last step, and the most inputs of any step.
        self.moved = self._inputs = self.refused = self.most = 0
        self.last = (0, 0)
        # The layer of the last tensors, and the one that runs.
        self._group = self._running = None
        # Layers with copies to the host that the computing stream has not waited for.
        self._leaving = deque()

    def __getstate__(self):
        # Blocks, streams and graphs belong to one model. Its plan, which a copy has, counts on the inputs.
        return {"offload": self.offload, "is_on": self.is_on, "most": max(self.most, self.inputs)}

    def __setstate__(self, state):
        self.offload = state["offload"]
        self._reset()
        self.is_on, self.most = state["is_on"], state["most"]

    def turn_on(self):
        """Moves tensors from now on, unless ``offload=False``; returns whether that is a change."""
        turned = not self.is_on and self.offload is None
        self.is_on = self.is_on or turned
        return turned

    def turn_off(self):
        """Takes back :meth:`turn_on`; host memory is free when the graphs that use it are."""
        self.flush()
        self._reset()

    # --- forward --------------------------------------------------------------------------------------------

    def begin(self, is_new_step=True):
        """Starts a forward of the model: before its first layer, or within it, where transformers checkpoints
        the calls of layers (before 5.23) and the input of the first one has been put."""
        if self._running is None:
            self.flush()
        else:
            self.retire()
            self._running.before = _none
        if is_new_step:
            moved, inputs, refused = self._counted()
            self.last, self.most = (moved, refused), max(self.most, inputs)
            self.moved -= moved
            self._inputs -= inputs
            self.refused -= refused
            if self._running is not None:
                self._running.counted = 0, 0, 0

    def flush(self):
        """Ends the forward: the computing stream waits for all copies to the host."""
        self._group = None
        self.retire()

    @contextlib.contextmanager
    def layer(self, stays=False):
        """The forward of one layer; ``stays``: its tensors stay on the device."""
        self.retire(1)
        # The layer before exists until this one has run: its tensors keep their addresses.
        before = self._group
        self._group = self._running = group = _Group(self, before, stays, self._counted())
        try:
            yield
        except BaseException:
            # Neither a later layer nor the end of the forward runs.
            group.retire()
            self.flush()
            raise
        finally:
            self._running = None
        if group.leaving:
            self._leaving.append(group)

    def retire(self, most=0):
        """Lets go of the tensors of all but the last layers, once their copies are done."""
        while len(self._leaving) > most:
            self._leaving.popleft().retire()

    def put(self, tensor, is_input=False):
        """The handle of a tensor, which is moved unless a reason of this class speaks against it."""
        group = self._group
        if group is None or not self.is_on:
            return Kept(tensor)
        address = tensor.untyped_storage().data_ptr()
        group.addresses.add(address)
        # A tensor that the layer before has put as well belongs to all layers, and is on the device anyway.
        before = group.before()
        is_shared = before is not None and address in before.addresses
        if self.streams is None:
            self.streams = Streams(tensor.device)
            self.pool = host_pool.HostPool(self.limit, self.streams.block)
        is_elsewhere = tensor.device != self.streams.device
        if group.stays or is_shared or is_elsewhere or not can_move(tensor) or _is_captured(tensor):
            return Kept(tensor, group)
        for event in self.pool.settle():
            self.streams.leave.wait_event(event)
        span = self.pool.take(tensor.nbytes)
        if span is None:
            self.refused += tensor.nbytes
            return Kept(tensor, group)
        self.moved += tensor.nbytes
        self._inputs += tensor.nbytes if is_input else 0
        return Moved(tensor, span, group)

    # --- numbers --------------------------------------------------------------------------------------------

    def _counted(self):
        """Bytes moved, inputs among them, and bytes refused, before the layer that runs."""
        running = self._running
        return (self.moved, self._inputs, self.refused) if running is None else running.counted

    @property
    def inputs(self):
        """Bytes of the inputs of layers that this step has moved, before the layer that runs."""
        return self._counted()[1]

    def shortage(self, ratio, attention=0):
        """Bytes without room on the host in a step of ``ratio`` times the tokens, with that attention."""
        beyond = ratio * self.most + attention - self._held
        if beyond <= 0:
            return 0
        # Before the first tensor moves, and in a copy of a model, there is no pool yet.
        pool = self.pool or host_pool.HostPool(self.limit, None)
        return max(0, int(beyond - pool.room()))

    @property
    def _held(self):
        return self.pool.size if self.pool is not None else 0

    @property
    def summary(self):
        """Words on the bytes of the last step."""
        moved, refused = self.last
        text = f"{size_text(moved)} offloaded to {size_text(self._held)} of host memory"
        if refused:
            text += f", {size_text(refused)} more stay on the device for lack of host memory"
        return text


class _Group:
    """The tensors of one layer in one forward; ``counted``: what the store had counted before them."""

    def __init__(self, store, before, stays, counted):
        self.store, self.stays, self.counted = store, stays, counted
        # The layer before, which the backward reaches next. Its handles keep it alive.
        self.before = _none if before is None else weakref.ref(before)
        self.addresses, self.handles, self.leaving = set(), [], []
        self.task = -1

    def retire(self):
        """Lets go of the tensors, whose memory is used again behind their copies."""
        for tensor, version, event, stream in self.leaving:
            check_version(tensor, version)
            stream.wait_event(event)
        self.leaving.clear()

    def reach(self):
        """The backward asks for a tensor of this layer: the tensors of the layer before are next."""
        task = _task()
        if task == self.task or task == -1:
            return
        self.task = task
        # Without an end of the forward, where the last layer does not run.
        self.store.retire()
        self.fetch()
        if (before := self.before()) is not None:
            before.fetch()

    def fetch(self):
        for handle in self.handles:
            if (moved := handle()) is not None:
                moved.fetch()


# The number of the backward that runs in this thread, -1 outside.
_task = torch._C._current_graph_task_id


def _none():
    return None


class Moved:
    """A tensor in host memory."""

    def __init__(self, tensor, span, group):
        store = group.store
        self._group, self._span = group, span
        # The tensor on the device, the event of its copy, and the stream that has allocated it.
        self._ahead = self._read = None
        self._streams, self._pool = store.streams, store.pool
        self._like = tensor.shape, tensor.stride(), tensor.dtype
        memory = self._pool.memory(span)[: tensor.nbytes]
        self._host = memory.view(tensor.dtype).as_strided(self._like[0], self._like[1])
        # Read before the switch of streams: within it the current stream is the other one.
        computing = self._streams.current()
        leave = self._streams.leave
        leave.wait_event(computing.record_event())
        self._streams.copy(leave, self._host, tensor.detach())
        self._written = leave.record_event()
        group.leaving.append((tensor.detach(), tensor._version, self._written, computing))
        group.handles.append(weakref.ref(self))

    def fetch(self):
        """Starts the copy to the device, unless it has started."""
        if self._ahead is not None:
            return
        computing, back = self._streams.current(), self._streams.back
        tensor = self._streams.empty(*self._like)
        # Kernels that have been issued may still use that memory.
        back.wait_event(computing.record_event())
        back.wait_event(self._written)
        self._streams.copy(back, tensor, self._host)
        self._read = back.record_event()
        self._ahead = tensor, self._read, computing

    def get(self):
        """The tensor, on the device."""
        self._group.reach()
        self.fetch()
        tensor, event, stream = self._ahead
        self._ahead = None
        computing = self._streams.current()
        computing.wait_event(event)
        if computing != stream:
            self._streams.used_by(tensor, computing)
        return tensor

    def __del__(self):
        # Runs in any thread, also within a method of the pool.
        if self._ahead is not None:
            # Fetched for nothing: no stream has waited for the copy, and this store may have no next step.
            self._streams.used_by(self._ahead[0], self._streams.back)
        self._pool.give_back(self._span, self._read)


class Offloaded:
    """Calls a layer by a function that recomputes it, with its inputs in a store.

    Args:
        store: a :class:`HostStore`.
        function: torch's checkpoint or one like it, which saves the arguments of the layer as saved tensors.
        stays: whether the inputs stay on the device.
    """

    def __init__(self, store, function, stays):
        self.store, self.function, self.stays = store, with_own_choice(function), stays

    def __call__(self, function, *args, **kwargs):
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return self.function(function, *args, **kwargs)
        store = self.store
        moving = {t.untyped_storage().data_ptr() for t in args if _is_worth(t)}

        def pack(tensor):
            is_input = type(tensor) is torch.Tensor and tensor.untyped_storage().data_ptr() in moving
            return store.put(tensor, is_input=True) if is_input else tensor

        with store.layer(self.stays), torch.autograd.graph.saved_tensors_hooks(pack, _unpack):
            return self.function(function, *args, **kwargs)


def with_own_choice(function):
    """torch's checkpoint with a policy of what to save (context_fn) would warn of hooks around it; the policy
    saves without them."""
    options = getattr(function, "keywords", {})
    if "context_fn" not in options or not _KNOWS_HOOKS or "respect_saved_tensors_hooks" in options:
        return function
    return functools.partial(function, respect_saved_tensors_hooks=False)


# Since torch 2.14.
_KNOWS_HOOKS = (
    "respect_saved_tensors_hooks" in inspect.signature(torch.utils.checkpoint.checkpoint).parameters
)


def _unpack(packed):
    return packed.get() if isinstance(packed, Kept | Moved) else packed


def _is_captured(tensor):
    # Events of steps before a capture do not belong to its graph.
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def _is_worth(argument):
    """True for an argument that a layer got from another one, and that is large."""
    return isinstance(argument, torch.Tensor) and argument.requires_grad and _is_large(argument)


def _is_large(tensor):
    is_plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided
    return is_plain and tensor.nbytes >= WORTH_MOVING


def can_move(tensor):
    """True for a tensor that a copy brings back as it is, and that is worth it."""
    return _is_large(tensor) and torch.ops.aten.is_non_overlapping_and_dense.default(tensor)
