# SPDX-License-Identifier: BSD-3-Clause
"""The GPU tests of this folder and their helpers call what exists, with arguments that it takes: each of them
runs on the CPU in small sizes, as far as it gets there.

The generic engine computes, and numbers are of no interest: an assertion that fails, or CUDA that is missing,
ends a test. What fails here is an unknown name or argument, and a tuple of another length.
"""

import importlib
import inspect
from pathlib import Path

import pytest
import torch
from sm90_engine import Shape
from test_head_gradients_sm90 import plans  # noqa: F401  a fixture

from liger.distributed.vocab.sm90 import CompiledSteps

BROKEN = AttributeError, ImportError, NameError, TypeError, ValueError
# What a build or a torch without CUDA does not have.
MISSING = "liger_sm90", "torch._C"
ROWS, HIDDEN, VOCAB = SIZES = 64, 32, 192
LARGEST = 1 << 19
HELPERS = "sm90_engine", "logprobs_sm90", "shards_sm90", "logprob_shards_sm90"
# These take time on a CPU, or wait for a GPU.
LEFT_OUT = "poison_memory", "assert_close_to_exact", "on_processes"


def small(value):
    """For a Shape, and for a tuple of rows, hidden size, classes and budget."""
    if isinstance(value, Shape):
        return Shape(*map(min, (value.rows, value.hidden, value.vocab), SIZES), value.budget)
    if isinstance(value, tuple) and len(value) == 4 and all(type(size) is int for size in value):
        return (*map(min, value, SIZES), value[3])
    return value


def marks_of(thing):
    marks = getattr(thing, "pytestmark", [])
    return marks if isinstance(marks, list) else [marks]


def gpu_tests():
    for file in sorted(Path(__file__).parent.glob("test_*_sm90*.py")):
        module = importlib.import_module(file.stem)
        for name, function in vars(module).items():
            marks = [*marks_of(module), *marks_of(function)] if name.startswith("test_") else []
            if any(mark.name == "gpu" for mark in marks):
                parameters = [mark.args for mark in marks if mark.name == "parametrize"]
                yield pytest.param(function, parameters, id=f"{file.stem}-{name}")


@pytest.fixture
def sm90():
    return torch.device("cpu")


@pytest.fixture
def small_sizes(monkeypatch, function):
    """Shapes are small, wherever they are made, and the plan of any has one chunk."""
    make, randn = Shape.__init__, torch.randn

    def made(self, rows, hidden, vocab, *others, **named):
        make(self, *map(min, (rows, hidden, vocab), SIZES), *others, **named)

    def at_most(*size, **named):
        if torch.empty(*size, device="meta").numel() > LARGEST:
            raise MemoryError
        return randn(*size, **named)

    monkeypatch.setattr(Shape, "__init__", made)
    monkeypatch.setattr(Shape, "plan", lambda self, *_: ([self.rows], [1], 0, 0))
    monkeypatch.setattr(torch, "randn", at_most)
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    monkeypatch.setattr(CompiledSteps, "are_built", staticmethod(lambda: True))
    monkeypatch.setattr(CompiledSteps, "clusters", staticmethod(lambda _: 66))
    for used in (function.__module__, *HELPERS):
        module = importlib.import_module(used)
        for name, value in list(vars(module).items()):
            if name in LEFT_OUT:
                monkeypatch.setattr(module, name, lambda *_, **__: None)
            elif isinstance(value, Shape):
                monkeypatch.setattr(module, name, small(value))
            elif isinstance(value, dict):
                for key in value:
                    monkeypatch.setitem(value, key, small(value[key]))


@pytest.mark.skipif(torch.cuda.is_available(), reason="the tests themselves run here")
@pytest.mark.parametrize("function, parameters", list(gpu_tests()))
def test_calls(request, small_sizes, function, parameters):
    """With the first values of all parameters, and with the last."""
    for end in [0, -1] if parameters else [0]:
        call(request, function, parameters, end)


def call(request, function, parameters, end):
    chosen = {}
    for names, values in parameters:
        names = [name.strip() for name in names.split(",")] if isinstance(names, str) else names
        value = list(values)[end]
        value = value.values if hasattr(value, "marks") else value if len(names) > 1 else [value]
        chosen.update(zip(names, map(small, value), strict=True))
    try:
        for name in inspect.signature(function).parameters:
            if name not in chosen:
                chosen[name] = request.getfixturevalue(name)
        function(**chosen)
    except BROKEN as error:
        if not any(word in str(error) for word in MISSING):
            raise
    except (Exception, pytest.fail.Exception, pytest.skip.Exception):
        pass  # what needs the engine, a GPU or the sizes of the test
