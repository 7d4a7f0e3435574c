# SPDX-License-Identifier: BSD-3-Clause
"""LoRA layers over 4-bit weights of bitsandbytes, whose forward casts its input and casts the result back:
one node each, with PEFT's dtypes, as exact as PEFT."""

import contextlib
import copy
import itertools

import pytest
import torch
from torch import nn

import liger

pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
bitsandbytes = pytest.importorskip("bitsandbytes")

from cases import assert_as_exact_as_torch  # noqa: E402
from test_lora_layers import adapted, draw_adapters, seeded_step  # noqa: E402
from test_lora_saved import in_four_bits  # noqa: E402
from tiny_models import batch, make  # noqa: E402

ROWS, INPUTS, OUTPUTS, RANK = 48, 64, 32, 4
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def nodes_of(result):
    """name -> how many nodes of ours a graph has."""
    found, seen, waiting = {}, set(), [result.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            found[node.name()] = found.get(node.name(), 0) + 1
            waiting += [following for following, _ in node.next_functions]
    return {name: found.get(name, 0) for name in ("_LinearsBackward", "_GatedLoraBackward")}


def within(autocast, device):
    return torch.autocast(device.type, autocast) if autocast else contextlib.nullcontext()


def quantised(base, compute_dtype, device):
    made = bitsandbytes.nn.Linear4bit(
        base.in_features, base.out_features, base.bias is not None, compute_dtype, quant_type="nf4"
    )
    made.weight = bitsandbytes.nn.Params4bit(base.weight.detach(), requires_grad=False, quant_type="nf4")
    if base.bias is not None:
        made.bias = nn.Parameter(base.bias.detach().clone(), requires_grad=False)
    return made.to(device)


def dense(layer):
    """A plain layer with the values of a 4-bit one, in float64."""
    weight = bitsandbytes.functional.dequantize_4bit(layer.weight, layer.weight.quant_state)
    made = nn.Linear(layer.in_features, layer.out_features, layer.bias is not None).double()
    made.weight.data = weight.double()
    if layer.bias is not None:
        made.bias.data = layer.bias.double()
    return made.to(weight.device).requires_grad_(False)


CASTS = [
    *((x, compute, None) for x, compute in itertools.product(DTYPES, DTYPES)),
    (torch.float32, torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.bfloat16, torch.bfloat16),
    (torch.float32, torch.float16, torch.float16),
]


@pytest.mark.parametrize("cast", [True, False], ids=["float32 adapters", "bfloat16 adapters"])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("x, compute, autocast", CASTS, ids=str)
def test_a_layer_is_as_exact_as_peft(x, compute, autocast, dropout, cast, device):
    plain = nn.Sequential(quantised(nn.Linear(INPUTS, OUTPUTS), compute, device))
    plain.is_loaded_in_4bit = True
    config = peft.LoraConfig(r=RANK, lora_alpha=6, target_modules=["0"], lora_dropout=dropout)
    plain = peft.get_peft_model(plain, config).train()
    layer = plain.base_model.model[0]
    factors = [layer.lora_A["default"], layer.lora_B["default"]]
    for factor in factors:
        values = torch.randn(factor.weight.shape, device=device) / factor.in_features**0.5
        factor.weight = nn.Parameter(values if cast else values.bfloat16())
    ours = liger.patch(copy.deepcopy(plain), verbose=False)
    x = torch.randn(1, ROWS, INPUTS, device=device).to(x)
    upstream, results = torch.randn(1, ROWS, OUTPUTS, device=device).to(x.dtype), []
    for model in (ours, plain):
        given, layer = x.clone().requires_grad_(), model.base_model.model[0]
        torch.manual_seed(3)
        with within(autocast, device):
            y = layer(given)
        if model is ours:
            assert nodes_of(y)["_LinearsBackward"] == 1
        factors = [layer.lora_A["default"].weight, layer.lora_B["default"].weight]
        results.append([y.detach(), *torch.autograd.grad(y, [given, *factors], upstream.to(y.dtype))])
    assert results[0][0].dtype == results[1][0].dtype
    torch.manual_seed(3)
    of_mask = x.dtype if autocast else factors[0].dtype
    mask = nn.functional.dropout(torch.ones(1, ROWS, INPUTS, dtype=of_mask, device=device), dropout) != 0
    a, b = (f.detach().double().requires_grad_() for f in factors)
    given = x.double().requires_grad_()
    kept = given * mask / (1 - dropout)
    y = dense(layer.base_layer)(given) + layer.scaling["default"] * (kept @ a.t() @ b.t())
    exact = [y.detach(), *torch.autograd.grad(y, [given, a, b], upstream.double())]
    for name, our, their, expected in zip(("y", "x", "A", "B"), *results, exact, strict=True):
        assert our.dtype == their.dtype
        assert_as_exact_as_torch(our, their, expected, name)


def prepared(prepare, patch, device, cast=True, **settings):
    """As in docs/recipes/lora.md: norms and embeddings in float32, 4-bit layers computed in bfloat16."""
    model = in_four_bits(make("llama", device, torch.bfloat16))
    if prepare:
        model = peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    model = adapted(model, cast=cast, **settings)
    return liger.patch(model, verbose=False) if patch else model


@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("autocast", [None, torch.bfloat16], ids=str)
@pytest.mark.parametrize("prepare", [True, False])
def test_a_prepared_model(prepare, autocast, dropout, device):
    errors = [[], []]
    ours, theirs = (prepared(prepare, patch, device, lora_dropout=dropout) for patch in (True, False))
    exact = copy.deepcopy(theirs).float()
    for module in exact.modules():
        if type(module) is bitsandbytes.nn.Linear4bit:
            module.compute_dtype = torch.float32
    for seed in range(2):
        torch.manual_seed(seed)
        draw_adapters(exact, ours, theirs)
        expected = seeded_step(exact)[1]
        for model, found in zip((ours, theirs), errors, strict=True):
            with within(autocast, device):
                grads = seeded_step(model)[1]
            found += [((grads[n].double() - g).norm() / g.norm()).item() for n, g in expected.items()]
    assert sum(errors[0]) <= 2 * sum(errors[1])
    with within(autocast, device):
        loss = ours(**batch(device)).loss
    # Per layer: q, k and v; o; the MLP.
    assert nodes_of(loss) == {"_LinearsBackward": 4, "_GatedLoraBackward": 2}


def test_adapters_under_another_autocast_run_the_code_of_peft(device):
    ours, theirs = (prepared(True, patch, device) for patch in (True, False))
    losses = []
    for model in (ours, theirs):
        with torch.autocast(device.type, torch.float16):
            losses.append(model(**batch(device)).loss)
    torch.testing.assert_close(*losses, rtol=1e-2, atol=0)
    assert not any(nodes_of(losses[0]).values())
