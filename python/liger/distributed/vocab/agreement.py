# SPDX-License-Identifier: BSD-3-Clause
"""The first exchange between the processes of a group in a vocabulary-parallel call.

Each process says whether its arguments are valid, which classes it has, and, as a hash, what has to be the
same on all processes. An error on one process is therefore an error on all, and none of them hangs. On the
CPU this is one small all-gather per call. For CUDA tensors it would make the host wait, so there the
processes agree on a layout once.
"""

import contextlib
import hashlib
import threading
import weakref
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_object_coll_device
from torch.distributed.tensor import DTensor

from ..._core.head.kept_logits import budget_or_default
from ..._core.op.arguments import GROUP
from .shards import VocabShards, all_gather_single, group_of, vocab_group


class _Call(threading.local):
    """The call that this thread is in."""

    name: str | None = None  # of the public function; None outside of one
    met = True  # whether its processes have exchanged what this module is for


class _Said(NamedTuple):
    """The message of a process: integers, exchanged by one collective."""

    failed: int
    start: int
    classes: int
    vocab: int
    digest: int


_call = _Call()
# {process group: {(function, VocabShards, number of classes): whether some process has no class}}
_agreed: weakref.WeakKeyDictionary[Any, dict[Any, bool]] = weakref.WeakKeyDictionary()


def name_of_call(op):
    """The public function that was called, or the public function of an op."""
    return op if torch.compiler.is_compiling() else _call.name or op


def told_to_all(name, tensor, dim, group, values):
    """A context in which an error before the processes of a call have met is an error on all of them.

    Compiled code meets in the ops alone, because processes compile at different times.

    Args:
        name: the public function.
        tensor: the argument whose dimension ``dim`` has the classes.
        group, values: the argument of that name, and all arguments.
    """
    if torch.compiler.is_compiling() or _call.name is not None:
        return contextlib.nullcontext()
    return _told_to_all(name, tensor, dim, group, values)


@contextlib.contextmanager
def _told_to_all(name, tensor, dim, group, values):
    outer, _call.name, _call.met = (_call.name, _call.met), name, False
    try:
        yield
    except Exception as error:
        if not _call.met and (found := _group_of(tensor, dim, group)) is not None:
            _tell(name, found, values, error)
        raise
    finally:
        _call.name, _call.met = outer


def meet(op, group, shards: VocabShards, classes, target, same):
    """Exchanges what this module is for. An op calls it after its checks and before it communicates.

    Args:
        target: the target of the call, on the device of its tensors.
        same: {name: value} of what has to be the same on all processes, with the options.

    Raises:
        RuntimeError: a process has raised, shards that do not cover the vocabulary once, or values that
            differ.
    """
    _call.met = True
    agreed, key = _agreed.setdefault(group, {}), (op, shards, classes)
    if target.is_cuda and (key in agreed or torch.cuda.is_current_stream_capturing()):
        return
    same = {"function": op, **{name: _plain(value) for name, value in same.items()}}
    if not target.is_cuda:
        same["number of rows that are not ignored"] = int((target != same["ignore_index"]).sum())
    said = _Said(0, shards.start, classes, shards.vocab, _digest(same))
    name = name_of_call(op)
    everyone = _exchange(name, said, group)
    if any(other.failed or other[3:] != said[3:] for other in everyone):
        _raise_for_all(name, group, {**same, "vocab_size": shards.vocab})
    _check_cover(name, everyone)
    agreed[key] = any(other.classes == 0 for other in everyone)


def may_have_empty_shards(op, group, shards, classes):
    """True if some process of a call has no class, or if its processes have not met, under CUDA graph
    capture."""
    return _agreed.get(group, {}).get((op, shards, classes), True)


def options_of(input, weight, bias, memory_budget, **options):
    """The values of a call with an lm_head that must be equal on all processes."""
    return {
        "number of rows": input.shape[0],
        "hidden size": input.shape[1],
        "dtype": input.dtype,
        "dtype of weight": weight.dtype,
        "bias given": bias is not None,
        "input requires grad": input.requires_grad,
        "weight requires grad": weight.requires_grad,
        "memory_budget": budget_or_default(memory_budget),
        **options,
    }


def _plain(value):
    """An option as it is compared; for a tensor only that it is given, because its values are on a device."""
    return "given" if isinstance(value, torch.Tensor) else value


def _digest(same):
    return int.from_bytes(hashlib.blake2b(repr(same).encode(), digest_size=7).digest(), "big")


def _exchange(op, said, group):
    """The :class:`_Said` of all processes."""
    world = dist.get_world_size(group)
    if world == 1:
        return [said]
    mine = torch.tensor(said, dtype=torch.int64, device=_get_object_coll_device(group))
    gathered = mine.new_empty(world * len(said))
    try:
        all_gather_single(gathered, mine, group=group)
        numbers = gathered.view(world, -1).tolist()
    except RuntimeError as error:
        raise RuntimeError(
            f"{op}: the processes of the group did not meet, expected a call on each of its {world} ranks: {error}"
        ) from error
    return [_Said(*row) for row in numbers]


def _group_of(tensor, dim, group):
    """The group of a call that has failed; None if no process can wait for this one, or that cannot be
    known."""
    try:
        if group is None and isinstance(tensor, DTensor):
            return vocab_group(tensor, dim)
        return group_of("", group) if GROUP.has_type(group) or group is None else None
    except RuntimeError:  # no process group, or this process is not a member
        return None


def _tell(op, group, values, error):
    """Makes the other processes raise as well. On CUDA they no longer wait for it once they have agreed."""
    on_cuda = any(isinstance(value, torch.Tensor) and value.is_cuda for value in values)
    if on_cuda and group in _agreed:
        return
    try:
        _exchange(op, _Said(1, 0, 0, 0, 0), group)
        _gather_details(group, (str(error), {}))
    except RuntimeError:
        return  # The others did not come; the caller raises the error of this process.


def _gather_details(group, mine):
    details = [None] * dist.get_world_size(group)
    dist.all_gather_object(details, mine, group=group)
    return details


def _raise_for_all(op, group, same):
    """Raises RuntimeError on every process: what one of them raised, or what differs."""
    details = _gather_details(group, (None, same))
    world = len(details)
    for rank, (message, _) in enumerate(details):
        if message is not None:
            raise RuntimeError(f"{op}: rank {rank} of {world} raised: {message.removeprefix(f'{op}: ')}")
    rank, name, first, other = _first_difference([same for _, same in details])
    hint = "; shards of different sizes need vocab_start and vocab_size" if name == "vocab_size" else ""
    raise RuntimeError(
        f"{op}: {name} is {first} on rank 0 and {other} on rank {rank} of {world}, expected the same on all "
        f"processes{hint}"
    )


def _first_difference(described):
    """(rank, name, value of rank 0, value of that rank)"""
    first = described[0]
    for rank, other in enumerate(described):
        for name in {**first, **other}:
            if first.get(name) != other.get(name):
                return rank, name, first.get(name), other.get(name)
    raise AssertionError("no difference")


def _check_cover(op, everyone):
    """Raises RuntimeError unless the shards cover the vocabulary once: the same on all processes."""
    end = 0
    for said in sorted(everyone, key=lambda s: (s.start, s.classes)):
        if said.classes and said.start != end:
            break
        end += said.classes
    else:
        if end == everyone[0].vocab:
            return
    shards = ", ".join(f"{s.start} to {s.start + s.classes}" for s in everyone)
    raise RuntimeError(
        f"{op}: the processes have the classes {shards} of a vocab_size of {everyone[0].vocab}, expected shards that "
        "cover the vocabulary once"
    )
