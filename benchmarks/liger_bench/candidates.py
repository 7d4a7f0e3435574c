# SPDX-License-Identifier: BSD-3-Clause
"""Candidates: implementations of an op by liger, per backend, and by peers. Providers are built from them."""

import contextlib
import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

import liger

from .harness import Provider, Row


@dataclass(frozen=True)
class Candidate:
    """An implementation of an op: ``function(tensors)``.

    ``overwrites`` names the tensors that it or its backward overwrites. ``works`` names the works that it
    takes part in; empty means all.
    """

    name: str
    function: Callable
    group: str = "other"
    context: Callable = contextlib.nullcontext
    needs: tuple[str, ...] = ()
    overwrites: tuple[str, ...] = ()
    works: tuple[str, ...] = ()


@functools.cache
def peer(module, name):
    """A function of a peer, imported at the first call, so that an ImportError fails that provider only."""
    return getattr(importlib.import_module(module), name)


def ours(options, function, label="", overwrites=(), works=(), small=False):
    """The same function under each backend of liger; the slow torch backend only on request or if
    ``small``."""
    backends = options.backends
    if small and "torch" not in backends:
        backends = (*backends, "torch")
    return [
        Candidate(
            f"liger[{b}]{label}", function, "ours", partial(liger.use_backend, b), (), overwrites, works
        )
        for b in backends
    ]


def liger_kernel(function, label="", overwrites=(), works=()):
    """liger-kernel with its default kernels, Triton, or those that ``LIGER_KERNEL_IMPL`` selects."""
    return Candidate(
        f"liger-kernel{label}",
        function,
        "liger-kernel",
        needs=("liger_kernel", "triton"),
        overwrites=overwrites,
        works=works,
    )


# Its kernels in the CuTe DSL, with the names and arguments of the others; Hopper and later only.
LIGER_KERNEL_CUTE = "liger_kernel.ops.cutedsl.ops"


def liger_kernel_cute(function, label="", overwrites=(), works=()):
    return Candidate(
        f"liger-kernel CuTe{label}",
        function,
        needs=("liger_kernel", "cutlass"),
        overwrites=overwrites,
        works=works,
    )


def quack(function, label="", overwrites=(), works=()):
    needs = ("quack", "cutlass")
    return Candidate(f"quack{label}", function, needs=needs, overwrites=overwrites, works=works)


def compiled(options, function, label=""):
    """torch.compile of an eager candidate, if the options request it."""
    if not options.compile:
        return []
    return [Candidate(f"torch.compile{label}", torch.compile(function, dynamic=False))]


def selected(options, candidates, work=""):
    """The candidates of the run that take part in a work."""
    return [
        c
        for c in candidates
        if (c.group == "ours" or options.peers is None or c.name.startswith(options.peers))
        and (not c.works or not work or work in c.works)
    ]


def providers(candidates, work, *names):
    """Providers that do ``work`` (a maker of harness.py) with each candidate."""
    return [
        Provider(c.name, work(c.function, *names, c.overwrites), c.group, c.context, c.needs)
        for c in candidates
    ]


def host_rows(options, op, inputs, candidates, works):
    """Rows of host time per call, for inputs so small that the device waits for the host."""
    for label, name in (("forward with grad", "forward"), ("forward and backward",) * 2):
        yield Row(
            op,
            f"{op} host time, {label}",
            inputs,
            providers(selected(options, candidates, name), *works[name]),
            kind="host",
            rounds=7,
            burst=options.pick(200, 100, 3),
        )
