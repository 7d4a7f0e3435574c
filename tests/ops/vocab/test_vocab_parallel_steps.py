# SPDX-License-Identifier: BSD-3-Clause
"""fused_linear_ce on the engine of compute capability 9.0: its control flow and its rules, on processes
that talk through gloo, with the compiled steps replaced by an implementation in torch (shard_steps.py)."""

import contextlib
import inspect
import itertools
import pathlib
import re

import in_shards
import pytest
import torch
import torch.distributed as dist
from cross_entropy_reference import OPTIONS, leaves, options, random_layer, reference
from processes import assert_same_bits, in_processes, part_of
from shard_logprob_steps import LogProbSteps
from shard_steps import ReferenceSteps, replaced_steps
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.functional import linear

from liger.distributed.vocab import sm90

ROWS, HIDDEN, VOCAB = 700, 64, 1001
# Several chunks, for each number of processes.
BUDGET = 150_000
TOLERANCE = 2e-5
SOURCES = [
    pathlib.Path(__file__).parents[3] / "csrc/lm_head/sm90" / name
    for name in ("shards/fused_linear_ce.cu", "shards/logprobs.cu")
]


@contextlib.contextmanager
def engine_calls(**changes):
    """Replaces the compiled steps; yields the list of chunks for which the row rule ran."""
    ran = []

    class Steps(ReferenceSteps):
        def rule(self, *arguments):
            ran.append(arguments[_INDEX_OF_RULE])
            super().rule(*arguments)

    for name, value in changes.items():
        setattr(Steps, name, value)
    with replaced_steps(Steps):
        yield ran


_INDEX_OF_RULE = list(inspect.signature(ReferenceSteps.rule).parameters).index("index") - 1


def assert_close(actual, expected, what):
    error = (actual.double() - expected).norm() / expected.norm().clamp_min(1e-30)
    assert error <= TOLERANCE, f"{what}: error {error.item():.3g}"


def check(rank, world, what, x, weight, target, trained=(True, True), bounds=None, layout=None, **chosen):
    """Results and gradients against float64."""
    layout = {"vocab_size": weight.shape[0]} if layout is None else layout
    mine = [leaves(x)[0].requires_grad_(trained[0]), part_of(weight, rank, world, bounds)]
    mine[1].requires_grad_(trained[1])
    found = in_shards.fused_linear_ce(
        *mine, target, memory_budget=BUDGET, metrics=("z_loss", "logprobs"), **layout, **chosen
    )
    ignored = target == chosen.get("ignore_index", -100)
    exact = leaves(x.masked_fill(ignored[:, None], 0.0).double(), weight.double())
    values = reference(linear(*exact), target, **chosen)
    for name in ("loss", "z_loss", "logprobs"):
        value = getattr(found, name)
        assert_close(value.detach(), values[name].detach(), f"{what}: {name}")
        assert_same_bits(value.detach(), f"{what}: {name}")
    if not any(trained):
        return
    upstream = torch.rand(found.loss.shape) + 0.5
    found.loss.backward(upstream)
    values["loss"].backward(upstream.double())
    if trained[0]:
        assert_close(mine[0].grad, exact[0].grad, f"{what}: input")
        assert_same_bits(mine[0].grad, f"{what}: input")
        assert not mine[0].grad[ignored].any(), what
    if trained[1]:
        expected = part_of(exact[1].grad, rank, world, bounds)
        # Relative to all classes: a process may have classes without much of a gradient.
        scale = exact[1].grad.norm() / exact[1].numel() ** 0.5 * expected.numel() ** 0.5
        assert (mine[1].grad.double() - expected).norm() <= TOLERANCE * scale, f"{what}: weight"


SUPPORTED = [name for name in OPTIONS if "smoothing" not in " ".join(OPTIONS[name])]


@in_processes(1, 2, 3)
def test_every_option(rank, world):
    """Label smoothing takes the GEMMs of torch."""
    assert len(SUPPORTED) >= 7
    for i, (name, reduction) in enumerate(itertools.product(OPTIONS, ("mean", "sum", "none"))):
        torch.manual_seed(i)
        chosen = options(name, ROWS, VOCAB, "cpu", reduction)
        x, weight, _, target = random_layer(
            ROWS, HIDDEN, VOCAB, "cpu", ignore_index=chosen.get("ignore_index", -100)
        )
        with engine_calls() as ran:
            check(rank, world, f"{name}, {reduction}", x, weight, target, **chosen)
        assert (max(ran, default=0) > 0) == (name in SUPPORTED), (name, ran)


@in_processes(1, 2, 3)
def test_references_of_processes_differ(rank, world):
    """Logits with a standard deviation of 80, of some classes of 4: the references of processes differ by
    hundreds of nats, also where no tile overflows. Classes are targets of several rows, and ignored rows are
    NaN."""
    for seed, softcap in ((0, None), (1, None), (2, 120.0)):
        torch.manual_seed(seed)
        x, weight, _, target = random_layer(ROWS, HIDDEN, VOCAB, "cpu")
        x = 40 * x
        weight[: VOCAB // 2 + 1] /= 20
        target[target >= 0] %= 200 + 300 * seed
        x[target == -100] = torch.nan
        ReferenceSteps.overflows = ReferenceSteps.moved = 0
        with engine_calls() as ran:
            check(rank, world, f"seed {seed}", x, weight, target, softcap=softcap, lse_square_scale=1e-4)
            steps = sm90.steps
        counts = torch.tensor([steps.overflows, steps.moved])
        dist.all_reduce(counts)
        assert ran and counts[0] > 0 and (counts[1] > 0) == (world > 1)


@in_processes(2)
def test_layouts_and_what_is_trained(rank, world):
    x, weight, _, target = random_layer(ROWS, HIDDEN, VOCAB, "cpu")
    with engine_calls() as ran:
        for bounds in ([0, 1, VOCAB], [0, VOCAB - 130, VOCAB]):
            layout = {"vocab_start": bounds[rank], "vocab_size": VOCAB}
            check(rank, world, f"bounds {bounds}", x, weight, target, bounds=bounds, layout=layout)
        for trained in ((True, False), (False, True), (False, False)):
            check(rank, world, f"trained {trained}", x, weight, target, trained)
        for kept in (0, 1, 130):
            few = target.clone()
            few[few.nonzero().squeeze(1)[kept:]] = -100
            few[few == 0] = -100
            check(rank, world, f"{kept} rows", x, weight, few, reduction="sum")
        assert ran
        # Sharded tokens and a DTensor weight.
        mesh = init_device_mesh("cpu", (world,))
        hidden, shard = (distribute_tensor(t, mesh, [Shard(0)]).requires_grad_() for t in (x, weight))
        del ran[:]
        in_shards.fused_linear_ce(hidden, shard, target, memory_budget=BUDGET).backward()
        assert len(ran) > 1
        exact = leaves(x.double(), weight.double())
        reference(linear(*exact), target)["loss"].backward()
        for tensor, wanted in zip((hidden, shard), exact, strict=True):
            assert tensor.grad.placements == (Shard(0),)
            assert_close(tensor.grad.full_tensor(), wanted.grad, "DTensors")
        # A NaN is a NaN everywhere.
        broken = x.clone()
        broken[5], target[5] = torch.nan, 3
        mine = [leaves(broken)[0], part_of(weight, rank, world)]
        loss = in_shards.fused_linear_ce(*mine, target, vocab_size=VOCAB, memory_budget=BUDGET)
        loss.backward()
        assert loss.isnan() and mine[0].grad[5].isnan().all() and mine[1].grad.isnan().all()
        assert mine[0].grad[:5].isfinite().all()


@in_processes(2)
def test_all_processes_choose_the_same(rank, world):
    """All processes choose the same engine, and the same chunks."""
    x, weight, bias, target = random_layer(ROWS, HIDDEN, VOCAB, "cpu")
    shard = part_of(weight, rank, world)

    def ran_for(*tensors, **chosen):
        with engine_calls(cluster_count=60 + rank) as ran:
            in_shards.fused_linear_ce(*tensors, vocab_size=VOCAB, memory_budget=BUDGET, **chosen)
            group = dist.group.WORLD
            assert all(n == 60 for known in sm90._agreed.values() for n in known.values())
            assert not ran or group in sm90._agreed
        return bool(ran)

    assert ran_for(x, shard, target)
    assert not ran_for(x, shard, target, part_of(bias, rank, world))
    assert not ran_for(x, shard, target, label_smoothing=0.1)
    assert not ran_for(x[:255], shard, target[:255]) and not ran_for(
        x[:0], shard, target[:0], reduction="sum"
    )
    assert not ran_for(x[:, :60].contiguous(), shard[:, :60].contiguous(), target)
    for changes in (
        {"cluster_count": rank},
        {"are_built": staticmethod(lambda: False)},
        {"take": staticmethod(lambda _: False)},
    ):
        with engine_calls(**changes) as ran:
            in_shards.fused_linear_ce(x, shard, target, vocab_size=VOCAB, memory_budget=BUDGET)
        assert not ran, changes
    with pytest.raises(RuntimeError, match=r"ce_weight has shape \(3,\), expected \(1001,\)"):
        ran_for(x, shard, target, ce_weight=torch.ones(3))


# --- without processes --------------------------------------------------------------------------------------


def test_the_steps_have_the_arguments_of_the_ops():
    """They are called by position."""
    schemas = {}
    for text in re.findall(r'm\.def\("(.*)"\);', "".join(source.read_text() for source in SOURCES)):
        schema = torch._C.parse_schema(f"liger_sm90::{text}")
        schemas[schema.name.removeprefix("liger_sm90::shard_")] = [a.name for a in schema.arguments]
    loss = {"clusters", "memory", "begin", "exponentials", "rule", "grad_weight", "finish"}
    assert schemas.keys() == loss | {"logprobs_begin", "logprobs", "logprob_gradients"}
    for name, arguments in schemas.items():
        parameters = list(inspect.signature(getattr(LogProbSteps, name)).parameters)
        assert [p for p in parameters if p != "self"] == arguments, name


@pytest.mark.parametrize(("rows", "hidden"), [(8192, 2048), (16384, 2048), (8192, 4096), (16384, 4096)])
def test_memory_of_a_device(rows, hidden):
    """Beyond its inputs, no more than the whole head on one device takes; the sizes of docs/lab/heads.md."""
    mib, vocab, world = 1 << 20, 128256, 2

    def bytes_of(classes, float32_sum):
        plan = sm90.plan_chunks_sm90(rows, hidden, classes, True, True, True, 512 * mib, 66)
        panels = -(-classes // 128) + plan.panel_offset
        most = max(chunk.rows for chunk in plan.chunks)
        gradients = 2 * hidden * (rows + panels * 128)
        return gradients + panels * plan.workspace_panel_bytes + (4 * most * hidden if float32_sum else 0)

    assert bytes_of(vocab // world, True) <= bytes_of(vocab, False)
