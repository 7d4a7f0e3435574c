# SPDX-License-Identifier: BSD-3-Clause
"""liger.transformers.checkpoint(offload=...) with compiled code, entries and functions of other packages, by
its own choice, and with bad arguments."""

import functools

import pytest
import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

pytest.importorskip("transformers")

import tiny_models
from planned_llama import (
    FEWEST,
    LAYERS,
    PLENTY,
    assert_bits,
    calls_of_layers,
    kept,
    llama,
    measured,
    result_of,
    whole_layers,
)
from test_offload import INPUT, allow, planned, small_tensors_move  # noqa: F401  a fixture
from trainer_runs import train

import liger
import liger.transformers as lt
from liger.transformers.checkpointing import device_memory, methods
from liger.transformers.checkpointing.checkpoint import planners


@pytest.mark.skipif(not hasattr(torch.nn.Module, "compile"), reason="needs torch.compile")
@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("what", [pytest.param("model", marks=pytest.mark.slow), "layers"])
def test_compiled_code_recomputes_and_moves_nothing(what, steps):
    # Other tests may have compiled these layers as often as torch.compile allows.
    torch._dynamo.reset()
    model, expected = llama(), llama()
    planner = planned(model)
    allow(planner, 1)
    for _ in range(steps):
        tiny_models.step(model, **tiny_models.batch())
    if what == "model":
        compiled = torch.compile(model, backend="aot_eager")
    else:
        compiled = model
        for layer in model.model.layers:
            layer.compile(backend="aot_eager")
    before = planner.store.last
    assert ("offloaded" in planner.summary) and "compiled" not in planner.summary
    ours, theirs = (tiny_models.step(m, **tiny_models.batch()) for m in (compiled, expected))
    tiny_models.assert_same_step(
        (ours[0], {n.removeprefix("_orig_mod."): g for n, g in ours[1].items()}), theirs
    )
    assert planner.store.last == before
    words = "; compiled code runs with this plan and offloads nothing"
    assert planner.summary.endswith(words) and "offloaded" not in planner.summary
    # The code that torch.compile has made of the first forward sets this again.
    planner.is_compiled = False
    tiny_models.step(compiled, **tiny_models.batch())
    assert planner.is_compiled
    if what == "model":
        tiny_models.step(model, **tiny_models.batch())
        assert "compiled" not in planner.summary


has_offload = pytest.mark.skipif(
    not hasattr(tiny_models.transformers.PreTrainedModel, "activation_checkpointing_enable"),
    reason="activation_checkpointing_enable came with transformers 5.24",
)


@has_offload
@pytest.mark.parametrize("when", ["before", "after", "after a step"])
def test_offload_of_transformers_turns_it_on(when):
    model, expected = llama(), llama()

    def ask():
        model.activation_checkpointing_enable({"use_reentrant": False}, offload=True)

    if when == "before":
        ask()
    planner = planned(model, None)
    if when == "after a step":
        tiny_models.step(model, **tiny_models.batch())
        assert not planner.store.is_on and planner.store.moved == 0
    if when != "before":
        ask()
    for allowed in (0, 0, 1):
        allow(planner, allowed)
        ours, theirs = (tiny_models.step(m, **tiny_models.batch()) for m in (model, expected))
        assert_bits(ours, theirs)
    assert planner.store.moved == 2 * INPUT and "offloaded to" in planner.summary
    if when == "before":
        lt.checkpoint(model, None)
        found = vars(model.model.layers[0])["_gradient_checkpointing_func"]
        assert "checkpoint_func" in found.func.__qualname__


@has_offload
def test_offload_false_turns_it_off():
    model = llama()
    model.activation_checkpointing_enable(offload=True)
    planner = planned(model, False)
    tiny_models.step(model, **tiny_models.batch())
    assert planner.store.moved == 0 and not planner.store.is_on


@has_offload
@pytest.mark.usefixtures(whole_layers.__name__)
@pytest.mark.parametrize("offloaded", [False, True])
@pytest.mark.parametrize("when", ["before", "after", "after some steps"])
@pytest.mark.parametrize("count", [0, 1, 2])
def test_every_n_layers(count, when, offloaded):
    """The layers that it leaves out are never recomputed; of the others a plan keeps what fits."""
    full, layer = measured()
    full -= (LAYERS - 1) * INPUT if offloaded else 0
    model, expected = llama(), llama()
    if when == "before":
        model.activation_checkpointing_enable(every_n_layers=2)
    lt.checkpoint(model, full + (2 + count) * (layer + offloaded * INPUT), offload=offloaded)
    if when == "after some steps":
        for _ in range(3):
            tiny_models.step(model, **tiny_models.batch())
    if when != "before":
        model.activation_checkpointing_enable(every_n_layers=2)
    for number in range(4):
        calls = calls_of_layers(model) if number == 3 else []
        assert_bits(*(tiny_models.step(m, **tiny_models.batch()) for m in (model, expected)))
        if number == 0:
            assert kept(model)[1::2] == [True, True] and not kept(model)[0]
    assert kept(model) == [count == 2, True, count > 0, True]
    assert calls == [0, 1, 2, 3, *[n for n in (2, 0) if not kept(model)[n]]]
    report = lt.patch_report(model).checkpointing
    assert report.startswith(
        f"{2 - count} of 4 LlamaDecoderLayer recompute all, 0 keep attention, {2 + count} keep all ("
    )
    assert report.endswith("; every_n_layers leaves out 2 layers, which keep all")
    assert "too small" not in report


@has_offload
def test_every_n_layers_that_does_not_fit(capsys):
    model = llama()
    model.activation_checkpointing_enable(every_n_layers=2)
    full, layer = measured()
    lt.checkpoint(model, full + layer)
    for _ in range(3):
        tiny_models.step(model, **tiny_models.batch())
    assert kept(model) == [False, True, False, True]
    words = "; the memory is too small for 2 layers that keep all, offload=True needs less"
    assert words in lt.patch_report(model).checkpointing and words in capsys.readouterr().err


@has_offload
def test_every_n_layers_of_a_trainer(tmp_path):
    settings = {"activation_checkpointing": True, "activation_checkpointing_kwargs": {"every_n_layers": 2}}
    expected = train(liger.patch(llama()), tmp_path, **settings)
    model = lt.checkpoint(liger.patch(llama()), measured()[0])
    assert train(model, tmp_path, **settings) == expected
    assert kept(model) == [False, True, False, True]


@has_offload
def test_every_n_layers_that_differ():
    """A kind of layers without any that a plan may choose counts on the device, where it keeps everything."""
    model, other = llama(), llama()
    for each in (model, other):
        liger.patch(each.model.layers[1::2], verbose=False)
    model.activation_checkpointing_enable(every_n_layers=2)
    planner = planned(model, False)
    for level in (0, 0, 1):
        allow(planner, level)
        assert_bits(*(tiny_models.step(m, **tiny_models.batch()) for m in (model, other)))
        if planner.plan is None:
            assert sorted(probe.stays for probe in planner.probes.values()) == [False, True]
    assert planner.plan.states[0] == (0, 2, 0, 2)


@has_offload
@pytest.mark.parametrize("choice", [None, True])
def test_settings_that_are_taken_back(choice):
    """The host memory of the entry is given up, the host memory of offload=True stays."""
    model, expected = llama(), llama()
    planner = planned(model, choice)
    for settings in ({}, {"offload": True}, {"offload": True, "every_n_layers": 2}, {}):
        model.activation_checkpointing_enable(**settings)
        for _ in range(3):
            ours, theirs = (tiny_models.step(m, **tiny_models.batch()) for m in (model, expected))
            assert_bits(ours, theirs)
        assert planner.store.is_on == bool(choice or settings.get("offload"))
        assert ("every_n_layers" in planner.summary) == ("every_n_layers" in settings)
        assert ("offloaded to" in planner.summary) == planner.store.is_on
    assert choice or planner.store.pool is None


@has_offload
def test_taken_back_between_two_forwards_of_a_step():
    models = [llama(), llama()]
    planner = planned(models[0], None)
    models[0].activation_checkpointing_enable(offload=True)
    results = []
    for model in models:
        first = model(**tiny_models.batch()).loss
        if model is models[0]:
            assert planner.store.moved
            model.activation_checkpointing_enable()
        loss = first - 0.5 * model(**tiny_models.batch(tokens=7)).loss
        assert not planner.store.moved
        loss.backward()
        results.append(result_of(model, loss.detach()))
    assert_bits(*results)


@has_offload
def test_trainer_that_asks_for_it(tmp_path):
    expected = train(liger.patch(llama()), tmp_path)
    model = liger.patch(llama())
    planner = planned(model, None)
    settings = {"activation_checkpointing": True, "activation_checkpointing_kwargs": {"offload": True}}
    allow(planner, 1)
    assert train(model, tmp_path, **settings) == expected
    assert planner.store.is_on and planner.store.most == 3 * planner.longest[0] * 64 * 4


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_function_of_the_user(reentrant):
    if reentrant and FEWEST:
        pytest.skip("this version replaces reentrant checkpoints")
    models = [llama(), llama()]
    methods.enable(models[0], use_reentrant=reentrant)
    planner = planned(models[0])
    allow(planner, 1)
    for _ in range(3):
        assert_bits(*(tiny_models.step(model, **tiny_models.batch()) for model in models))
    assert planner.store.moved == 2 * INPUT


def test_selective_checkpointing():
    """A policy of the user decides what a layer saves, and its inputs go to the host."""

    def policy(context, op, *args, **kwargs):
        is_saved = str(op).startswith(("aten.mm", "aten.addmm"))
        return CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.PREFER_RECOMPUTE

    models = [llama(), llama()]
    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    methods.enable(models[0], context_fn=contexts)
    planner = planned(models[0])
    for _ in range(2):
        allow(planner, 0)
        assert_bits(*(tiny_models.step(model, **tiny_models.batch()) for model in models))
    assert planner.store.moved == 3 * INPUT


class Meter:
    """A device whose memory a test sets: 1000 bytes at the start of a step, 2000 at its peak."""

    exact, limit, allocated, retries, ooms = False, 10**9, 1000, 0, 0

    def __init__(self, *_):
        pass

    def read(self):
        return self.allocated, self.retries, self.ooms

    def start(self):
        pass

    note = start

    def peak(self, counted):
        return 2000


REASONS = {
    "out of memory": ({"ooms": 1}, "a step ran out of memory"),
    "retries": ({"retries": 1}, "a step needed memory of the allocator's cache"),
    "peak": ({"limit": 1999}, "a step of 22 tokens does not fit with full checkpointing"),
    "start": ({"allocated": 10**9}, "a step of 22 tokens does not fit with full checkpointing"),
}


def auto_on(meter, model, monkeypatch, **options):
    """The planner of memory="auto" on a device with this meter."""
    monkeypatch.setattr(device_memory, "CountedMemory", lambda *_: meter)
    with monkeypatch.context() as patched:
        patched.setattr(torch.cuda, "is_available", lambda: True)
        lt.checkpoint(model, "auto", **options)
    return planners(model)[0]


def test_auto_takes_the_step_that_counts_for_a_bound(monkeypatch):
    """It needs 2000 bytes, all others 1500, and 1900 are there."""
    meter, model = Meter(), llama()
    meter.limit = 1900
    planner = auto_on(meter, model, monkeypatch)
    monkeypatch.setattr(meter, "peak", lambda counted: 2000 if planner.plan is None else 1500, raising=False)
    allow(planner, 0)
    for _ in range(4):
        tiny_models.step(model, **tiny_models.batch())
    assert not planner.store.is_on and "too small" not in planner.summary
    assert planner.plan.need(False, 0, planner.longest) == 500


@pytest.mark.parametrize("choice", [None, False])
@pytest.mark.parametrize("reason", REASONS)
def test_auto_turns_it_on_when_it_must(reason, choice, monkeypatch, capsys):
    """Under memory="auto", and without a choice of the user."""
    meter, model, expected = Meter(), llama(), llama()
    planner = auto_on(meter, model, monkeypatch, offload=choice)
    allow(planner, 0)
    changes, words = REASONS[reason]
    for number in range(6):
        if number == 3:
            assert not planner.store.is_on and not planner.store.moved
            vars(meter).update(changes)
        assert_bits(*(tiny_models.step(m, **tiny_models.batch()) for m in (model, expected)))
    assert (planner.store.moved > 0) == planner.store.is_on == (choice is None)
    printed = capsys.readouterr().err
    assert (f"{words}: inputs of layers are offloaded from now on" in printed) == (choice is None)


def test_a_longer_step_turns_it_on_before_it_runs(monkeypatch):
    meter = Meter()
    monkeypatch.setattr(device_memory, "CountedMemory", lambda *_: meter)
    model = llama(attn_implementation="sdpa")
    with monkeypatch.context() as patched:
        patched.setattr(torch.cuda, "is_available", lambda: True)
        lt.checkpoint(model, "auto")
    meter.limit = 2200
    (planner,) = planners(model)
    for tokens, is_on in ((11, False), (11, False), (12, False), (24, True), (11, True)):
        tiny_models.step(model, **tiny_models.batch(tokens=tokens))
        assert planner.store.is_on == (planner.store.moved > 0) == is_on


@pytest.mark.parametrize("choice", [True, False])
def test_a_memory_that_is_too_small_for_any_plan(choice, capsys):
    model = llama()
    weights = sum(p.nbytes for p in model.parameters())
    lt.checkpoint(model, weights, offload=choice)
    for _ in range(3):
        tiny_models.step(model, **tiny_models.batch())
    words = f"of {device_memory.size_text(weights)}; the memory is too small for full checkpointing"
    words += "" if choice else ", offload=True needs less"
    assert words in lt.patch_report(model).checkpointing and words in capsys.readouterr().err


@pytest.mark.parametrize(
    "choice, error, message",
    [
        (-1, ValueError, "offload in bytes must be positive, got -1"),
        (0, ValueError, "offload in bytes must be positive, got 0"),
        ("cpu", TypeError, r"offload must be a bool, an int \(bytes of host memory\) or None, not str"),
        (0.5, TypeError, "not float"),
        (2**60, ValueError, f"offload asks for {2**60} bytes of host memory, [0-9]+ are available"),
    ],
)
def test_bad_offload(choice, error, message):
    with pytest.raises(error, match=f"liger.transformers.checkpoint: .*{message}"):
        lt.checkpoint(llama(), PLENTY, offload=choice)
