# SPDX-License-Identifier: BSD-3-Clause
"""A function run by the processes of a group that talk through gloo."""

import importlib
import multiprocessing
import os
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from liger._core.runtime.environment import triton_interpreted

needs_gloo = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="torch was built without gloo"
)
of_the_torch_backend = pytest.mark.skipif(triton_interpreted(), reason="processes of the torch backend")
_TIMEOUT = 240


def _process(rank, world, store, function):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    torch.manual_seed(0)
    function(rank, world)
    # What is still sent in the background, such as parameters, also by the groups of meshes.
    for group in list(dist.distributed_c10d._world.pg_map):
        dist.barrier(group)
    # No process leaves while another one may still wait for it. Without destructors: destructors of gloo's
    # threads abort now and then ("terminate called without an active exception") on a machine under load.
    (end := dist.FileStore(f"{store}-end", world)).set(str(rank), "")
    end.wait([str(other) for other in range(world)])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def on_processes(tmp_path, function, world=2, timeout=_TIMEOUT):
    """Runs ``function(rank, world)`` in every process of a group. Raises what one of them raised first, and
    fails when they take too long, as they would waiting for each other."""
    # A new store: the processes leave theirs behind.
    store = Path(tempfile.mkdtemp(dir=tmp_path), "store")
    # Forked from one process that has imported what every one of them needs, and has computed nothing.
    multiprocessing.set_forkserver_preload(["pytest", "torch.distributed.tensor", "liger"])
    context = mp.start_processes(
        _process, (world, store, function), world, join=False, start_method="forkserver"
    )
    until = time.monotonic() + timeout
    try:
        while not context.join(max(until - time.monotonic(), 0.1)):
            assert time.monotonic() < until, f"processes that did not end within {timeout} s"
    finally:
        for process in context.processes:
            process.kill()


class _Body:
    """What a test made by :func:`in_processes` does in a process: found there by its names, as a function
    is that another one has taken the place of."""

    def __init__(self, function):
        self.module, self.name = function.__module__, function.__name__

    def __call__(self, rank, world):
        getattr(importlib.import_module(self.module), self.name).body(rank, world)


def in_processes(*worlds, slow=True, timeout=_TIMEOUT):
    """Makes a test of ``function(rank, world)``, which runs in every process of a group, once for each of the
    numbers of processes; of the torch backend."""
    marks = [needs_gloo, of_the_torch_backend, *([pytest.mark.slow] if slow else [])]

    def make(function):
        def test(tmp_path, world):
            on_processes(tmp_path, _Body(function), world, timeout)

        test.__name__, test.__doc__, test.__module__ = (
            function.__name__,
            function.__doc__,
            function.__module__,
        )
        test.body = function
        for mark in (*marks, pytest.mark.parametrize("world", worlds)):
            test = mark(test)
        return test

    return make


def part_of(tensor, rank, world, bounds=None, dim=0):
    """The classes of a process, as a leaf: as ``torch.chunk`` splits them or between the given bounds."""
    if bounds is None:
        piece = tensor.chunk(world, dim)[rank]
    else:
        piece = tensor.narrow(dim, bounds[rank], bounds[rank + 1] - bounds[rank])
    return piece.detach().clone().requires_grad_()


def assert_same_bits(tensor, what):
    """The tensor of this process equals the tensor of every other one, nan included."""
    gathered = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, tensor.detach().contiguous())
    for other in gathered:
        assert torch.equal(other.nan_to_num(7.0), tensor.nan_to_num(7.0)), what
