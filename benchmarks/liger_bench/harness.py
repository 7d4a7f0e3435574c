# SPDX-License-Identifier: BSD-3-Clause
"""Rows of the suite: one work on given inputs, measured for several providers (see measure.py)."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from .reports.verdict import FASTEST_PEER

# Sizes of a sweep: those of the benchmarks of liger-kernel.
SIZES = (4096, 8192, 12288, 16384)
VOCABULARIES = (40960, 81920, 122880, 163840)


@dataclass
class Options:
    """Options of a run: ``size`` is ``"full"``, ``"quick"`` or ``"self-test"`` (tiny shapes).

    ``sweep`` varies one size over a range. ``peers`` are name prefixes of the peers to measure; None: all
    installed.
    """

    device: str = "cuda"
    size: str = "full"
    backends: tuple[str, ...] = ("cuda", "triton")
    compile: bool = False
    sweep: bool = False
    peers: tuple[str, ...] | None = None
    dtype: torch.dtype = torch.bfloat16

    def pick(self, full, quick, tiny):
        return {"full": full, "quick": quick, "self-test": tiny}[self.size]

    def swept(self, values):
        """The values of a sweep: all, the two ends, or three tiny ones."""
        return self.pick(values, values[:: len(values) - 1], (8, 16, 32))


@dataclass
class Work:
    """``run()`` does the work once and returns its named results. ``prepare()`` runs before and ``release()``
    after it; neither is timed."""

    run: Callable[[], dict]
    prepare: Callable[[], None] = lambda: None
    release: Callable[[], None] = lambda: None


@dataclass(frozen=True)
class Provider:
    """One way to do the work of a row: ``make(inputs)`` returns a fresh Work.

    ``group`` is ``"ours"``, ``"op alone"`` (an op of liger without its public function: reported, but not
    compared), ``"liger-kernel"``, ``"other"`` or ``"ceiling"``; ``needs`` names modules that must be
    importable.
    """

    name: str
    make: Callable[[dict], Work]
    group: str = "other"
    context: Callable = contextlib.nullcontext
    needs: tuple[str, ...] = ()


@dataclass(frozen=True)
class Contest:
    """One line of the verdict: ``baseline`` against the fastest provider of liger, or the fastest of
    ``ours``."""

    baseline: str = "liger-kernel"
    label: str = ""
    ours: tuple[str, ...] = ()


# The only contest of an op that liger-kernel does not have.
FASTEST = Contest(FASTEST_PEER, FASTEST_PEER)


@dataclass
class Row:
    """``inputs()`` returns the tensors, ``reference(inputs)`` the float32 results; ``nbytes`` is the minimum
    traffic.

    ``kind`` is ``"device"``, or ``"host"`` for host time per call. ``work`` and ``shape`` identify the row in
    plots: rows of one work that differ in one size are points of a line. Calls cycle through ``sets`` sets of
    inputs. Before each call the device runs GEMMs for ``heat_ms``.
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
    heat_ms: float = 0
    contests: tuple[Contest, ...] = (Contest(),)
    work: str = ""
    shape: dict[str, int] = field(default_factory=dict)
    sets: int = 2

    def __post_init__(self):
        if self.nbytes and self.kind == "device":
            self.providers = [*self.providers, copy_provider(self.nbytes)]
        if self.contests and FASTEST not in self.contests:
            self.contests = (*self.contests, FASTEST)


# --- works --------------------------------------------------------------------------------------------------


class Leaves(dict):
    """The inputs of a row for one provider: autograd leaves that share the memory of the inputs.

    Tensors that the provider overwrites are private copies, which exist from ``restore()`` to ``drop()``.
    Like the activations of a model, a copy is not a leaf.
    """

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

    def drop(self):
        for name in self._sources:
            self.pop(name, None)

    def restore(self):
        self.drop()
        for name, value in self._sources.items():
            self[name] = value.clone()


def _named(names, values):
    return dict(zip(names, values if isinstance(values, (tuple, list)) else (values,), strict=True))


def forward_work(function, results, differentiate, overwrites=()):
    """``make`` of a provider: the work is ``function(leaves)``, recorded by autograd; ``results`` names its
    outputs."""

    def make(inputs):
        leaves = Leaves(inputs, differentiate, overwrites)
        return Work(lambda: _named(results, function(leaves)), leaves.restore, leaves.drop)

    return make


def backward_work(function, upstream, differentiate, overwrites=()):
    """``make`` of a provider: the work is the backward of ``function(leaves)`` from the gradients named
    ``upstream``, or from a scalar loss if that is empty."""

    def make(inputs):
        leaves = Leaves(inputs, differentiate, overwrites)
        outputs = []

        def prepare():
            release()
            leaves.restore()
            value = function(leaves)
            outputs.extend(value if isinstance(value, (tuple, list)) else (value,))

        def release():
            outputs.clear()
            leaves.drop()

        def run():
            inputs = [leaves[name] for name in differentiate]
            grad_outputs = [leaves[name] for name in upstream] or None
            grads = torch.autograd.grad(outputs, inputs, grad_outputs)
            return _named([f"d{name}" for name in differentiate], grads)

        return Work(run, prepare, release)

    return make


def training_work(function, upstream, differentiate, overwrites=()):
    """``make`` of a provider: the work is a forward and its backward, from a scalar loss if ``upstream`` is
    empty."""

    def make(inputs):
        leaves = Leaves(inputs, differentiate, overwrites)

        def run():
            value = function(leaves)
            grad_outputs = [leaves[name] for name in upstream] or None
            grads = torch.autograd.grad(value, [leaves[name] for name in differentiate], grad_outputs)
            results = _named([f"d{name}" for name in differentiate], grads)
            return results if upstream else {"loss": value.detach(), **results}

        return Work(run, leaves.restore, leaves.drop)

    return make


def works(results, upstream, differentiate):
    """{name: (maker, *its arguments)} of the three works of a differentiable op."""
    return {
        "forward": (forward_work, results, differentiate),
        "backward": (backward_work, upstream, differentiate),
        "forward and backward": (training_work, upstream, differentiate),
    }


def float32_reference(function, work, *names):
    """The results of the same work in float32, as the reference of a row."""

    def reference(inputs):
        wide = {
            name: value.float() if isinstance(value, torch.Tensor) and value.is_floating_point() else value
            for name, value in inputs.items()
        }
        float32_work = work(function, *names)(wide)
        float32_work.prepare()
        return {name: value.detach() for name, value in float32_work.run().items()}

    return reference


def copy_provider(nbytes):
    """A device copy with ``nbytes`` of reads and writes together: the ceiling of memory-bound work."""

    def make(inputs):
        device = next(v.device for v in inputs.values() if isinstance(v, torch.Tensor))
        source, target = torch.zeros(2, nbytes // 2, dtype=torch.uint8, device=device)

        def run():
            target.copy_(source)
            return {}

        return Work(run)

    return Provider("device copy", make, "ceiling")


# --- inputs -------------------------------------------------------------------------------------------------


def normal(options, *shape, std=1.0):
    return torch.randn(shape, device=options.device, dtype=options.dtype).mul_(std)


# Patterns of ignored rows: every seventh; a random half; the prompts of eight sequences, of different lengths
# and half of all tokens.
IGNORED = ("", "1/7 ignored", "half ignored", "prompts ignored")


def targets(options, rows, vocabulary, ignored=""):
    """Random classes, with -100 in the rows of the pattern ``ignored``, one of IGNORED."""
    target = torch.randint(vocabulary, (rows,), device=options.device)
    if ignored == "1/7 ignored":
        target[::7] = -100
    elif ignored == "half ignored":
        target[torch.randperm(rows, device=options.device)[: rows // 2]] = -100
    elif ignored == "prompts ignored":
        sequence = -(-rows // 8)
        position = torch.arange(rows, device=options.device)
        quarters = torch.where(position // sequence % 2 == 0, 1, 3)
        target[4 * (position % sequence) < quarters * sequence] = -100
    elif ignored:
        raise ValueError(f"targets: ignored is {ignored!r}, expected one of {IGNORED}")
    return target
