"""Candidates: the implementations of an op, ours under each backend and the peers', from which rows make providers."""

import contextlib
import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

import liger

from .harness import Provider


@dataclass(frozen=True)
class Candidate:
    """An implementation of an op: ``function(tensors)``, and the names of the tensors that it, or its backward,
    overwrites. ``works`` names the works it is for (all, if none): a variant may differ from another in one only."""

    name: str
    function: Callable
    group: str = "other"
    context: Callable = contextlib.nullcontext
    needs: tuple[str, ...] = ()
    overwrites: tuple[str, ...] = ()
    works: tuple[str, ...] = ()


@functools.cache
def peer(module, name):
    """What a peer calls ``name``, imported when first called: a failure to import is that provider's alone."""
    return getattr(importlib.import_module(module), name)


def ours(options, function, label="", overwrites=(), works=(), small=False):
    """The same function under each backend of liger; plain torch, which is slow, only if asked for or if the work is
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
    """liger-kernel with its Triton kernels (or what ``LIGER_KERNEL_IMPL`` chooses): its default."""
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
    """torch.compile of an eager candidate, if the run asks for it."""
    if not options.compile:
        return []
    return [Candidate(f"torch.compile{label}", torch.compile(function, dynamic=False))]


def selected(options, candidates, work=""):
    """The candidates for a work that the run asks for."""
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
