# SPDX-License-Identifier: BSD-3-Clause
"""Whole training steps of patched models in CUDA graphs: docs/guides/cuda_graphs.md."""

import re
from pathlib import Path

import pytest
import tiny_models
import torch
from cuda_graphs import capture

import liger
from liger.transformers.checkpointing import methods

pytestmark = pytest.mark.gpu

STEPS, WARM_UP = 4, 3


def _trained(family, checkpointing, recompute, batches, graphed):
    """(losses, parameters) after warm-up steps on the first batch and one step on each batch."""
    torch.manual_seed(0)
    model = tiny_models.make(family, "cuda", torch.bfloat16, attn_implementation="sdpa").train()
    if checkpointing:
        methods.enable(model, preserve_rng_state=False)
    liger.patch(model, recompute=recompute)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True, capturable=True)
    tokens = batches[0].clone()

    def step():
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    losses = []
    if graphed:
        graph, loss = capture(step, WARM_UP)
    else:
        for _ in range(WARM_UP):
            step()
    for batch in batches:
        tokens.copy_(batch)
        if graphed:
            graph.replay()
            losses.append(loss.clone())
        else:
            losses.append(step())
    return losses, [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("recompute", [False, True], ids=["", "recompute"])
@pytest.mark.parametrize("checkpointing", [False, True], ids=["", "checkpointing"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "Gemma2"])
def test_step_in_a_graph_is_the_eager_step(family, checkpointing, recompute):
    batches = [torch.randint(3, tiny_models.VOCAB, (2, 64), device="cuda") for _ in range(STEPS)]
    eager, captured = (
        _trained(family, checkpointing, recompute, batches, graphed) for graphed in (False, True)
    )
    torch.testing.assert_close(captured[0], eager[0], rtol=1e-3, atol=1e-3)
    for mine, other in zip(captured[1], eager[1], strict=True):
        torch.testing.assert_close(mine, other, rtol=2e-2, atol=4e-3)


def test_block_of_the_documents(monkeypatch):
    tiny_models.older_checkpointing_method(monkeypatch)
    page = (Path(__file__).parents[2] / "docs" / "guides" / "cuda_graphs.md").read_text()
    (block,) = (b for b in re.findall(r"```python\n(.*?)```", page, re.S) if "graph.replay()" in b)
    batches = [torch.randint(3, tiny_models.VOCAB, (2, 64), device="cuda") for _ in range(STEPS)]
    model = tiny_models.make("llama", "cuda", torch.bfloat16, attn_implementation="sdpa")
    names = {"torch": torch, "liger": liger, "model": model, "tokens": batches[0].clone()}
    names |= {"labels": batches[0].clone(), "loader": [{"input_ids": b, "labels": b} for b in batches]}
    exec(compile(block, "cuda_graphs.md", "exec"), names)
    methods.disable(model)
    with torch.no_grad():
        after = model(input_ids=batches[-1], labels=batches[-1], use_cache=False).loss
    assert after.isfinite() and after < names["loss"]


def test_reduce_overhead():
    """torch.compile with CUDA graphs of forward and backward."""
    batches = [torch.randint(3, tiny_models.VOCAB, (2, 64), device="cuda") for _ in range(STEPS)]
    losses = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = liger.patch(tiny_models.make("llama", "cuda", attn_implementation="sdpa").train())
        call = torch.compile(model, mode="reduce-overhead") if compiled else model
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses.append([])
        for batch in batches:
            torch.compiler.cudagraph_mark_step_begin()
            loss = call(input_ids=batch, labels=batch, use_cache=False).loss
            loss.backward()
            losses[-1].append(loss.detach().clone())
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    torch.testing.assert_close(*losses, rtol=1e-4, atol=1e-5)
