# SPDX-License-Identifier: BSD-3-Clause
"""What LoRA layers of a patched model save and compute, over plain and quantised weights."""

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

import liger

pytest.importorskip("transformers")
pytest.importorskip("peft")

from test_lora_groups import heads_of
from test_lora_layers import (
    HIDDEN,
    PER_LAYER,
    RANK,
    ROWS,
    WIDE,
    adapted,
    assert_same,
    fused,
    layer_of,
    pair,
    seeded_step,
    x_of,
)
from tiny_models import batch, enable_checkpointing, make

import liger.transformers as lt
from liger._core.modules.quantised import is_quantised


def saved_bytes(function, module):
    """Bytes of the tensors that autograd saves in a forward, each memory once, without parameters."""
    known = {p.untyped_storage().data_ptr() for p in module.parameters() if not is_quantised(p)}
    found = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            found[storage.data_ptr()] = storage
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        result = function()
    assert result.requires_grad
    return sum(storage.nbytes() for storage in found.values())


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("recompute", [False, True])
def test_an_mlp_saves_its_input_gate_and_up(recompute, dropout):
    ours, theirs = pair(
        dtype=torch.bfloat16, options={"recompute": recompute}, cast=False, lora_dropout=dropout
    )
    mlps, x = [layer_of(model).mlp for model in (ours, theirs)], x_of(torch.bfloat16)
    found, before = (saved_bytes(lambda m=m: m(x), m) for m in mlps)
    low = 2 * ROWS * 3 * RANK  # First products of three adapters.
    masks = ROWS * (2 * HIDDEN + WIDE) if dropout else 0
    assert found == 2 * ROWS * (HIDDEN + 2 * WIDE) + low + masks
    assert found < 0.75 * before


def test_q_k_and_v_save_their_input_once_and_no_copies():
    """Float32 adapters of a bfloat16 model: PEFT saves the input in float32 as well."""
    ours, theirs = pair(dtype=torch.bfloat16)
    x = x_of(torch.bfloat16)

    heads = [heads_of(model) for model in (ours, theirs)]
    found, before = (saved_bytes(lambda m=m: sum(t.sum() for t in m(x)), m) for m in heads)
    sums = 3 * 8  # Autograd keeps nothing of the sums but their shapes; the allowance is a few scalars.
    # The first products are float32.
    assert found <= 2 * ROWS * HIDDEN + 4 * ROWS * 3 * RANK + sums
    assert found < 0.8 * before


@pytest.mark.parametrize("cast", [True, False], ids=["float32 adapters", "bfloat16 adapters"])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("rank", [RANK, 256])
def test_few_tokens_save_no_more_than_with_the_layers_of_peft(rank, autocast, cast):
    found = []
    for options in ({}, {"lora_linear": False}):
        ours, _ = pair(dtype=torch.bfloat16, options=options, cast=cast, r=rank)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast, cache_enabled=False):
            found.append(saved_bytes(lambda model=ours: model(**batch()).loss, ours))
    assert found[0] < found[1]


class Products(TorchDispatchMode):
    """Counts the multiplications of GEMMs. FlopCounterMode has global hooks, which an MLP takes for the
    user's."""

    GEMMS = (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_)

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if op.overloadpacket in self.GEMMS:
            a, b = args[-2:]
            self.count += a.shape[0] * a.shape[1] * b.shape[1]
        return op(*args, **(kwargs or {}))


def products_of(function):
    with Products() as counter:
        function()
    return counter.count


def test_frozen_weights_take_no_gemm():
    ours, _ = pair()
    mlp, x = layer_of(ours).mlp, x_of(torch.float32)
    base, low = 3 * HIDDEN * WIDE, 3 * RANK * (HIDDEN + WIDE)
    # Forward and the gradient of the input; of the adapters also the gradients of both factors.
    assert products_of(lambda: mlp(x).sum().backward()) == ROWS * (2 * base + 3 * low)
    assert mlp.gate_proj.base_layer.weight.grad is None


class Conversions(TorchDispatchMode):
    """Counts the copies to float32 of tensors with so many elements."""

    def __init__(self, elements):
        super().__init__()
        self.elements, self.count = elements, 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if op is torch.ops.aten._to_copy.default and kwargs["dtype"] == torch.float32:
            self.count += args[0].numel() == self.elements
        return op(*args, **(kwargs or {}))


def test_each_gradient_is_converted_once():
    """Float32 adapters of a bfloat16 model: two products read the gradient of a result."""
    ours, _ = pair(dtype=torch.bfloat16)
    layer = layer_of(ours).mlp.up_proj
    y = layer(x_of(torch.bfloat16))
    with Conversions(y.numel()) as counter:
        y.backward(torch.randn_like(y))
    assert counter.count == 1


def test_checkpointing_does_not_repeat_down_proj():
    counts = []
    for options in ({}, {"swiglu": False, "lora_linear": False}):
        ours, _ = pair(options=options)
        enable_checkpointing(ours)
        counts.append(products_of(lambda model=ours: seeded_step(model)))
    # In two layers.
    assert counts[1] - counts[0] == 2 * batch()["input_ids"].numel() * HIDDEN * WIDE


def in_four_bits(model):
    """The model with layers of bitsandbytes in place of the linear layers of the decoder."""
    nn = pytest.importorskip("bitsandbytes").nn
    for module in list(model.model.layers.modules()):
        for name, child in list(module.named_children()):
            if type(child) is torch.nn.Linear:
                dtype, sizes = child.weight.dtype, (child.in_features, child.out_features)
                made = nn.Linear4bit(*sizes, bias=False, compute_dtype=dtype, quant_type="nf4")
                made.weight = nn.Params4bit(child.weight.detach(), requires_grad=False, quant_type="nf4")
                setattr(module, name, made.to(child.weight.device))
    model.is_loaded_in_4bit = True
    return model


def in_eight_bits(model):
    """The same with weights of torchao in int8."""
    quantization = pytest.importorskip("torchao.quantization")
    quantization.quantize_(model.model.layers, quantization.Int8WeightOnlyConfig())
    return model


@pytest.mark.parametrize("quantise", [in_four_bits, in_eight_bits])
@pytest.mark.filterwarnings("ignore:TorchaoLoraLinear was instantiated without")
def test_quantised_weights_are_not_saved(quantise, device):
    models = []
    for is_patched in (True, False):
        model = adapted(quantise(make("llama", device)))
        models.append(liger.patch(model, verbose=False) if is_patched else model)
    ours, theirs = models
    assert fused(ours) == 2 * PER_LAYER and lt.patch_report(ours).left == {}
    assert_same(ours, theirs)
    mlp, x = layer_of(ours).mlp, torch.randn(1, ROWS, HIDDEN, device=device).requires_grad_()
    assert saved_bytes(lambda: mlp(x), mlp) == 4 * ROWS * (HIDDEN + 2 * WIDE + 3 * RANK)
    assert type(mlp(x).grad_fn).__name__ == "_GatedLoraBackward"
