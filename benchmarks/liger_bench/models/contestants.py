# SPDX-License-Identifier: BSD-3-Clause
"""The contestants of ``bench_model``: how each prepares a model, and the context of its steps."""

import contextlib
import functools
import importlib
import itertools
import re
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

import liger

# Steps until a plan of checkpointing is final.
_PLANNED_WARM_UP = 8


def adamw(parameters, capturable=False):
    return torch.optim.AdamW(parameters, lr=1e-5, fused=True, capturable=capturable)


def adamw_8bit(parameters, capturable=False):
    """AdamW of bitsandbytes with states of 8 bits; the states of tensors below 4096 elements have 32."""
    return importlib.import_module("bitsandbytes").optim.AdamW8bit(parameters, lr=1e-5)


def in_backward(make):
    """``make`` with its steps in the backward."""

    def of_parameters(parameters, capturable=False):
        optimizer = make(parameters, capturable=capturable)
        liger.transformers.release_gradients(optimizer)
        return optimizer

    return of_parameters


# Value of --optimizer -> (addition to the name of a contestant, its optimizer, packages).
OPTIMIZERS = {
    "adamw": ("", adamw, ()),
    "in-backward": (", step in backward", in_backward(adamw), ()),
    "8bit": (", 8-bit AdamW", adamw_8bit, ("bitsandbytes",)),
    "8bit-in-backward": (", 8-bit AdamW in backward", in_backward(adamw_8bit), ("bitsandbytes",)),
}


@dataclass(frozen=True)
class Contestant:
    """``prepare(model)`` returns the callable of a step; ``context`` surrounds each step.

    ``optimizer(parameters, capturable=...)`` makes its optimizer.
    """

    name: str
    group: str
    prepare: Callable
    context: Callable = contextlib.nullcontext
    needs: tuple[str, ...] = ()
    checkpointing: bool = True
    # Steps before a shape is measured, at least: a plan needs some until it is final.
    warm_up: int = 0
    captured: bool = False
    is_planned: bool = False
    optimizer: Callable = adamw


def compiled(model, backend="inductor", mode=None):
    """``torch.compile`` of a model whose attention is causal by SDPA's flag.

    A model that is traced gives SDPA a mask as a tensor, and SDPA computes what the mask hides, too. For an
    attention function without a function for masks, transformers makes no mask. The steps here have no
    padding and no packed sequences, so the flag says the same.
    """
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    AttentionInterface.register("causal_sdpa", sdpa_attention_forward)
    model.set_attn_implementation("causal_sdpa")
    return torch.compile(model, dynamic=False, backend=backend, mode=mode)


def reduce_overhead(model):
    """``compiled``, with forward and backward as CUDA graphs, whose outputs the next step overwrites."""
    call = compiled(model, mode="reduce-overhead")

    def step(**inputs):
        torch.compiler.cudagraph_mark_step_begin()
        output = call(**inputs)
        output.loss = output.loss.clone()
        return output

    return step


def with_liger_kernel(model):
    """Patches a model by liger-kernel's function for its type, and returns it."""
    module = importlib.import_module("liger_kernel.transformers")
    inner = model.get_base_model() if hasattr(model, "peft_config") else model
    getattr(module, f"apply_liger_kernel_to_{model.config.model_type}")(model=inner)
    return model


def contestants(backends, compile):
    """Unpatched, liger-kernel, liger under each backend; with ``compile`` also the first and the last
    compiled."""
    needs = ("liger_kernel", "triton")
    plain = [Contestant("transformers", "plain", lambda model: model)]
    ours = [
        Contestant(f"liger[{b}]", "ours", liger.patch, lambda b=b: liger.use_backend(b)) for b in backends
    ]
    if compile:
        plain.append(Contestant("transformers, compiled", "other", compiled))
        ours += [
            Contestant(f"{c.name}, compiled", "ours", lambda m: compiled(liger.patch(m)), c.context)
            for c in ours
        ]
    return [
        *plain,
        Contestant("liger-kernel", "liger-kernel", with_liger_kernel, needs=needs),
        *ours,
    ]


def of_small_batches(backends):
    """The ways of docs/recipes/small_batches.md beside the same ways without liger: all but the step as one
    graph, which :func:`captured` adds."""
    found = [c for c in contestants(backends, compile=True) if c.group != "liger-kernel"]
    plain = Contestant("transformers, reduce-overhead", "other", reduce_overhead)
    ours = [
        Contestant(
            f"liger[{b}], reduce-overhead",
            "ours",
            lambda model: reduce_overhead(liger.patch(model)),
            functools.partial(liger.use_backend, b),
        )
        for b in backends
    ]
    return [*found, plain, *ours]


def recomputing(backends):
    """liger under each backend, with a backward that recomputes cheap outputs."""
    patch = functools.partial(liger.patch, recompute=True)
    return [
        Contestant(f"liger[{b}], recompute", "ours", patch, functools.partial(liger.use_backend, b))
        for b in backends
    ]


def captured(entered):
    """The contestants of liger again, with CUDA graphs."""
    ours = (c for c in entered if c.group == "ours" and not re.search("compiled|overhead", c.name))
    return [replace(c, name=f"{c.name}, CUDA graph", captured=True) for c in ours]


def planned(backends, memories):
    """liger under each backend with planned checkpointing in each memory, and the same with
    ``recompute=True``.

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
            is_planned=memory is not None,
        )


def without_recipes(backends):
    """liger under each backend without one of the fused recipes of decoder layers, and without both.

    ``qk_norm_rope`` has no effect on attention without norms of queries and keys.
    """
    off = ("fused_add_rms_norm",), ("qk_norm_rope",), ("fused_add_rms_norm", "qk_norm_rope")
    for backend, recipes in itertools.product(backends, off):
        patch = functools.partial(liger.patch, **dict.fromkeys(recipes, False))
        name = f"liger[{backend}], without {' and '.join(recipes)}"
        yield Contestant(name, "ours", patch, functools.partial(liger.use_backend, backend))


def without_lora_layers(backends):
    """liger under each backend, with PEFT's code for the layers of LoRA."""
    patch = functools.partial(liger.patch, lora_linear=False)
    return [
        Contestant(f"liger[{b}], layers of PEFT", "ours", patch, functools.partial(liger.use_backend, b))
        for b in backends
    ]


def with_optimizers(entered, names):
    """Each contestant with each of these ``OPTIMIZERS``; steps that are CUDA graphs with AdamW alone."""
    made = []
    for name in names:
        addition, optimizer, needs = OPTIMIZERS[name]
        made += [
            replace(c, name=c.name + addition, optimizer=optimizer, needs=(*c.needs, *needs))
            for c in entered
            if name == "adamw" or not c.captured
        ]
    return made


def entered(
    size,
    backends,
    compile=False,
    memories=(),
    only=None,
    graphs=False,
    optimizers=("adamw",),
    recipes=False,
    small=False,
):
    """The contestants of these options. Raises ValueError for a name in ``only`` that none of them has."""
    found = of_small_batches(backends) if small else contestants(backends, compile)
    found += [] if size.checkpointing else recomputing(backends)
    found += captured(found) if graphs or small else []
    found += planned(backends, memories)
    found += without_recipes(backends) if recipes else []
    found += without_lora_layers(backends) if size.lora else []
    found = with_optimizers(found, optimizers)
    unknown = set(only or ()) - {contestant.name for contestant in found}
    if unknown:
        raise ValueError(f"no contestant {sorted(unknown)}, expected {[c.name for c in found]}")
    return [contestant for contestant in found if only is None or contestant.name in only]
