# SPDX-License-Identifier: BSD-3-Clause
"""The order of copies and kernels of an offloading store, on streams that run in any order of their events.

A simulated stream collects its work, and runs it in a random order of all streams at the end: later than the
host, as on a GPU. Memory that is freed is overwritten by the stream that computes, and by nothing else from
then on, and new memory is first written by work that was issued before, as memory of a caching allocator is.
"""

import functools
import random
import weakref

import numpy
import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

pytest.importorskip("transformers")

from liger.transformers.checkpointing import offload
from liger.transformers.checkpointing.host_pool import HostPool
from liger.transformers.checkpointing.kept_attention import _Kept
from liger.transformers.checkpointing.offload import HostStore

LAYERS, NUMBERS = 6, 2048
NAN = float("nan")


class Stream:
    def __init__(self, name, ignored):
        self.name, self.ignored, self.work, self.done = name, ignored, [], 0

    def record_event(self):
        return self, len(self.work)

    def wait_event(self, event):
        stream, count = event
        if (self.name, stream.name) != self.ignored:
            self.run(lambda: None, until=lambda: stream.done >= count)

    def run(self, function, until=lambda: True):
        self.work.append((function, until))


class Streams:
    """Stands in for the streams of a GPU; ``ignored``: the names of a stream and of one whose events it does
    not wait for."""

    def __init__(self, ignored=None):
        self.device, self.memory, self.users, self.freed = torch.device("cpu"), {}, {}, []
        self.all = [Stream(name, ignored) for name in ("computing", "leave", "back", "other")]
        self.computing, self.leave, self.back, self.other = self.all

    def current(self):
        return self.computing

    @staticmethod
    def block(size):
        return torch.zeros(size, dtype=torch.uint8)

    def copy(self, stream, target, source):
        target, source = self.alias(target), self.alias(source)
        stream.run(lambda: target.copy_(source))

    def new(self, shape=(NUMBERS,), stride=(1,), dtype=torch.float32):
        """A tensor with memory that is overwritten when no tensor refers to it any more."""
        memory = numpy.full(NUMBERS, NAN, dtype=numpy.float32)
        owner = memory.view()
        tensor = torch.from_numpy(owner).as_strided(shape, stride)
        self.memory[tensor.data_ptr()] = memory
        weakref.finalize(owner, self.free, tensor.data_ptr(), self.alias(tensor))
        return tensor

    def used_by(self, tensor, stream):
        self.users.setdefault(tensor.data_ptr(), []).append(stream)

    def free(self, address, memory):
        """The computing stream may have the memory next, behind the work of the streams that used it."""
        events = [stream.record_event() for stream in self.users.pop(address, ())]
        self.freed.append(memory)
        self.computing.run(
            functools.partial(memory.fill_, NAN),
            lambda: all(stream.done >= count for stream, count in events),
        )

    def alias(self, tensor):
        """A tensor of the same elements for work that runs later, which does not keep them alive."""
        memory = self.memory.get(tensor.data_ptr())
        return (
            tensor if memory is None else torch.from_numpy(memory).as_strided(tensor.shape, tensor.stride())
        )

    def write(self, tensor, value):
        self.computing.run(functools.partial(self.alias(tensor).fill_, value))

    def empty(self, shape, stride, dtype):
        tensor = self.new(shape, stride, dtype)
        self.write(tensor, NAN)
        return tensor

    def finish(self, chance):
        """Runs all work, in an order that the events allow."""
        while ready := [s for s in self.all if s.done < len(s.work) and s.work[s.done][1]()]:
            # Weights make one stream run far ahead of another.
            stream = chance.choices(ready, [self.weights[s.name] for s in ready])[0]
            stream.work[stream.done][0]()
            stream.done += 1
        assert all(s.done == len(s.work) for s in self.all), "streams wait for each other"

    def shuffle(self, chance):
        self.weights = {
            name: 10.0 ** chance.uniform(-3, 3) for name in ("computing", "leave", "back", "other")
        }


class Training:
    """Steps of a model whose layers write their number and the step into their inputs."""

    def __init__(self, monkeypatch, chance, ignored=None, limit=2**30, per_layer=2):
        self.chance, self.streams, self.wrong = chance, Streams(ignored), []
        self.streams.shuffle(chance)
        self.task, self.per_layer = 0, per_layer
        monkeypatch.setattr(offload, "WORTH_MOVING", 1)
        monkeypatch.setattr(offload, "Streams", lambda device: self.streams)
        monkeypatch.setattr(offload, "_task", lambda: self.task)
        self.store = HostStore(limit)

    def forward(self, value, is_cut=False):
        store, graph = self.store, []
        store.begin(is_new_step=False)
        for layer in range(LAYERS - is_cut):
            with store.layer(stays=layer == LAYERS - 1):
                handles = []
                for number in range(self.per_layer):
                    x = self.streams.new()
                    expected = value * 100 + 10 * layer + number
                    self.streams.write(x, expected)
                    handles.append((store.put(x), expected))
                    del x
                graph.append(handles)
        if not is_cut:
            store.flush()
        return graph

    def backward(self, graph, until=0, retain=False):
        self.task += 1
        for layer in reversed(range(until, len(graph))):
            for handle, expected in graph[layer]:
                self.read(handle.get(), expected)
            if not retain:
                graph[layer].clear()
                del handle

    def read(self, x, expected):
        seen = self.streams.alias(x)

        def check():
            if not torch.all(seen == expected):
                self.wrong.append((expected, seen[0].item()))

        self.streams.computing.run(check)

    def finish(self):
        self.streams.finish(self.chance)
        return self.wrong + [("written", x[0].item()) for x in self.streams.freed if not torch.all(x.isnan())]


def steps(training):
    for value in range(3):
        training.backward(training.forward(value))


def two_forwards(training):
    for value in (0, 2):
        graphs = [training.forward(value), training.forward(value + 1)]
        training.backward(graphs[1])
        training.backward(graphs[0])


def retained(training):
    graph = training.forward(0)
    training.backward(graph, retain=True)
    training.backward(graph)
    training.backward(training.forward(1))


def parts_of_graphs(training):
    """A backward that ends in the middle, after it has fetched more, and a graph without one."""
    graph = training.forward(0)
    training.backward(graph, until=3)
    del graph
    training.forward(1)
    training.backward(training.forward(2))


def the_end_of_a_plan(training):
    """After a backward that ends in the middle: what it has fetched has neither a reader nor a store."""
    graph = training.forward(0)
    training.backward(graph, until=3)
    training.store = HostStore(training.store.limit)
    del graph
    training.backward(training.forward(1))


def the_last_layer_does_not_run(training):
    """Where it is cut or dropped, nothing tells the store of the end of the forward."""
    for value in range(3):
        graph = training.forward(value, is_cut=True)
        assert training.store._leaving
        training.backward(graph, until=LAYERS - 2)
        assert not training.store._leaving
        del graph[LAYERS - 2 :]
        training.backward(graph)


def another_stream(training):
    """The second step does not wait for the first one, which has other memory of the device."""
    training.backward(training.forward(0))
    streams = training.streams
    streams.computing, streams.other = streams.other, streams.computing
    training.backward(training.forward(1))


def kept_attention(training):
    """A recomputation reads a kept tensor, and the backward of its kernel reads it again at once or later."""
    for value in range(3):
        graph = training.forward(value)
        training.task += 1
        for layer in reversed(range(LAYERS)):
            (first, *expected), (second, again) = graph[layer]
            training.read(first.get(), *expected)
            kept = _Kept(second)
            training.read(kept.for_recomputation(), again)
            x = training.streams.new()
            training.streams.write(x, value)
            training.read(kept.for_backward(), again)
            if value == 1:
                training.read(kept.for_backward(), again)
            graph[layer].clear()
            del x, first, second, kept


PROGRAMS = [
    another_stream, kept_attention, steps, two_forwards, retained, parts_of_graphs, the_end_of_a_plan,
    the_last_layer_does_not_run,
]  # fmt: skip


@pytest.mark.parametrize("limit", [2**30, 2**16], ids=["", "little host memory"])
@pytest.mark.parametrize("program", PROGRAMS)
def test_any_order_of_the_streams(program, limit, monkeypatch):
    for seed in range(30):
        training = Training(monkeypatch, random.Random(seed), limit=limit)
        program(training)
        assert training.finish() == [], seed
        assert training.store.moved and (training.store.refused > 0) == (limit == 2**16)


@pytest.mark.parametrize(
    "stream, other, program",
    [
        ("leave", "computing", steps),
        ("leave", "back", another_stream),
        ("back", "computing", steps),
        ("computing", "leave", steps),
        ("computing", "back", steps),
        ("computing", "back", parts_of_graphs),
    ],
)
def test_each_wait_is_needed(stream, other, program, monkeypatch):
    """Without the waits of one stream for another, some order reads wrong values."""
    wrong = []
    for seed in range(30):
        training = Training(monkeypatch, random.Random(seed), (stream, other))
        program(training)
        wrong += training.finish()
    assert wrong


def test_the_copy_back_waits_for_the_copy_out(monkeypatch):
    """Before the end of the forward, no other stream has waited for the copy to the host."""
    for ignored in (None, ("back", "leave")):
        wrong = []
        for seed in range(30):
            training = Training(monkeypatch, random.Random(seed), ignored)
            with training.store.layer():
                x = training.streams.new()
                training.streams.write(x, 7.0)
                handle = training.store.put(x)
                training.read(handle.get(), 7.0)
            training.store.flush()
            wrong += training.finish()
        assert bool(wrong) == (ignored is not None)


def test_copies_overlap(monkeypatch):
    """A copy to the host waits for one layer, and the computing stream for the layer before the last; a copy
    back starts one layer early."""
    training = Training(monkeypatch, random.Random(0), per_layer=1)
    streams, store = training.streams, training.store
    waits = []
    monkeypatch.setattr(
        Stream, "wait_event", lambda stream, event: waits.append((stream.name, event[0].name))
    )
    handles = []
    for layer in range(LAYERS):
        waits.clear()
        with store.layer(stays=layer == LAYERS - 1):
            # The computing stream waits for the tensors of the layer before the last one.
            assert waits == [("computing", "leave")] * (layer >= 2)
            handles.append(store.put(streams.new()))
        assert len(store._leaving) == (min(layer + 1, 2) if layer < LAYERS - 1 else 1)
    store.flush()
    assert not store._leaving
    training.task = 1
    for layer in reversed(range(LAYERS)):
        started = len(streams.back.work)
        handles[layer].get()
        # The last layer and the first one have nothing to fetch.
        assert len(streams.back.work) - started == (layer > 0)


def test_tensors_are_freed_when_their_copies_are_done(monkeypatch):
    training = Training(monkeypatch, random.Random(0), per_layer=1)
    alive, handles = [], []
    for layer in range(LAYERS):
        with training.store.layer():
            x = training.streams.new()
            alive.append(StorageWeakRef(x.untyped_storage()))
            handles.append(training.store.put(x))
            del x
        # The tensors of this layer and the last one.
        assert [not storage.expired() for storage in alive] == [
            number >= layer - 1 for number in range(layer + 1)
        ]
    training.store.flush()
    assert all(storage.expired() for storage in alive)


def test_a_pool_of_the_step_before(monkeypatch):
    """The second step has the memory of the first one, and no more."""
    training = Training(monkeypatch, random.Random(0))
    seen = []
    for value in range(3):
        training.store.begin()
        training.backward(training.forward(value))
        seen.append(training.store.pool.size)
    assert seen[0] == seen[2] and isinstance(training.store.pool, HostPool)
    assert training.store.moved == (LAYERS - 1) * 2 * NUMBERS * 4
