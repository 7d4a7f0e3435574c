"""torch.compile of a patched model whose graph breaks somewhere inside: losses and gradients of the unpatched model."""

import itertools

import pytest
import torch

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


QUICK = {("mlp", False, False), ("head", True, True)}
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
