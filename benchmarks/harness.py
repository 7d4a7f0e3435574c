"""Rows: one row is one piece of work on given inputs, done by several providers side by side (see measure.py).

A benchmark module lists the implementations of its op as candidates, and makes of them the providers of its rows.
"""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch

import liger


@dataclass
class Options:
    """What a run measures: ``size`` is ``"full"``, ``"quick"`` or ``"self-test"`` (tiny shapes)."""

    device: str = "cuda"
    size: str = "full"
    backends: tuple[str, ...] = ("cuda", "triton")
    compile: bool = False
    dtype: torch.dtype = torch.bfloat16

    def pick(self, full, quick, tiny):
        return {"full": full, "quick": quick, "self-test": tiny}[self.size]


@dataclass
class Work:
    """``run()`` does the work once and returns its named results; ``prepare()`` comes before each run, untimed."""

    run: Callable[[], dict]
    prepare: Callable[[], None] = lambda: None


@dataclass(frozen=True)
class Provider:
    """One way to do the work of a row: ``make(inputs)`` returns a fresh Work.

    ``group`` is ``"ours"``, ``"liger-kernel"``, ``"other"`` or ``"ceiling"``; ``needs`` names modules to be importable.
    """

    name: str
    make: Callable[[dict], Work]
    group: str = "other"
    context: Callable = contextlib.nullcontext
    needs: tuple[str, ...] = ()


@dataclass(frozen=True)
class Contest:
    """One line of the verdict: ``baseline`` against the fastest of ours (of those named in ``ours``, if any are)."""

    baseline: str = "liger-kernel"
    label: str = ""
    ours: tuple[str, ...] = ()


@dataclass
class Row:
    """``inputs()`` makes the tensors; ``reference(inputs)`` the float32 results; ``nbytes`` must be moved at least.

    ``kind`` is ``"device"``, or ``"host"`` for the time the host spends per call.
    """

    op: str
    name: str
    inputs: Callable[[], dict]
    providers: list[Provider]
    reference: Callable[[dict], dict] | None = None
    nbytes: int = 0
    kind: str = "device"
    rounds: int = 10
    burst: int = 3
    contests: tuple[Contest, ...] = (Contest(),)
    ceiling: str = field(init=False, default="")

    def __post_init__(self):
        if self.nbytes and self.kind == "device":
            self.providers = [*self.providers, copy_provider(self.nbytes)]
        self.ceiling = next((p.name for p in self.providers if p.group == "ceiling"), "")


# --- making providers ---------------------------------------------------------------------------------------------


class Leaves(dict):
    """The inputs of a row as one provider sees them: autograd leaves over the same memory, and of those that it
    overwrites private copies, renewed by ``restore()``. A copy is no leaf, like the activations of a model."""

    def __init__(self, inputs, differentiate=(), overwrites=()):
        super().__init__()
        self._sources = {}
        for name, value in inputs.items():
            if isinstance(value, torch.Tensor):
                value = value.detach().requires_grad_(name in differentiate)
            if name in overwrites:
                self._sources[name] = value
            else:
                self[name] = value

    def restore(self):
        for name, value in self._sources.items():
            self.pop(name, None)
            self[name] = value.clone()


def _named(names, values):
    return dict(zip(names, values if isinstance(values, (tuple, list)) else (values,), strict=True))


def forward_work(function, results, differentiate, overwrites=()):
    """``make`` of a provider whose work is ``function(leaves)``, recorded by autograd, with results of these names."""

    def make(inputs):
        leaves = Leaves(inputs, differentiate, overwrites)
        return Work(lambda: _named(results, function(leaves)), leaves.restore)

    return make


def backward_work(function, upstream, differentiate, overwrites=()):
    """``make`` of a provider whose work is the backward of ``function(leaves)``, given gradients named ``upstream``."""

    def make(inputs):
        leaves = Leaves(inputs, differentiate, overwrites)
        outputs = []

        def prepare():
            outputs.clear()
            leaves.restore()
            value = function(leaves)
            outputs.extend(value if isinstance(value, (tuple, list)) else (value,))

        def run():
            wanted = [leaves[name] for name in differentiate]
            grads = torch.autograd.grad(outputs, wanted, [leaves[name] for name in upstream])
            return _named([f"d{name}" for name in differentiate], grads)

        return Work(run, prepare)

    return make


def training_work(function, upstream, differentiate, overwrites=()):
    """``make`` of a provider whose work is a forward and its backward; without ``upstream``, of a scalar loss."""

    def make(inputs):
        leaves = Leaves(inputs, differentiate, overwrites)

        def run():
            value = function(leaves)
            given = [leaves[name] for name in upstream] or None
            grads = torch.autograd.grad(value, [leaves[name] for name in differentiate], given)
            results = _named([f"d{name}" for name in differentiate], grads)
            return results if upstream else {"loss": value.detach(), **results}

        return Work(run, leaves.restore)

    return make


@dataclass(frozen=True)
class Candidate:
    """An implementation of an op: ``function(tensors)``, and the names of the tensors that it, or its backward,
    overwrites. Rows make providers of it."""

    name: str
    function: Callable
    group: str = "other"
    context: Callable = contextlib.nullcontext
    needs: tuple[str, ...] = ()
    overwrites: tuple[str, ...] = ()


def ours(options, function, label="", overwrites=()):
    """The same function under each backend of liger."""
    return [
        Candidate(
            f"liger[{b}]{label}", function, "ours", partial(liger.use_backend, b), overwrites=overwrites
        )
        for b in options.backends
    ]


def liger_kernel(function, label="", overwrites=()):
    needs = ("liger_kernel", "triton")
    return Candidate(f"liger-kernel{label}", function, "liger-kernel", needs=needs, overwrites=overwrites)


def compiled(options, function):
    """torch.compile of an eager candidate, if the run asks for it."""
    return [Candidate("torch.compile", torch.compile(function, dynamic=False))] if options.compile else []


def providers(candidates, work, *names):
    """Providers that do ``work`` (one of the three above) with each candidate."""
    return [
        Provider(c.name, work(c.function, *names, c.overwrites), c.group, c.context, c.needs)
        for c in candidates
    ]


def float32_reference(function, work, *names):
    """The results of the same work in float32, as the reference of a row."""

    def reference(inputs):
        wide = {
            name: value.float() if isinstance(value, torch.Tensor) and value.is_floating_point() else value
            for name, value in inputs.items()
        }
        made = work(function, *names)(wide)
        made.prepare()
        return {name: value.detach() for name, value in made.run().items()}

    return reference


def copy_provider(nbytes):
    """A device copy that reads and writes ``nbytes`` in all: the ceiling of work that is bound by memory."""

    def make(inputs):
        device = next(v.device for v in inputs.values() if isinstance(v, torch.Tensor))
        source, target = torch.zeros(2, nbytes // 2, dtype=torch.uint8, device=device)

        def run():
            target.copy_(source)
            return {}

        return Work(run)

    return Provider("device copy", make, "ceiling")


# --- inputs ---------------------------------------------------------------------------------------------------------


def normal(options, *shape, std=1.0):
    return torch.randn(shape, device=options.device, dtype=options.dtype).mul_(std)


def targets(options, rows, vocabulary, ignored):
    """Random classes; with ``ignored``, one row in seven has the class -100."""
    target = torch.randint(vocabulary, (rows,), device=options.device)
    if ignored:
        target[::7] = -100
    return target
