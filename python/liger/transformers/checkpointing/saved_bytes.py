# SPDX-License-Identifier: BSD-3-Clause
"""Bytes per token that autograd saves in the decoder layers of a patched model, and FLOPs, from the modules
alone.

Counted are tensors that grow with the tokens. Assumed: every weight is trained, no autocast, no cache of keys
and values (``use_cache=False``), and an attention kernel that saves q, k, v, its output and the logarithms of
its sums (FlashAttention, SDPA without a mask). The rotary tables, which all layers share, are not counted.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel

from ..attention.qk_norm_rope import QKNormRopeRecipe
from ..mlp.experts import ExpertsRecipe
from ..mlp.recipe import MLPRecipe
from ..norms.norm import NormRecipe
from ..norms.residual import AddNormRecipe
from ..recipe import trials
from ..recipe.classes import recipe_of
from . import decoder_layers
from .layer_times import estimated

# Statistics of norms, sums of attention, probabilities of routers; indices of experts.
_FLOAT32, _INT64 = 4, 8
# The row of what an attention kernel saves beyond its inputs.
_KERNEL = "output, lse"
_PRODUCT = "their product"


@dataclass(frozen=True)
class Saved:
    """Bytes per token of one kind of tensor: in a patched model, and with ``recompute=True``."""

    part: str
    tensor: str
    plain: int
    recompute: int


def saved_in_layers(model: PreTrainedModel, dtype: torch.dtype) -> list[Saved]:
    """The rows of all decoder layers, added up by part and tensor, without the rows of a vision tower.

    Args:
        model: a patched model, on any device; the meta device needs no memory.
        dtype: of the activations.

    Raises:
        ValueError: a decoder layer of a form that is not known, or no decoder layer.
    """
    totals: dict[tuple[str, str], list[int]] = {}
    for rows in _layers(model, dtype):
        for row in rows:
            total = totals.setdefault((row.part, row.tensor), [0, 0])
            total[0] += row.plain
            total[1] += row.recompute
    return [Saved(part, tensor, *total) for (part, tensor), total in totals.items()]


def saved_with_adapters(rows: list[Saved]) -> int:
    """Bytes per token of rows of :func:`saved_in_layers` where LoRA layers train, which save no product of
    gate and up; without the narrow tensors of adapters."""
    return sum(row.plain for row in rows if row.tensor != _PRODUCT)


@dataclass(frozen=True)
class Recomputed:
    """Bytes per token of layers that are recomputed: what waits for the backward, and a layer at work.

    Attributes:
        count: of layers.
        inputs: of all layers.
        attention: what all attention kernels save beyond their inputs.
        passing_inputs, passing_attention: the parts of them that are on the device where they are offloaded.
        layer: the largest layer at work. With ``recompute=True`` it saves less, but the gradients of the
            rest exist then.
    """

    count: int
    inputs: int
    attention: int
    passing_inputs: int
    passing_attention: int
    layer: int


def recomputed_layers(model: PreTrainedModel, dtype: torch.dtype) -> Recomputed:
    """The same for :func:`liger.transformers.checkpoint`, see :func:`saved_in_layers`."""
    layers = _layers(model, dtype)
    one = model.config.get_text_config().hidden_size * dtype.itemsize
    attention = [sum(row.plain for row in rows if row.tensor == _KERNEL) for rows in layers]
    return Recomputed(
        len(layers),
        len(layers) * one,
        sum(attention),
        # One input stays, one leaves or comes back, and one is in use.
        min(len(layers), 3) * one,
        sum(sorted(attention)[-2:]),
        max(sum(row.plain for row in rows) for rows in layers),
    )


def forward_flops(model: PreTrainedModel, length: int) -> tuple[float, float]:
    """FLOPs per token of the forward of these layers: of linear layers and experts, and of causal attention
    over sequences of a length at the speed of GEMMs."""
    gemms = kernels = 0.0
    for layer in _counted(model):
        module = getattr(layer, recipe_of(layer).attention)
        window = min(getattr(module, "sliding_window", None) or length, length)
        # A token sees up to ``window`` tokens, the first ones see fewer.
        seen = window - window * window / (2 * length)
        whole, attention = estimated(layer, 1, 4 * seen * module.o_proj.in_features)
        gemms += whole - attention
        kernels += attention
    return gemms, kernels


def _counted(model):
    """The decoder layers of a form that is known."""
    return [m for m in _decoder(model).modules() if isinstance(recipe_of(m), AddNormRecipe)]


def _layers(model, dtype):
    """The rows of each decoder layer."""
    config = model.config.get_text_config()
    modules = _counted(model)
    if not modules:
        raise ValueError(
            f"no decoder layer of {type(model).__name__} has the form x + attention(norm(x)) followed by a norm and "
            "an MLP"
        )
    return [list(_layer(module, config, dtype.itemsize)) for module in modules]


def uncounted_layers(model: PreTrainedModel) -> Counter[str]:
    """Class names of the decoder layers of another form, which :func:`saved_in_layers` leaves out."""
    layers = decoder_layers.find(_decoder(model))
    return Counter(
        trials.original(layer).__name__
        for layer in layers
        if not any(isinstance(recipe_of(module), AddNormRecipe) for module in layer.modules())
    )


def _decoder(model):
    # Layers of a vision tower may have the same form, but other tokens and another configuration.
    # transformers 4.57 has no decoder for models of text alone.
    decoder = model.get_decoder()
    return model if decoder is None else decoder


def _layer(layer, config, size) -> Iterator[Saved]:
    recipe = recipe_of(layer)
    for name in (recipe.before, recipe.fused_norm, recipe.after_attention, recipe.after_mlp):
        if name is not None:
            width = config.hidden_size * size
            yield Saved("norms", "input, rstd", *[width + _FLOAT32] * 2)
            # A linear layer reads the outputs of these norms, an addition reads the outputs of the others.
            if name in (recipe.before, recipe.fused_norm):
                yield Saved("norms", "output", width, 0)
    yield from _attention(getattr(layer, recipe.attention), size)
    yield from _mlp(getattr(layer, recipe.mlp), config, size)


def _attention(module, size):
    o_proj, packed = getattr(module, "o_proj", None), getattr(module, "qkv_proj", None)
    separate = [getattr(module, f"{name}_proj", None) for name in "qkv"]
    known = isinstance(packed, nn.Linear) or all(isinstance(p, nn.Linear) for p in separate)
    if not isinstance(o_proj, nn.Linear) or not known:
        raise ValueError(f"{type(module).__name__} has other projections than q, k and v or qkv, and o")
    heads = o_proj.in_features // module.head_dim
    if packed is None:
        widths = {name: p.out_features * size for name, p in zip("qkv", separate, strict=True)}
    else:
        q = o_proj.in_features
        widths = {"q": q * size, "k": (packed.out_features - q) // 2 * size}
        # v is a view of the output of the projection.
        widths["v"] = packed.out_features * size
    norms = {name: getattr(module, f"{name}_norm", None) for name in "qk"}
    norms = {name: norm for name, norm in norms.items() if isinstance(recipe_of(norm), NormRecipe)}
    rotated = widths["q"] + widths["k"]
    yield Saved("attention", "q, k", rotated, 0 if len(norms) == 2 else rotated)
    yield Saved("attention", "v" if packed is None else "output of qkv_proj", *[widths["v"]] * 2)
    fused = isinstance(recipe_of(module), QKNormRopeRecipe)
    for name, norm in norms.items():
        per_head = norm.weight is not None and norm.weight.shape[0] == module.head_dim
        rows = widths[name] // (module.head_dim * size) if per_head else 1
        # The op of norms and rotation computes rstd again.
        rstd = 0 if fused else rows * _FLOAT32
        yield Saved(
            "attention", f"q, k before their norms{'' if fused else ', rstd'}", *[widths[name] + rstd] * 2
        )
    yield Saved("attention", _KERNEL, *[o_proj.in_features * size + heads * _FLOAT32] * 2)


def _mlp(module, config, size):
    experts = [m for m in module.modules() if isinstance(recipe_of(m), ExpertsRecipe)]
    gated = [m for m in module.modules() if isinstance(recipe_of(m), MLPRecipe)]
    if not experts and not gated:
        raise ValueError(f"{type(module).__name__} is no gated MLP that liger replaces")
    for part in gated:
        width = part.down_proj.in_features * size
        yield Saved("MLP", "gate, up", *[2 * width] * 2)
        yield Saved("MLP", _PRODUCT, width, 0)
    for part in experts:
        count, chosen = part.down_proj.shape[0], config.num_experts_per_tok
        width = part.down_proj.shape[1 if recipe_of(part).is_transposed else 2] * size
        yield Saved("experts", "gate, up of the chosen ones", *[2 * chosen * width] * 2)
        router = count * _FLOAT32 + chosen * (_INT64 + _FLOAT32)
        yield Saved("experts", "router (about)", router, router)
