# SPDX-License-Identifier: BSD-3-Clause
"""The code of docs/recipes/small_batches.md, on a CPU: with a stand-in of CUDA graphs, and compiled by
another backend."""

import re
from pathlib import Path

import pytest
import tiny_models
import torch
from test_graph_step import batches, given, stand_in  # noqa: F401 (a fixture)

import liger

PAGE = Path(__file__).parents[2] / "docs/recipes/small_batches.md"
ON_CPU = "use_cpu=True, per_device_train_batch_size=2, logging_steps=1"


def squared(outputs, labels, num_items_in_batch=None):
    """A loss of the user."""
    return outputs.logits.square().mean()


def trained_by(code, **arguments):
    """(losses, weights, the trainer) of a block of the page that trains by a Trainer."""
    transformers, made = pytest.importorskip("transformers"), []

    class Kept(transformers.Trainer):
        def __init__(self, **given):
            made.append(self)
            super().__init__(**given, **arguments)

    torch.manual_seed(0)
    model = tiny_models.make("llama", num_hidden_layers=1)
    data = [{"input_ids": row, "labels": row, "attention_mask": row > 0} for row in batches(1, 22, 8)[0]]
    names = {"liger": liger, "model": model, "data": data, "Trainer": Kept, "torch": torch}
    names["TrainingArguments"] = transformers.TrainingArguments
    exec(compile(code, PAGE.name, "exec"), names)
    (trainer,) = made
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return losses, [p.detach() for p in model.parameters()], trainer


def block_with(text):
    (block,) = (b for b in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S) if text in b)
    return block


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["of the model", "smoothed", "of the user"])
def test_trainer_of_the_documents(loss, tmp_path, monkeypatch):
    """Losses and weights are as without its ``training_step``, with two shapes and accumulation."""
    monkeypatch.chdir(tmp_path)
    block = block_with("class GraphTrainer")
    assert "bf16=True" in block
    smoothing = ", label_smoothing_factor=0.1" if loss == "smoothed" else ""
    block = block.replace("bf16=True", f"{ON_CPU}, gradient_accumulation_steps=2{smoothing}")
    arguments = {"compute_loss_func": squared} if loss == "of the user" else {}
    after = [
        trained_by(code, **arguments)
        for code in (block, block.replace("GraphTrainer(model", "Trainer(model"))
    ]
    assert hasattr(after[0][2], "graphed") == (loss == "of the model") and not hasattr(after[1][2], "graphed")
    assert after[0][2].state.global_step == 8 and len(after[0][0]) == 8
    torch.testing.assert_close(after[0][:2], after[1][:2])


@pytest.mark.slow
def test_compiled_trainer_of_the_documents(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    block = block_with("torch_compile=True").replace("bf16=True", ON_CPU)
    mode = 'torch_compile_mode="reduce-overhead"'
    assert mode in block
    compiled = block.replace(mode, 'torch_compile_backend="aot_eager"')
    plain = block.replace("torch_compile=True,", "").replace(f"{mode},", "")
    for name in ("BACKEND", "MODE"):  # which TrainingArguments set
        monkeypatch.setenv(f"ACCELERATE_DYNAMO_{name}", "")
        monkeypatch.delenv(f"ACCELERATE_DYNAMO_{name}")
    after, frames = [], []
    for code in (plain, compiled):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        after.append(trained_by(code))
        frames.append(torch._dynamo.utils.counters["frames"]["ok"])
    assert len(after[0][0]) == 8 and frames[0] == 0 < frames[1]
    torch.testing.assert_close(after[0][:2], after[1][:2])


@pytest.mark.slow
def test_compiled_loop_of_the_documents(monkeypatch):
    block, after, compile_ = block_with("cudagraph_mark_step_begin"), [], torch.compile
    for backend in ("aot_eager", "eager"):

        def compiled(model, mode, backend=backend, **given):
            assert mode == "reduce-overhead"
            return compile_(model, backend=backend, **given)

        monkeypatch.setattr(torch, "compile", compiled)
        torch._dynamo.reset()
        torch.manual_seed(0)
        loader = [given(tokens) for tokens in batches(3, 2, 8)]
        names = {"liger": liger, "model": tiny_models.make("llama").train(), "loader": loader, "torch": torch}
        exec(compile(block, PAGE.name, "exec"), names)
        after.append((names["losses"], [p.detach() for p in names["model"].parameters()]))
    assert len(after[0][0]) == 3
    torch.testing.assert_close(*after)
