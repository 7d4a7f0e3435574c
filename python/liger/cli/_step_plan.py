# SPDX-License-Identifier: BSD-3-Clause
"""The peak and the time of a training step, by what its backward recomputes: from a model without memory."""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel

from liger_cli.devices import Gpu, Optimizer

from ..transformers.checkpointing import saved_bytes

# Adapters are float32, as PEFT makes them.
_ADAPTER = 4
# FLOPs of an attention kernel's backward, relative to its forward.
_ATTENTION_BACKWARD = 2.5
# Bytes that norms, rotations, products and additions of a step read and write, relative to what layers save:
# 6.4 MB per token of Llama-3.2-1B (docs/lab/model.md).
_TRAFFIC = 5.3


@dataclass(frozen=True)
class Way:
    """What the backward recomputes, and where the rest waits for it.

    Attributes:
        layers: how many layers recompute everything, everything but attention, and nothing; as a plan of
            :func:`liger.transformers.checkpoint` counts them.
        recompute: as ``liger.patch`` takes it, for layers that recompute nothing else.
        offload: inputs and attention of recomputed layers wait in host memory.
        released: as by :func:`liger.transformers.release_gradients`.
    """

    name: str
    layers: tuple[int, int, int]
    recompute: bool = False
    offload: bool = False
    released: bool = False


def ways(count: int, trains_weights: bool) -> list[Way]:
    """The ways in which all layers, ``count``, are alike."""
    full, attention, nothing = (count, 0, 0), (0, count, 0), (0, 0, count)
    result = [
        Way("nothing recomputed", nothing),
        Way("recompute=True", nothing, recompute=True),
        Way("checkpoint, attention kept", attention),
        Way("full checkpointing", full),
        Way("offload, attention kept", attention, offload=True),
        Way("offload", full, offload=True),
    ]
    if trains_weights:
        result.append(
            Way("offload, attention kept, released gradients", attention, offload=True, released=True)
        )
        result.append(Way("offload, released gradients", full, offload=True, released=True))
    return result


class Step:
    """A training step of a patched model: all its weights, or adapters on its linear layers.

    Args:
        model: on the meta device.
        dtype: of weights and activations.
        optimizer: one of ``liger_cli.devices``.
        rank: of the adapters, or None: all weights train.
        head_peak: bytes of the lm_head and its loss, for (tokens, hidden, vocab, dtype, is_trained).

    Attributes:
        weights, gradients, states: bytes, whatever the batch.
        layers: a :class:`~liger.transformers.checkpointing.saved_bytes.Recomputed`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        dtype: torch.dtype,
        optimizer: Optimizer,
        rank: int | None,
        head_peak: Callable[..., int],
    ):
        text, size = model.config.get_text_config(), dtype.itemsize
        self.model, self.trains_weights = model, rank is None
        rows = saved_bytes.saved_in_layers(model, dtype)
        self.layers = saved_bytes.recomputed_layers(model, dtype)
        self.head = text.hidden_size * text.vocab_size
        self.head_peak = functools.cache(
            lambda tokens: head_peak(tokens, text.hidden_size, text.vocab_size, dtype, rank is None)
        )
        count = sum(p.numel() for p in model.parameters())
        self.weights = count * size
        # Bytes per token that layers save where they recompute nothing, and with recompute=True.
        self.saved = sum(row.plain for row in rows)
        self.saved_recomputing = sum(row.recompute for row in rows)
        lookup, head = model.get_input_embeddings().weight, model.get_output_embeddings()
        of_head = getattr(head, "weight", None)
        self.is_tied = of_head is lookup
        if rank is None:
            self.adapters, trained, trained_size = 0, count, size
            self.of_head = self.head * size
            embedding = lookup.numel()
        else:
            linear = [m for m in model.modules() if isinstance(m, nn.Linear) and m is not head]
            self.adapters = rank * sum(m.in_features + m.out_features for m in linear)
            trained, trained_size = self.adapters, _ADAPTER
            self.of_head = embedding = 0
            self.weights += trained * trained_size
            narrow = len(linear) * rank * size
            self.saved = saved_bytes.saved_with_adapters(rows) + narrow
            self.saved_recomputing += narrow
        # Bytes of gradients: the largest one of a layer, and the one of the embedding.
        ends = (id(lookup), id(of_head))
        self.largest = size * max(p.numel() for p in model.parameters() if id(p) not in ends)
        self.of_embedding = size * embedding
        self.gradients = trained * trained_size
        if optimizer.size is None:
            state_bytes = trained_size * trained
        else:
            # The Trainer keeps the states of embeddings in float32.
            state_bytes = optimizer.size * (trained - embedding) + 4 * embedding
        self.states = round(optimizer.states * state_bytes)

    def kept(self, way: Way) -> tuple[int, int]:
        """Bytes per token that wait for the backward: on the device, and in host memory."""
        full, attention, nothing = way.layers
        layers, recomputed = self.layers, full + attention
        inputs = layers.inputs * recomputed // layers.count
        outputs = layers.attention * attention // layers.count
        saved = self.saved_recomputing if way.recompute else self.saved
        whole = saved * nothing // layers.count
        if not way.offload:
            return inputs + outputs + whole, 0
        # The last recomputed layer's stay.
        on_host = (
            layers.inputs * max(recomputed - 1, 0) + layers.attention * max(attention - 1, 0)
        ) // layers.count
        return min(inputs, layers.passing_inputs) + min(outputs, layers.passing_attention) + whole, on_host

    def peak(self, way: Way, tokens: int) -> int:
        """Bytes on the device."""
        nothing, count = way.layers[2], self.layers.count
        saved = (self.saved_recomputing if way.recompute else self.saved) // count
        layer = self.layers.layer
        kept = self.kept(way)[0]
        # The gradients of the layers come one by one; the lm_head's exists from its loss on, and where its
        # weight is tied it is complete at the end.
        of_head = self.of_head if self.is_tied or not way.released else 0
        of_layers = self.largest if way.released else self.gradients - of_head
        first = layer - saved if nothing else layer
        # The start of the backward, the first recomputed layer, the first layer of all, the embedding.
        moments = [
            kept * tokens + max(self.head_peak(tokens), of_head + first * tokens),
            (kept - saved * nothing + layer) * tokens + of_head + of_layers * nothing // count,
            layer * tokens + of_head + of_layers,
            self.of_embedding,
        ]
        return self.weights + self.states + max(moments)

    def largest_batch(self, way: Way, length: int, memory: int) -> int:
        """Sequences of a length, or 0 where not even one fits."""

        def fits(batch):
            return self.peak(way, batch * length) <= memory

        if not fits(1):
            return 0
        fitting = 1
        while fits(2 * fitting):
            fitting *= 2
        step = fitting
        while step := step // 2:
            fitting += step * fits(fitting + step)
        return fitting

    def seconds(self, way: Way, tokens: int, length: int, gpu: Gpu) -> float:
        """About the time that a GPU needs where the host keeps up with it."""
        full, attention, _ = way.layers
        # Passes over the weights and over attention, in units of a forward.
        again, attention_again = (full + attention) / self.layers.count, full / self.layers.count
        gemms, kernels = saved_bytes.forward_flops(self.model, length)
        flops = gemms * (2 + self.trains_weights + again)
        flops += kernels * (1 + _ATTENTION_BACKWARD + attention_again)
        flops += 2 * self.adapters * (3 + again) + 2 * self.head * (2 + self.trains_weights)
        # Weights, gradients and states are read, weights and states are written.
        moved = 3 * self.gradients + 2 * self.states + _TRAFFIC * self.saved * tokens
        return flops * tokens / gpu.flops + moved / gpu.bandwidth
