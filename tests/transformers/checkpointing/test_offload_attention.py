# SPDX-License-Identifier: BSD-3-Clause
"""Kept attention in host memory: bits, bytes, and the order of copies, waits and reuse of memory."""

import copy
import functools
import itertools

import pytest
import torch

pytest.importorskip("transformers")

import planned_llama
import tiny_models
from planned_llama import (
    FEWEST,
    LAYERS,
    MOST,
    PLENTY,
    SETTLING,
    assert_bits,
    attention_first,
    free_bytes,
    sdpa_llama,
    set_level,
)
from test_offload import small_tensors_move  # noqa: F401  a fixture
from test_offload_gpu import run_program

import liger.transformers as lt
from liger.transformers.checkpointing import offload
from liger.transformers.checkpointing.checkpoint import planners
from liger.transformers.checkpointing.copy_streams import Streams
from liger.transformers.checkpointing.memory_plan import State

pytestmark = pytest.mark.usefixtures(attention_first.__name__)

# Bytes of 22 tokens of a tiny Llama with four heads of 16: the input of a layer, the output of attention, and
# the logarithms of its sums.
INPUT = OUTPUT = 22 * 64 * 4
SUMS = 22 * 4 * 4


planned = functools.partial(planned_llama.planned, offload=True)


def is_empty(store):
    return free_bytes(store) == store.pool.size


def test_what_is_moved():
    """Of every recomputed layer but the last one: its input, and the attention that it keeps."""
    given, model = tiny_models.batch(), sdpa_llama()
    planner = planned(model, given)
    for level in range(2 * MOST + 1):
        for _ in range(SETTLING):
            set_level(model, level)
            tiny_models.step(model, **given)
        states = planner.plan.states[level]
        last = max((n for n, state in enumerate(states) if state != State.EVERYTHING), default=0)
        kept = sum(state == State.ATTENTION for state in states[:last])
        assert planner.store.inputs == last * INPUT
        assert planner.store.moved == last * INPUT + kept * (OUTPUT + SUMS)
        assert planner.switches.leaving == [True] * LAYERS


def test_tensors_leave_in_the_forward():
    """At its end, kept tensors of the last recomputed layer alone are on the device."""
    given, model = tiny_models.batch(), sdpa_llama()
    planner = planned(model, given)
    set_level(model, MOST)
    seen = []
    put = planner.store.put
    planner.store.put = lambda *given, **named: seen.append(put(*given, **named)) or seen[-1]
    loss = model(**given).loss
    on_device = [handle for handle in seen if isinstance(handle, offload.Kept)]
    # An input, an output and its sums; where the first layer keeps nothing, it is not the last.
    assert len(on_device) == 3 and len(seen) == 3 * LAYERS - 2 * FEWEST
    assert all(not handle._group.leaving for handle in seen)
    loss.backward()


def test_the_plan_counts_them():
    """On the device are the attention of two layers, and in host memory the attention of the others."""
    given, costs = tiny_models.batch(), {}
    for choice in (False, True):
        planner = planned(sdpa_llama(), given, offload=choice)
        set_level(planner.model, MOST)
        tiny_models.step(planner.model, **given)
        one = OUTPUT + SUMS
        costs[choice] = [planner.plan.cost(level) for level in range(MOST + 1)]
        hosts = [planner.plan.host_cost(level) for level in range(MOST + 1)]
        assert hosts == [choice * max(level - 2, 0) * one for level in range(MOST + 1)]
        assert costs[choice] == [one * (min(level, 2) if choice else level) for level in range(MOST + 1)]
        summary = planner.summary
        assert ("0.01 MiB each in host memory" in summary) == choice


def test_a_bound_of_host_memory_bounds_the_plan():
    """A level whose attention has no room on the host counts it on the device."""
    given, model = tiny_models.batch(), sdpa_llama()
    planner = planned(model, given)
    tiny_models.step(model, **given)
    store, plan = planner.store, planner.plan
    store.pool.limit = store.pool.size
    plan.layers = plan.layers[0], [10**6] * LAYERS, [10**6] * LAYERS
    plan._count()
    room = plan.need(False, 0, planner.longest) + 2 * 10**6
    wanted = [store.shortage(1.0, plan.host_cost(level)) for level in range(MOST + 1)]
    assert wanted[2] == 0 and all(w > 10**6 / 2 for w in wanted[3:])

    def most(shortage):
        plan.confirmed = True
        return plan.max_kept(False, planner.longest, room, MOST, shortage)

    assert most(lambda level: 0) == MOST and most(lambda level: wanted[level]) == 2


def test_little_host_memory():
    """What has no room stays on the device, with the same bits."""
    given = tiny_models.batch()
    models = [sdpa_llama() for _ in range(2)]
    planner = planned(models[0], given, offload=4 * 4096)
    set_level(models[0], MOST)
    for _ in range(2):
        assert_bits(*(tiny_models.step(m, **given) for m in models))
    assert planner.store.refused > 0 and planner.store.moved > 0 and planner.store.pool.size <= 4 * 4096


def test_inputs_that_are_too_small_to_move(monkeypatch):
    """The plan asks for room on the host before anything has moved."""
    monkeypatch.setattr(offload, "WORTH_MOVING", INPUT + 1)
    given, model = tiny_models.batch(), sdpa_llama(head_dim=32)
    planner = planned(model, given)
    assert planner.store.moved == planner.store.refused == 0
    set_level(model, MOST)
    tiny_models.step(model, **given)
    assert planner.store.inputs == 0 and planner.store.moved == (MOST - 1) * 2 * OUTPUT


def test_a_copy_counts_the_inputs_that_the_store_moves():
    given, model = tiny_models.batch(), sdpa_llama()
    planner = planned(model, given, offload=10**6)
    # The inputs of the last step count, too.
    assert planners(copy.deepcopy(model))[0].store.most == (LAYERS - 1) * INPUT > planner.store.most
    set_level(model, MOST)
    tiny_models.step(model, **given)
    (theirs,) = planners(copy.deepcopy(model))
    assert theirs.store.shortage(100.0) == 100 * (LAYERS - 1) * INPUT - 10**6


@pytest.mark.parametrize("hidden", [True, False])
def test_copies_that_take_longer_than_a_layer(hidden, monkeypatch):
    """Then attention stays on the device, and the inputs alone leave."""
    from liger.transformers.checkpointing import planner as planning

    class Timer:
        is_planned = True

        def __init__(self, recompute):
            self.recompute = recompute

        def __call__(self, function, *args, **kwargs):
            return self.recompute(function, *args, **kwargs)

        def microseconds(self):
            # The copies of 11 KiB take 0.24 microseconds.
            return (0.5 if hidden else 0.1), 0.05

    monkeypatch.setattr(planning, "LayerTimer", Timer)
    given, model = tiny_models.batch(), sdpa_llama()
    lt.checkpoint(model, PLENTY, offload=True)
    (planner,) = planners(model)
    begin = planner._begin
    planner._begin = lambda hidden: begin(hidden) or setattr(planner, "is_timed", True)
    for level in (0, MOST):
        set_level(model, level)
        tiny_models.step(model, **given)
    assert planner.switches.leaving == [hidden] * LAYERS
    assert (planner.store.moved > planner.store.inputs) == hidden and planner.store.inputs


# --- the order of copies ------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cpu", "mps", "xpu"])
def test_streams_of_devices_without_streams(device):
    """Their copies are done when they return."""
    streams, memory = Streams(torch.device(device)), torch.zeros(3)
    streams.copy(streams.back, memory, torch.ones(3))
    streams.current().wait_event(streams.back.record_event())
    assert memory.tolist() == [1, 1, 1] and not streams.block(8).is_pinned()


class Recorder(Streams):
    """Streams whose work is done at once, and written down: the calls of a program in their order."""

    def __init__(self, device):
        self.device, self.log = device, []
        self.computing, self.leave, self.back = (
            Recorded(n, self.log) for n in ("computing", "leave", "back")
        )

    def current(self):
        return self.computing

    def copy(self, stream, target, source):
        memory = target if stream.name == "leave" else source
        self.log.append(("copy", stream.name, memory.data_ptr(), memory.nbytes))
        stream.work += 1
        target.copy_(source)


class Recorded:
    def __init__(self, name, log):
        self.name, self.log, self.work = name, log, 0

    def record_event(self):
        return self.name, self.work

    def wait_event(self, event):
        self.log.append(("wait", self.name, *event))


@pytest.fixture
def recorder(monkeypatch):
    made = Recorder(torch.device("cpu"))
    monkeypatch.setattr(offload, "Streams", lambda device: made)
    return made


def test_the_order_of_a_step(recorder):
    """Copies of a layer go out one by one in the forward and come back in the backward, layer by layer."""
    given, model = tiny_models.batch(), sdpa_llama()
    planner = planned(model, given)
    set_level(model, MOST)
    tiny_models.step(model, **given)
    recorder.log.clear()
    loss = model(**given).loss
    forward = list(recorder.log)
    loss.backward()
    backward = recorder.log[len(forward) :]
    sizes = [INPUT, OUTPUT, SUMS]
    of_layers = [sizes] * (LAYERS - 1) if not FEWEST else [sizes[:1], *[sizes] * (LAYERS - 2)]
    out = [entry for entry in forward if entry[0] == "copy"]
    assert sorted(size for *_, size in out) == sorted(itertools.chain(*of_layers))
    assert {name for _, name, *_ in out} == {"leave"}
    # Each copy waits for the work of the computing stream that made the tensor.
    for number, entry in enumerate(forward):
        if entry[0] == "copy":
            assert forward[number - 1][:3] == ("wait", "leave", "computing")
    # Before the end of the forward the computing stream has waited for every copy.
    assert [e[3] for e in forward if e[:3] == ("wait", "computing", "leave")] == sorted(
        e[3] for e in forward if e[:3] == ("wait", "computing", "leave")
    )
    assert ("wait", "computing", "leave", recorder.leave.work) in forward
    # The same memory of the host comes back, the last layers first, after a wait for its own copy out.
    back = [entry for entry in backward if entry[0] == "copy"]
    assert {name for _, name, *_ in back} == {"back"}
    places, left = [entry[2] for entry in out], []
    for sizes_of_layer in of_layers:
        left.append({places.pop(0) for _ in sizes_of_layer})
    for layer in reversed(left):
        assert {back.pop(0)[2] for _ in range(len(layer))} == layer
    assert not back
    for number, entry in enumerate(backward):
        if entry[0] == "copy":
            assert [e[:3] for e in backward[number - 2 : number]] == [
                ("wait", "back", "computing"),
                ("wait", "back", "leave"),
            ]
    assert is_empty(planner.store)


def test_one_layer_ahead(recorder):
    """When the backward reads the input of a layer, the copies of the layer before have been started."""
    given, model = tiny_models.batch(), sdpa_llama()
    planned(model, given)
    set_level(model, MOST)
    tiny_models.step(model, **given)
    started = []
    for layer in model.model.layers:
        layer.self_attn.register_forward_hook(lambda *_: started.append(recorder.back.work))
    loss = model(**given).loss
    before = recorder.back.work
    started.clear()
    loss.backward()
    per_layer = [3] * (LAYERS - 1) if not FEWEST else [1, *[3] * (LAYERS - 2)]
    expected = [sum(per_layer[n:]) for n in range(LAYERS - 2, -1, -1)]
    assert [count - before for count in started] == [*expected, expected[-1]]


def test_memory_is_written_again_after_its_readers(recorder):
    """In the next step, copies out wait for the copies back that read the same memory."""
    given, model = tiny_models.batch(), sdpa_llama()
    planner = planned(model, given)
    set_level(model, MOST)
    tiny_models.step(model, **given)
    size = planner.store.pool.size
    for _ in range(3):
        read = recorder.back.work
        tiny_models.step(model, **given)
        first = recorder.log.index(("wait", "leave", "back", read))
        spots = {}
        for number, entry in enumerate(recorder.log):
            if entry[0] == "copy":
                spots.setdefault(entry[2], []).append((entry[1], number))
        # Every place is written and read in turns.
        for uses in spots.values():
            assert [name for name, _ in uses[::2]] == ["leave"] * len(uses[::2])
            assert [name for name, _ in uses[1::2]] == ["back"] * len(uses[1::2])
        assert any(entry[:2] == ("copy", "leave") for entry in recorder.log[first:])
    assert planner.store.pool.size == size


def test_the_program_for_the_sanitizer_of_streams():
    """Without a GPU it moves what it says."""
    result = run_program("", "cpu")
    assert result.stdout.split() == ["inputs", "attention"], result.stderr[-3000:]
