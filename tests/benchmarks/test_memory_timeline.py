# SPDX-License-Identifier: BSD-3-Clause
"""Memory over time, as experiment E6 draws it: categories of allocations, from records of torch."""

import pytest
import torch

from experiments import memory_timeline as memory

transformers = pytest.importorskip("transformers")

GIVEN = {"weights": 100, "optimizer states": 200}


def timeline(*events, marks, gradients=()):
    return memory.timeline(list(events), list(marks), list(gradients), GIVEN)


def last(line):
    return {name: values[-1] for name, values in line["bytes"].items() if values[-1]}


def test_allocations_belong_to_their_phase_until_they_are_released():
    marks = [("forward", 0), ("loss", 1), ("backward", 3)]
    line = timeline((1, 10, 5), (1, 20, 7), (-1, 20, 7), (1, 20, 2), marks=marks)
    assert [list(step) for step in zip(*line["bytes"].values(), strict=True)][-1] == [
        100, 200, 0, 0, 7, 0, 0,
    ]  # fmt: skip
    assert line["bytes"]["lm_head and loss"] == [0, 0, 7, 0, 0]
    assert line["peak"] == 312
    assert line["phases"] == [["forward", 0], ["loss", 1], ["backward", 3]]


def test_a_gradient_counts_from_its_allocation_and_may_be_a_view():
    marks = [("forward", 0), ("backward", 0), ("optimizer", 3)]
    events = [(1, 1000, 64), (1, 2000, 8), (-1, 2000, 8), (1, 3000, 4), (-1, 1000, 64)]
    line = timeline(*events, marks=marks, gradients=[[1032]])
    assert line["bytes"]["gradients"] == [0, 64, 64, 64, 64, 0]
    assert line["bytes"]["activations"] == [0, 0, 8, 0, 0, 0]
    assert last(line) == {**GIVEN, "optimizer": 4}


def test_an_address_of_an_earlier_step_is_not_a_gradient_of_this_one():
    marks = [("forward", 0), ("optimizer", 1), ("forward", 2), ("optimizer", 3)]
    events = [(1, 10, 4), (-1, 10, 4), (1, 10, 4), (-1, 10, 4)]
    line = timeline(*events, marks=marks, gradients=[[10], []])
    assert line["bytes"]["gradients"] == [0, 4, 0, 0, 0]
    assert line["bytes"]["activations"] == [0, 0, 0, 4, 0]


def test_releases_of_what_was_there_before_are_not_counted():
    line = timeline((-1, 77, 50), (1, 77, 3), marks=[("forward", 0)])
    assert line["peak"] == 303 and last(line)["activations"] == 3


def test_a_mark_is_behind_the_releases_before_it():
    """An optimizer that allocates nothing: its mark comes before the release of the gradients."""
    events = [(1, 10, 4), (1, 20, 4), (-1, 10, 4), (-1, 20, 4), (1, 30, 4)]
    assert memory.event_index(events, 2, 1) == 3
    assert memory.event_index(events, 0, 0) == 0 and memory.event_index(events, 3, 2) == 5
    # Releases that are counted and not complete yet, or complete and not counted.
    assert memory.event_index(events, 2, 9) == 4 and memory.event_index(events, 3, 0) == 5


def test_a_long_timeline_keeps_its_peak():
    events = [event for i in range(9 * memory.POINTS) for event in ((1, i, 1), (-1, i, 1))]
    events.insert(4444, (1, -1, 999))
    events.insert(4445, (-1, -1, 999))
    line = timeline(*events, marks=[("forward", 0)])
    assert len(line["bytes"]["weights"]) <= memory.POINTS
    assert max(line["bytes"]["activations"]) == 999 and line["peak"] == 1299


@pytest.mark.parametrize(
    "device, fused",
    [
        ("cpu", False),
        pytest.param("cuda", False, marks=pytest.mark.gpu),
        pytest.param("cuda", True, marks=pytest.mark.gpu),
    ],
)
def test_steps_of_a_model(device, fused):
    """Gradients reach the size of the weights; the patched loss needs less memory than the logits did.

    On a GPU a fused optimizer allocates nothing, so the first event of its phase is the release of a
    gradient.
    """
    import liger

    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    peaks = {}
    for kind in ("plain", "patched"):
        torch.manual_seed(0)
        config = transformers.LlamaConfig(
            vocab_size=4096, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, use_cache=False, tie_word_embeddings=True,
        )  # fmt: skip
        model = transformers.LlamaForCausalLM(config).to(device)
        if kind == "patched":
            liger.patch(model)
        optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
        ids = torch.randint(4096, (4, 64), device=device)
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        with pytest.MonkeyPatch.context() as patches:
            patches.setenv("LIGER_MEMORY_BUDGET", "256K")
            line = memory.record_steps(model, model, optimizer, [ids, ids], device)
        weights = sum(p.nbytes for p in model.parameters())
        # The allocator of a GPU rounds sizes up to 512 bytes.
        tensors = 512 * len(list(model.parameters())) if device == "cuda" else 0
        assert weights <= max(line["bytes"]["gradients"]) <= weights + tensors
        assert line["bytes"]["optimizer states"][0] >= 2 * weights
        # A release that waits for another stream may not be recorded any more.
        assert line["bytes"]["gradients"][-1] <= tensors
        # A GPU library may keep a workspace.
        assert line["bytes"]["activations"][-1] <= (0 if device == "cpu" else 64 << 20)
        assert [name for name, _ in line["phases"]] == ["forward", "loss", "backward", "optimizer"] * 2
        assert all(p.grad is None for p in model.parameters())
        peaks[kind] = max(line["bytes"]["lm_head and loss"])
    logits = 4 * 64 * 4096 * 4
    assert peaks["patched"] < logits / 2 < 2 * logits <= peaks["plain"]
