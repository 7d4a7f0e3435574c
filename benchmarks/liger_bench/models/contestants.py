# SPDX-License-Identifier: BSD-3-Clause
"""Ways to train a model that are compared: how each prepares a model, and the context of its steps."""

import contextlib
import importlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.utils.checkpoint import checkpoint

import liger


def adamw(parameters, capturable=False):
    return torch.optim.AdamW(parameters, lr=1e-5, fused=True, capturable=capturable)


def in_backward(make):
    """``make`` with its steps in the backward."""

    def of_parameters(parameters, capturable=False):
        optimizer = make(parameters, capturable=capturable)
        liger.transformers.release_gradients(optimizer)
        return optimizer

    return of_parameters


@dataclass(frozen=True)
class Contestant:
    """``prepare(model)`` returns the callable of a step; ``context`` surrounds each step.

    ``optimizer(parameters, capturable=...)`` makes its optimizer.
    """

    prepare: Callable
    context: Callable = contextlib.nullcontext
    # Steps before the model is measured, at least: a plan needs some until it is final.
    warm_up: int = 1
    captured: bool = False
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


def with_inputs_on_host(model):
    """The layers of a model are recomputed, and their inputs wait in host memory: what ``offload=True`` of
    transformers does from 5.24 on."""

    def recomputed(function, *inputs, **settings):
        device = model.device.type
        with torch.autograd.graph.save_on_cpu(pin_memory=device == "cuda", device_type=device):
            return checkpoint(function, *inputs, use_reentrant=False, **settings)

    model._set_gradient_checkpointing(enable=True, gradient_checkpointing_func=recomputed)
    return model


def with_liger_kernel(model):
    """Patches a model by liger-kernel's function for its type, and returns it."""
    module = importlib.import_module("liger_kernel.transformers")
    inner = model.get_base_model() if hasattr(model, "peft_config") else model
    getattr(module, f"apply_liger_kernel_to_{model.config.model_type}")(model=inner)
    return model
