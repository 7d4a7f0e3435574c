# SPDX-License-Identifier: BSD-3-Clause
"""liger.transformers.checkpoint on the CPU: equal gradients, other packages, copies, its end, bad
arguments."""

import copy

import pytest
import torch

pytest.importorskip("transformers")

import tiny_models
from combinations import seeded_step
from planned_llama import FEWEST, MOST, PLENTY, calls_of_layers, kept, llama, measured, whole_layers
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    checkpoint_wrapper,
    offload_wrapper,
)
from trainer_runs import train

import liger
import liger.transformers as lt
from liger.transformers.checkpointing import decoder_layers, device_memory, methods
from liger.transformers.checkpointing.checkpoint import planners

pytestmark = pytest.mark.usefixtures(whole_layers.__name__)


@pytest.mark.parametrize("when", ["before the plan", "after it"])
def test_gradients_when_the_first_step_is_measured(when, capsys):
    """Its peak bounds no step that starts without gradients, which holds them later: that one is measured."""
    model, given = liger.patch(llama(), rope=False), tiny_models.batch()
    if when == "after it":
        lt.checkpoint(model, PLENTY)
    model(**given).loss.backward()
    # In the middle of the micro-batches of a step.
    liger.patch(model) if when == "after it" else lt.checkpoint(model, PLENTY)
    for _ in range(2):
        model(**given).loss.backward()
    (planner,) = planners(model)
    assert planner.kept == {True: MOST}
    seen = []
    for _ in range(2):
        capsys.readouterr()
        tiny_models.step(model, **given)
        seen.append((planner.kept[False], capsys.readouterr().err))
    assert [count for count, _ in seen] == [0, MOST]
    assert "at 22 tokens; peak not measured yet" in seen[0][1] and "peak at most" in seen[1][1]


def test_micro_batches_with_and_without_earlier_gradients_have_plans_of_their_own():
    model = lt.checkpoint(llama(), PLENTY)
    for _ in range(3):
        model.zero_grad()
        for tokens in (11, 8, 11):
            model(**tiny_models.batch(tokens=tokens)).loss.backward()
    assert planners(model)[0].kept == {False: MOST, True: MOST}


def test_none_restores_checkpointing():
    model = llama()
    methods.enable(model)
    theirs = vars(model.model.layers[1])["_gradient_checkpointing_func"]
    lt.checkpoint(model, PLENTY)
    lt.checkpoint(model, PLENTY)
    assert len(planners(model)) == 1
    lt.checkpoint(model, None)
    assert vars(model.model.layers[1])["_gradient_checkpointing_func"] is theirs
    assert model.is_gradient_checkpointing


@pytest.mark.parametrize("stepped", [False, True], ids=["before a step", "after a step"])
@pytest.mark.parametrize("turn", ["on", "on, reentrant", "off", "off and on"])
def test_none_keeps_what_came_after_the_plan(turn, stepped):
    model, expected = llama(), llama()
    if turn.startswith("off"):
        tiny_models.enable_checkpointing(model)
    lt.checkpoint(model, PLENTY)
    for _ in range(2 if stepped else 0):
        tiny_models.step(model, **tiny_models.batch())
    for each in (model, expected):
        if turn.startswith("off"):
            tiny_models.disable_checkpointing(each)
        if turn != "off":
            tiny_models.enable_checkpointing(each, reentrant="reentrant" in turn)
    if stepped:
        tiny_models.step(model, **tiny_models.batch())
    lt.checkpoint(model, None)
    for ours, theirs in zip(model.modules(), expected.modules(), strict=True):
        assert vars(ours).get("gradient_checkpointing") == vars(theirs).get("gradient_checkpointing")
        found, expected = (vars(m).get("_gradient_checkpointing_func") for m in (ours, theirs))
        # Each call makes a partial function of its own.
        assert getattr(found, "keywords", found) == getattr(expected, "keywords", expected)


def test_unpatch_ends_it_and_patch_does_not():
    model = llama()
    lt.checkpoint(model, PLENTY)
    liger.patch(model)
    liger.patch(model, rope=False)
    assert len(planners(model)) == 1
    liger.unpatch(model)
    assert planners(model) == [] and not model.is_gradient_checkpointing


def test_report(capsys):
    model = llama()
    assert lt.patch_report(model).checkpointing == ""
    lt.checkpoint(model, PLENTY)
    start = "all 4 LlamaDecoderLayer recomputed until a step has been measured"
    assert str(lt.patch_report(model)) == f"checkpointing: {start}"
    liger.patch(model, verbose=False)
    for _ in range(2):
        tiny_models.step(model, **tiny_models.batch())
    report = lt.patch_report(model)
    printed = capsys.readouterr().err
    assert printed == f"liger: checkpoint: {report.checkpointing}\n"
    assert report.checkpointing.startswith(
        f"{FEWEST} of 4 LlamaDecoderLayer recompute all, 0 keep attention, {MOST} keep all (0."
    )
    assert str(report).splitlines()[-1] == f"checkpointing: {report.checkpointing}"
    assert report.summary.endswith(f"; checkpointing: {report.checkpointing}")


@pytest.mark.parametrize("theirs", [False, True])
def test_trainer(theirs, tmp_path):
    """With the Trainer's own checkpointing, which it turns on at the start of training, and without."""
    expected = train(liger.patch(llama()), tmp_path)
    model = liger.patch(llama())
    lt.checkpoint(model, PLENTY)
    assert train(model, tmp_path, gradient_checkpointing=theirs) == expected
    assert sum(kept(model)) == MOST


def test_other_code_that_changes_the_layers():
    """Checkpointing turned off, or on with another function, between two steps."""
    full, layer = measured()
    model = lt.checkpoint(llama(), full + 2 * layer)
    for _ in range(3):
        tiny_models.step(model, **tiny_models.batch())
    calls = calls_of_layers(model)
    methods.disable(model)
    tiny_models.step(model, **tiny_models.batch())
    # A version that reads the flag before the planner sets it does not recompute the first layer.
    assert calls == [0, 1, 2, 3, 1, 0][: 6 - FEWEST]
    assert vars(model.model.layers[0])["_gradient_checkpointing_func"] is decoder_layers.recompute
    calls.clear()
    methods.enable(model, use_reentrant=True)
    theirs = vars(model.model.layers[0])["_gradient_checkpointing_func"]
    tiny_models.step(model, **tiny_models.batch())
    if FEWEST:
        calls.clear()
        theirs = decoder_layers.recompute
        tiny_models.step(model, **tiny_models.batch())
    assert calls == [0, 1, 2, 3, 1, 0]
    assert (
        vars(model.model.layers[0])["_gradient_checkpointing_func"] is theirs
        and kept(model)[2:] == [True] * 2
    )


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = torch.nn.Linear(8, 16), torch.nn.Linear(16, 8)
        self.calls = 0

    def forward(self, x, *, scale):
        self.calls += 1
        return x + self.outer(torch.nn.functional.gelu(self.inner(x * scale)))


class Stack(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList(Block() for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = block(x, scale=2.0)
        return x.sum()


def test_layers_that_are_none_of_transformers():
    model, x = Stack(), torch.randn(2, 5, 8)
    theirs, other = copy.deepcopy(model), copy.deepcopy(model)
    theirs(x).backward()
    lt.checkpoint(model, sum(p.nbytes for p in model.parameters()))
    model(x).backward()
    # The last of equal layers counts its activations in the first step and is not recomputed.
    assert [block.calls for block in model.blocks] == [2, 2, 1]
    model(x).backward()
    assert [block.calls for block in model.blocks] == [4, 4, 3]
    lt.checkpoint(model, PLENTY)
    for _ in range(3):
        model.zero_grad()
        model(x).backward()
        for ours, expected in zip(model.parameters(), theirs.parameters(), strict=True):
            assert torch.equal(ours.grad, expected.grad)
    assert all(kept(model)) and all(kept(copy.deepcopy(model)))
    lt.checkpoint(model, None)
    assert "forward" not in vars(model.blocks[0])
    assert vars(model.blocks[0]).keys() == vars(other.blocks[0]).keys()


def test_a_compiled_model_has_the_plan_that_it_had_before():
    model = llama()
    lt.checkpoint(model, PLENTY)
    for _ in range(3):
        eager = tiny_models.step(model, **tiny_models.batch())
    counts = []

    def backend(graph, example):
        counts.append(1)
        return graph

    compiled = torch.compile(model, backend=backend)
    ours = tiny_models.step(compiled, **tiny_models.batch())
    torch.testing.assert_close(ours[0]["loss"], eager[0]["loss"])
    assert sum(kept(model)) == MOST and counts


@pytest.mark.parametrize(
    "memory, error, message",
    [
        (True, TypeError, "memory must be an int, a float, 'auto' or None, not bool"),
        ([1], TypeError, "not list"),
        ("all", ValueError, "memory must be bytes, a share or 'auto', got 'all'"),
        (0, ValueError, "in bytes must be positive, got 0"),
        (0.0, ValueError, r"a share of the device in \(0, 1\], got 0.0"),
        (60e9, ValueError, "bytes are an int"),
        (float("nan"), ValueError, "got nan"),
    ],
)
def test_bad_memory(memory, error, message):
    with pytest.raises(error, match=f"liger.transformers.checkpoint: .*{message}"):
        lt.checkpoint(llama(), memory)


@pytest.mark.parametrize("memory", ["auto", 0.5])
def test_a_cpu_needs_bytes(memory, monkeypatch):
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="memory must be in bytes without a CUDA device"):
            lt.checkpoint(llama(), memory)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    model = lt.checkpoint(llama(), memory)
    with pytest.raises(ValueError, match="memory must be in bytes for a model on the CPU"):
        model(**tiny_models.batch())


def test_other_bad_arguments():
    with pytest.raises(
        TypeError, match=r"liger\.transformers\.checkpoint expects a torch\.nn\.Module, not int"
    ):
        lt.checkpoint(3, PLENTY)
    with pytest.raises(ValueError, match="Linear has no decoder layers; looked for"):
        lt.checkpoint(torch.nn.Linear(2, 2), PLENTY)
    for tokens, error in ((0, ValueError), (2.0, TypeError), (True, TypeError)):
        with pytest.raises(error, match=r"liger\.transformers\.checkpoint: tokens must be"):
            lt.checkpoint(llama(), PLENTY, tokens=tokens)
    with pytest.raises(TypeError, match="group must be a process group of this rank or None, not str"):
        lt.checkpoint(llama(), PLENTY, group="x")


@pytest.mark.parametrize(
    "given, words",
    [({"offload": True, "tokens": 7}, "offload=True, tokens=7"), ({"offload": False}, "offload=False")],
)
def test_arguments_without_a_plan(given, words):
    model = lt.checkpoint(llama(), PLENTY)
    with pytest.raises(ValueError, match=f"checkpoint: memory=None ends a plan, and {words} belongs to one"):
        lt.checkpoint(model, None, **given)
    assert planners(model)


def test_a_memory_below_the_parameters():
    model = llama()
    weights = sum(p.nbytes for p in model.parameters())
    lt.checkpoint(model, weights - 1)
    words = rf"liger\.transformers\.checkpoint: memory is {weights - 1} bytes, and the parameters of LlamaForCausalLM"
    for _ in range(2):
        with pytest.raises(ValueError, match=f"{words} on cpu alone take {weights} bytes"):
            model(**tiny_models.batch())
    lt.checkpoint(model, weights)
    tiny_models.step(model, **tiny_models.batch())


def test_parameters_that_are_elsewhere_or_shared():
    model = torch.nn.ModuleList(torch.nn.Linear(4, 4, bias=False) for _ in range(3))
    model[1].to("meta")
    model[2].weight = model[0].weight
    model[0].part = torch.nn.Parameter(model[0].weight.detach()[:2])
    cpu = torch.device("cpu")
    device_memory.check_parameters(64, model, cpu)
    with pytest.raises(
        ValueError, match="memory is 63 bytes, and the parameters of ModuleList on cpu alone take 64 bytes"
    ):
        device_memory.check_parameters(63, model, cpu)
    model[0].weight.untyped_storage().resize_(0)  # as FSDP and ZeRO-3 free gathered parameters
    device_memory.check_parameters(1, model, cpu)


@pytest.mark.parametrize("wrapper", [checkpoint_wrapper, offload_wrapper])
@pytest.mark.parametrize("part", ["LlamaDecoderLayer", "LlamaAttention"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_wrappers_of_torch(when, part, wrapper):
    """They would recompute or offload in every step, while the report says what the plan does."""
    model = llama()
    if when == "after":
        lt.checkpoint(model, PLENTY)
    apply_activation_checkpointing(model, wrapper, check_fn=lambda module: type(module).__name__ == part)
    name = {checkpoint_wrapper: "CheckpointWrapper", offload_wrapper: "OffloadWrapper"}[wrapper]
    words = (
        rf"liger\.transformers\.checkpoint: torch's {name} is around {part} .*; leave out apply_activation_"
    )
    for _ in range(2):
        with pytest.raises(ValueError, match=words):
            lt.checkpoint(model, PLENTY) if when == "before" else model(**tiny_models.batch())
    lt.checkpoint(model, None)
    model(**tiny_models.batch(), use_cache=False).loss.backward()


def test_wrappers_of_torch_elsewhere():
    model = llama()
    model.lm_head = checkpoint_wrapper(model.lm_head)
    lt.checkpoint(model, PLENTY)
    for _ in range(3):
        tiny_models.step(model, **tiny_models.batch())
    assert sum(kept(model)) == MOST


@pytest.mark.gpu
@pytest.mark.parametrize("layers", [0, 2, 8])
def test_peak_on_a_device(layers):
    """Room for some layers beyond the peak of full checkpointing."""

    def make():
        return liger.patch(
            tiny_models.make("llama", "cuda", num_hidden_layers=8, hidden_size=512, intermediate_size=2048,
                             max_position_embeddings=4096, attn_implementation="sdpa")
        )  # fmt: skip

    given = tiny_models.batch("cuda", tokens=2048)

    def peak(model):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        tiny_models.step(model, **given)
        return torch.cuda.max_memory_allocated()

    model = make()
    methods.enable(model)
    expected = seeded_step(model, given)
    peak(model)
    full = peak(model)
    lt.checkpoint(model, PLENTY * 1000)
    for _ in range(6):
        tiny_models.step(model, **given)
    (planner,) = planners(model)
    assert sum(kept(model)) == 8 - FEWEST
    limit = full + layers * planner.savings[-1].bytes
    lt.checkpoint(model, limit)
    for _ in range(8):
        tiny_models.step(model, **given)
    # A step that counts activations may need a little more than one that recomputes every layer, and
    # attention may have taken the room of one.
    assert sum(kept(model)) >= min(layers, 8 - FEWEST) - 2
    assert peak(model) <= limit
    tiny_models.assert_same_step(seeded_step(model, given), expected)
