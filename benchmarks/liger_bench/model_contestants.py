"""The contestants of ``bench_model``: how each prepares a model, and the context of its steps."""

import contextlib
import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

import liger

# Steps until a plan of checkpointing is final.
_PLANNED_WARM_UP = 8


@dataclass(frozen=True)
class Contestant:
    """``prepare(model)`` returns the callable of a step; ``context`` surrounds each step."""

    name: str
    group: str
    prepare: Callable
    context: Callable = contextlib.nullcontext
    needs: tuple[str, ...] = ()
    checkpointing: bool = True
    # Steps before a shape is measured, at least: a plan needs some until it is final.
    warm_up: int = 0
    captured: bool = False


def _compile(model):
    return torch.compile(model, dynamic=False)


def _with_liger_kernel(model):
    from liger_kernel.transformers import apply_liger_kernel_to_llama

    apply_liger_kernel_to_llama(model=model)
    return model


def contestants(backends, compile):
    """Unpatched, liger-kernel, liger under each backend; with ``compile`` also the first and the last compiled."""
    needs = ("liger_kernel", "triton")
    plain = [Contestant("transformers", "plain", lambda model: model)]
    ours = [
        Contestant(f"liger[{b}]", "ours", liger.patch, lambda b=b: liger.use_backend(b)) for b in backends
    ]
    if compile:
        plain.append(Contestant("transformers, compiled", "other", _compile))
        ours += [
            Contestant(f"{c.name}, compiled", "ours", lambda m: _compile(liger.patch(m)), c.context)
            for c in ours
        ]
    return [*plain, Contestant("liger-kernel", "liger-kernel", _with_liger_kernel, needs=needs), *ours]


def recomputing(backends):
    """liger under each backend, with a backward that recomputes cheap outputs."""
    patch = functools.partial(liger.patch, recompute=True)
    return [
        Contestant(f"liger[{b}], recompute", "ours", patch, functools.partial(liger.use_backend, b))
        for b in backends
    ]


def captured(entered):
    """The contestants of liger again, with CUDA graphs."""
    ours = (c for c in entered if c.group == "ours" and "compiled" not in c.name)
    return [replace(c, name=f"{c.name}, CUDA graph", captured=True) for c in ours]


def planned(backends, memories):
    """liger under each backend with planned checkpointing in each memory, and the same with ``recompute=True``.

    A memory of None: without checkpointing.
    """

    def prepare(model, memory, recompute):
        return liger.transformers.checkpoint(liger.patch(model, recompute=recompute), memory)

    for backend, (name, memory), recompute in itertools.product(backends, memories, (False, True)):
        method = "no checkpointing" if memory is None else f"memory {name}"
        yield Contestant(
            f"liger[{backend}], {method}{', recompute' if recompute else ''}",
            "ours",
            functools.partial(prepare, memory=memory, recompute=recompute),
            functools.partial(liger.use_backend, backend),
            checkpointing=memory is not None,
            warm_up=0 if memory is None else _PLANNED_WARM_UP,
        )
