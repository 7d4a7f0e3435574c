# SPDX-License-Identifier: BSD-3-Clause
"""Compiled attention without a mask, as docs/guides/patching.md says: by layers, and by an attention
function."""

import pytest
import torch

import liger

transformers = pytest.importorskip("transformers")

from tiny_models import assert_same_step, batch, enable_checkpointing, make, step, twin  # noqa: E402


def recorder(masks):
    """A backend that runs the graph as it is, and appends (has a mask, is causal) for each call of SDPA."""

    def backend(graph, _):
        for module in graph.modules():
            for node in getattr(module, "graph", torch.fx.Graph()).nodes:
                if node.target is torch.nn.functional.scaled_dot_product_attention:
                    masks.append((node.kwargs["attn_mask"] is not None, node.kwargs["is_causal"]))
        return graph

    return backend


@pytest.mark.parametrize("checkpointing", [False, True])
def test_compiled_layers(checkpointing):
    plain = make("llama", attn_implementation="sdpa")
    model = liger.patch(twin(plain))
    if checkpointing:
        enable_checkpointing(model)
    torch._dynamo.reset()
    masks = []
    for layer in model.model.layers:
        layer.compile(backend=recorder(masks), fullgraph=True)
    inputs = batch()
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    assert_same_step(step(model, **inputs, use_cache=False), step(plain, **inputs, use_cache=False))
    assert masks and set(masks) == {(False, True)}


@pytest.mark.parametrize("patched", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_an_attention_function_without_masks(patched):
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    plain = make("llama", attn_implementation="sdpa")
    model = liger.patch(twin(plain)) if patched else twin(plain)
    transformers.AttentionInterface.register("causal_sdpa", sdpa_attention_forward)
    model.set_attn_implementation("causal_sdpa")
    torch._dynamo.reset()
    masks = []
    compiled = torch.compile(model, backend=recorder(masks), fullgraph=True)
    output, _ = step(compiled, **batch(), use_cache=False)
    grads = {name: p.grad for name, p in model.named_parameters()}
    assert_same_step((output, grads), step(plain, **batch(), use_cache=False))
    assert masks and set(masks) == {(False, True)}
