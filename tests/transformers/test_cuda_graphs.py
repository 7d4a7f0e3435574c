# SPDX-License-Identifier: BSD-3-Clause
"""Whole training steps of patched models in CUDA graphs: docs/recipes/small_batches.md.

test_graph_step.py tests on the CPU what ``graph_step`` does around its graphs.
"""

import re
from pathlib import Path

import pytest
import tiny_models
import torch

import liger
from liger.transformers.checkpointing import methods

pytestmark = pytest.mark.gpu

STEPS = 7


def _trained(family, checkpointing, recompute, batches, graphed):
    """(losses, parameters) after a step on each batch."""
    torch.manual_seed(0)
    model = tiny_models.make(family, "cuda", torch.bfloat16, attn_implementation="sdpa").train()
    if checkpointing:
        methods.enable(model, preserve_rng_state=False)
    liger.patch(model, recompute=recompute)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    if graphed:
        step = liger.transformers.graph_step(model, optimizer, max_grad_norm=1.0)
    # After the learning rates have become tensors, as before.
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (1 + n))
    losses = []
    for batch in batches:
        if graphed:
            losses.append(step(input_ids=batch.cpu().pin_memory(), labels=batch))
        else:
            loss = model(input_ids=batch, labels=batch, use_cache=False).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            losses.append(loss.detach())
        scheduler.step()
    assert not graphed or next(iter(step.shapes.values())).replay is not None
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


def test_gradients_of_a_graph_accumulate():
    """Of two shapes, without an optimizer, and of the adapters alone."""
    peft = pytest.importorskip("peft")
    batches = [torch.randint(3, tiny_models.VOCAB, (2, 32 + 32 * (i % 2)), device="cuda") for i in range(12)]
    grads = []
    for graphed in (False, True):
        torch.manual_seed(0)
        model = tiny_models.make("llama", "cuda", attn_implementation="sdpa")
        model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules="all-linear"))
        liger.patch(model.train())
        step, grads_of = liger.transformers.graph_step(model) if graphed else None, []
        for index, batch in enumerate(batches):
            if graphed:
                step(input_ids=batch, labels=batch)
            else:
                model(input_ids=batch, labels=batch, use_cache=False).loss.backward()
            if index % 3 == 2:
                grads_of.append([p.grad.clone() for p in model.parameters() if p.requires_grad])
                model.zero_grad(set_to_none=index % 2 == 0)
        grads.append(grads_of)
    torch.testing.assert_close(grads[1], grads[0], rtol=1e-3, atol=1e-5)


def test_what_waits_for_the_device_is_not_captured():
    model = liger.patch(tiny_models.make("llama", "cuda", attn_implementation="sdpa").train())
    model.model.norm.register_forward_hook(lambda module, args, output: output.sum().item() and None)
    step = liger.transformers.graph_step(model)
    batch = torch.randint(3, tiny_models.VOCAB, (2, 32), device="cuda")
    for _ in range(3):
        step(input_ids=batch, labels=batch)
    with pytest.raises(RuntimeError, match="the step cannot be captured"):
        step(input_ids=batch, labels=batch)
    assert model(input_ids=batch, labels=batch).loss.isfinite()


def test_blocks_of_the_documents(tmp_path, monkeypatch):
    transformers = pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)  # Trainer would copy the model to all GPUs
    page = (Path(__file__).parents[2] / "docs" / "recipes" / "small_batches.md").read_text()
    own_loop, trainer = re.findall(r"```python\n(.*?)```", page, re.S)
    tokens = torch.randint(3, tiny_models.VOCAB, (2, 64)).repeat(8, 1)
    loader = [{"input_ids": b, "labels": b} for b in tokens.split(2)]
    data = [{"input_ids": row, "labels": row} for row in tokens]
    for block in (own_loop, trainer):
        model = tiny_models.make("llama", "cuda", attn_implementation="sdpa").train()
        names = {"torch": torch, "liger": liger, "model": model, "loader": loader, "data": data}
        names |= {"Trainer": transformers.Trainer, "TrainingArguments": transformers.TrainingArguments}
        with torch.no_grad():
            before = model(**{k: v.cuda() for k, v in loader[0].items()}, use_cache=False).loss
        exec(compile(block, "small_batches.md", "exec"), names)
        with torch.no_grad():
            after = model(**{k: v.cuda() for k, v in loader[0].items()}, use_cache=False).loss
        assert after < before


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
