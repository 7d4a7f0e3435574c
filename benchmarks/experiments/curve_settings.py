# SPDX-License-Identifier: BSD-3-Clause
"""The settings of liger whose loss curves E13 compares: how each prepares a model and makes its training
steps.

The steps of a setting are ``steps(model, batches, machine)``, which trains the model on every batch and
returns the losses.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

import liger
from liger.cli._demo_worker import nudge
from liger.transformers.checkpointing import methods
from liger_bench.devices import on_ranks
from liger_bench.models.contestants import with_liger_kernel

from . import sharded_training

LEARNING_RATE = 3e-4
MICRO_BATCHES = 4
# Planned checkpointing has this much of the peak with full checkpointing.
ROOM = 1.15


def optimizer_of(parameters, **options):
    return torch.optim.AdamW(parameters, lr=LEARNING_RATE, fused=True, **options)


def training_step(model, optimizer):
    """A function of token ids that makes one training step and returns the loss."""

    def step(tokens):
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def eager(model, batches, machine):
    step = training_step(model, optimizer_of(model.parameters()))
    return [step(tokens) for tokens in batches]


def full_checkpointing(model, batches, machine):
    methods.enable(model)
    return eager(model, batches, machine)


def _full_peak(step, batches):
    """Losses and peak bytes of the second of two steps: the first one allocates the states of the
    optimizer."""
    losses = [step(batches[0])]
    torch.cuda.reset_peak_memory_stats()
    losses.append(step(batches[1]))
    return losses, torch.cuda.max_memory_allocated()


def planned_checkpointing(model, batches, machine):
    """Two steps with full checkpointing, then a plan for ``ROOM`` times their peak."""
    methods.enable(model)
    step = training_step(model, optimizer_of(model.parameters()))
    if machine.gpu:
        losses, peak = _full_peak(step, batches)
        room = int(ROOM * peak)
    else:
        # A CPU has no statistics: there a plan counts parameters, gradients and the activations of layers.
        losses = [step(tokens) for tokens in batches[:2]]
        room = 4 * sum(p.nbytes for p in model.parameters())
    liger.transformers.checkpoint(model, room)
    return losses + [step(tokens) for tokens in batches[2:]]


def step_in_backward(model, batches, machine):
    optimizer = optimizer_of(model.parameters())
    liger.transformers.release_gradients(optimizer)
    step = training_step(model, optimizer)
    return [step(tokens) for tokens in batches]


def main_grad(model, batches, machine):
    """Micro-batches, whose gradients of the lm_head's weight are added in float32."""
    weight = model.get_output_embeddings().weight
    weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)
    optimizer = optimizer_of(model.parameters())
    losses = []
    for tokens in batches:
        count = tokens[:, 1:].numel()
        total = torch.zeros((), device=tokens.device)
        for part in tokens.chunk(MICRO_BATCHES):
            loss = model(input_ids=part, labels=part, num_items_in_batch=count).loss
            loss.backward()
            total += loss.detach()
        weight.grad = weight.main_grad.to(weight.dtype)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        weight.main_grad.zero_()
        losses.append(total)
    return losses


def compiled(model, batches, machine):
    # Inductor takes half a minute on a CPU.
    backend = "inductor" if machine.gpu else "eager"
    step = training_step(
        torch.compile(model, dynamic=False, backend=backend), optimizer_of(model.parameters())
    )
    return [step(tokens) for tokens in batches]


def captured(model, batches, machine):
    """The whole step as one CUDA graph, after some steps without."""
    step = liger.transformers.graph_step(model, optimizer_of(model.parameters()))
    return [step(input_ids=tokens, labels=tokens) for tokens in batches]


def fsdp2(model, batches, machine):
    """Each rank has its part of every batch; the losses are over the whole batch."""
    sharded_training.start(machine)
    on_ranks.shard(model, machine.device)
    step = training_step(model, optimizer_of(model.parameters()))
    losses = torch.stack([step(tokens.chunk(dist.get_world_size())[dist.get_rank()]) for tokens in batches])
    dist.all_reduce(losses)
    losses /= dist.get_world_size()
    dist.destroy_process_group()
    return list(losses)


@dataclass(frozen=True)
class Setting:
    """``patch(model)`` changes the model in place before its first step."""

    name: str
    patch: Callable
    steps: Callable = eager
    dtype: str = "bfloat16"
    families: tuple[str, ...] = ("llama", "qwen3")
    needs: tuple[str, ...] = ()
    gpus: int = 1
    seconds: float = 120.0
    needs_gpu: bool = False
    ours: bool = True


def _unchanged(model):
    return model


def _patched(**options):
    return functools.partial(liger.patch, **options)


REFERENCE, UNPATCHED, NUDGED = "transformers, float32", "transformers", "nudged"
LLAMA, QWEN3 = ("llama",), ("qwen3",)
SETTINGS = (
    Setting(UNPATCHED, _unchanged, ours=False),
    Setting(REFERENCE, _unchanged, dtype="float32", ours=False),
    Setting(NUDGED, nudge, ours=False),
    Setting("liger", _patched()),
    Setting("liger, recompute", _patched(recompute=True), families=LLAMA),
    Setting("liger, without qk_norm_rope", _patched(qk_norm_rope=False), families=QWEN3),
    Setting("liger, without fused_add_rms_norm", _patched(fused_add_rms_norm=False), families=QWEN3),
    Setting("liger, full checkpointing", _patched(), full_checkpointing, families=LLAMA),
    Setting("liger, planned checkpointing", _patched(), planned_checkpointing, families=LLAMA),
    Setting("liger, tiled MLP", _patched(tiled_mlp=True, tiled_mlp_num_shards=4), families=LLAMA),
    Setting("liger, step in backward", _patched(), step_in_backward, families=LLAMA),
    Setting("liger, main_grad", _patched(accumulate_grad_weight=True), main_grad, families=LLAMA),
    Setting("liger, CUDA graph", _patched(), captured, families=LLAMA, needs_gpu=True),
    Setting(
        "liger-kernel", with_liger_kernel, families=LLAMA, needs=("liger_kernel", "triton"), ours=False
    ),
    Setting("liger, compiled", _patched(), compiled, families=LLAMA, seconds=240.0),
    Setting("liger, FSDP2", _patched(), fsdp2, families=LLAMA, gpus=2),
)  # fmt: skip
