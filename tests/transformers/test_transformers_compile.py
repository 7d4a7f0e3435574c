# SPDX-License-Identifier: BSD-3-Clause
"""torch.compile of a patched model whose graph breaks somewhere inside: losses and gradients of the unpatched
model."""

import itertools

import pytest
import torch
from traced_calls import skip_if_graph_breaks_lose_fields

import liger

transformers = pytest.importorskip("transformers")

from tiny_models import assert_same_step, batch, enable_checkpointing, make, step, twin  # noqa: E402

BROKEN = {
    "mlp": "model.layers.0.mlp",
    "attention": "model.layers.0.self_attn",
    "head": "lm_head",
    "last norm": "model.norm",
    "embedding": "model.embed_tokens",
}


def break_around(module):
    """The graph ends before and after this module."""
    forward = module.forward

    def broken(*args, **kwargs):
        torch._dynamo.graph_break()
        result = forward(*args, **kwargs)
        torch._dynamo.graph_break()
        return result

    module.forward = broken


QUICK = {("head", True, True)}
CASES = [
    pytest.param(*case, marks=[] if case in QUICK else pytest.mark.slow)
    for case in itertools.product(BROKEN, (False, True), (False, True))
]


@pytest.mark.parametrize(("where", "tied", "checkpointing"), CASES)
def test_a_graph_that_breaks(where, tied, checkpointing):
    plain = make("llama", tie_word_embeddings=tied, num_hidden_layers=1)
    model = liger.patch(twin(plain))
    if checkpointing:
        enable_checkpointing(model)
    break_around(model.get_submodule(BROKEN[where]))
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager")
    output, _ = step(compiled, **batch(), use_cache=False)
    grads = {name: p.grad for name, p in model.named_parameters()}
    assert_same_step((output, grads), step(plain, **batch(), use_cache=False))
    assert output.logits is None


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_a_gradient_added_to_its_sum(tied):
    skip_if_graph_breaks_lose_fields()
    """accumulate_grad_weight breaks the graph: the lm_head, and an embedding tied to it, run uncompiled."""
    model = liger.patch(
        make("llama", tie_word_embeddings=tied, num_hidden_layers=1), accumulate_grad_weight=True
    )
    weight = model.lm_head.weight
    torch._dynamo.reset()
    runs = []
    for call in (model, torch.compile(model, backend="aot_eager")):
        weight.main_grad = torch.zeros_like(weight)
        output, grads = step(call, **batch(), use_cache=False)
        assert weight.grad is None
        runs.append([output.loss.detach(), weight.main_grad, *grads.values()])
    for compiled, eager in zip(*reversed(runs), strict=True):
        torch.testing.assert_close(compiled, eager, rtol=1e-4, atol=1e-6)


# Not monkeypatch, which deletes the option at the end.
@torch._dynamo.config.patch(recompile_limit=1)
def test_patched_classes_share_no_limit_of_recompilations():
    """Each class may be compiled as often as torch compiles one function."""
    torch._dynamo.reset()
    for family in ("llama", "qwen2"):
        model = liger.patch(make(family, num_hidden_layers=1))
        output = torch.compile(model, fullgraph=True, backend="eager")(**batch(), use_cache=False)
        assert output.logits is None
