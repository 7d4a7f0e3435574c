# SPDX-License-Identifier: BSD-3-Clause
"""fused_linear_logprobs on the engine of compute capability 9.0: its control flow and its rules, on
processes that talk through gloo, with the compiled steps replaced by an implementation in torch
(shard_logprob_steps.py)."""

import contextlib
import itertools

import in_shards
import torch
import torch.distributed as dist
from cross_entropy_reference import leaves, random_layer
from processes import assert_same_bits, in_processes, part_of
from shard_logprob_steps import LogProbSteps
from shard_steps import replaced_steps
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.functional import linear

from liger.distributed.vocab import sm90

ROWS, HIDDEN, VOCAB = 700, 64, 1001
# Several chunks for each number of processes, and no room for all exponentials.
BUDGET = 150_000
TOLERANCE = 3e-5


@contextlib.contextmanager
def engine_calls(**changes):
    """Replaces the compiled steps; yields a list of ("forward" or "backward", chunk, whether exponentials are
    kept)."""
    ran = []

    class Steps(LogProbSteps):
        def logprobs(self, *arguments):
            ran.append(("forward", arguments[7], arguments[-1].numel() > 0))
            super().logprobs(*arguments)

        def logprob_gradients(self, *arguments):
            ran.append(("backward", arguments[13], arguments[8].numel() > 0))
            super().logprob_gradients(*arguments)

    for name, value in changes.items():
        setattr(Steps, name, value)
    with replaced_steps(Steps):
        yield ran


def exact_of(x, weight, target, temperature=1.0):
    ignored = target == -100
    logp = (linear(x.masked_fill(ignored[:, None], 0.0), weight) / temperature).log_softmax(-1)
    chosen = logp.gather(1, target.long().masked_fill(ignored, 0)[:, None])[:, 0]
    entropy = -(logp.exp() * logp.clamp(min=-1e30)).sum(-1)
    return chosen.masked_fill(ignored, 0.0), entropy.masked_fill(ignored, 0.0), logp.argmax(-1)


def assert_close(actual, expected, what, tolerance=TOLERANCE, scale=None):
    size = expected.norm() if scale is None else scale
    error = (actual.double() - expected).norm() / size.clamp_min(1e-30)
    assert error <= tolerance, f"{what}: error {error.item():.3g}"


def check(
    rank, world, what, x, weight, target, with_entropy=True, trained=(True, True), bounds=None, layout=None,
    budget=BUDGET, tolerance=TOLERANCE, between=contextlib.nullcontext, **chosen,
):  # fmt: skip
    """Results and gradients against float64; ``between``: a context of the backward."""
    layout = {"vocab_size": weight.shape[0]} if layout is None else layout
    mine = [leaves(x)[0].requires_grad_(trained[0]), part_of(weight, rank, world, bounds)]
    mine[1].requires_grad_(trained[1])
    found = in_shards.fused_linear_logprobs(
        *mine, target, memory_budget=budget, metrics=("entropy", "argmax"), **layout, **chosen
    )
    ignored = target == -100
    exact = leaves(x.masked_fill(ignored[:, None], 0.0).double(), weight.double())
    values = exact_of(*exact, target, **chosen)
    for name, value, expected in zip(("logprobs", "entropy"), found, values, strict=False):
        assert_close(value.detach(), expected.detach(), f"{what}: {name}", tolerance)
        assert_same_bits(value.detach(), f"{what}: {name}")
    assert torch.equal(found.argmax[~ignored], values[2][~ignored]) and (found.argmax[ignored] == -1).all()
    upstream = torch.randn(2, *target.shape)
    for (logprobs, entropy, *_), context in ((found, between), (values, contextlib.nullcontext)):
        wide = upstream.to(logprobs.dtype)
        with context():
            (wide[0] @ logprobs + (wide[1] @ entropy if with_entropy else 0.0)).backward()
    if trained[0]:
        assert_close(mine[0].grad, exact[0].grad, f"{what}: hidden", tolerance)
        assert_same_bits(mine[0].grad, f"{what}: hidden")
        assert not mine[0].grad[ignored].any(), what
    if trained[1]:
        expected = part_of(exact[1].grad, rank, world, bounds)
        # Relative to all classes: a process may have classes without much of a gradient.
        scale = exact[1].grad.norm() / exact[1].numel() ** 0.5 * expected.numel() ** 0.5
        assert_close(mine[1].grad, expected, f"{what}: weight", tolerance, scale)


@in_processes(1, 2, 3)
def test_every_option(rank, world):
    """Exponentials are kept where they fit the budget."""
    cases = itertools.product((1.0, 0.7), (False, True), (BUDGET, None))
    for seed, (temperature, with_entropy, budget) in enumerate(cases):
        torch.manual_seed(seed)
        x, weight, _, target = random_layer(ROWS, HIDDEN, VOCAB, "cpu")
        x[target == -100] = torch.nan
        what = f"temperature {temperature}, entropy {with_entropy}, budget {budget}"
        with engine_calls() as ran:
            check(rank, world, what, x, weight, target, with_entropy, budget=budget, temperature=temperature)
        chunks = {name: [i for kind, i, _ in ran if kind == name] for name in ("forward", "backward")}
        assert {kept for *_, kept in ran} == {budget is None}, (what, ran)
        for indices in chunks.values():
            assert indices == list(range(len(indices))) and (len(indices) > 1) == (budget is not None), what


@in_processes(1, 2, 3)
def test_references_of_processes_differ(rank, world):
    """Logits with a standard deviation of 80, of some classes of 4: the references of processes differ by
    hundreds of nats. Classes are targets of several rows, and ignored rows are NaN."""
    for seed, (budget, with_entropy) in enumerate(itertools.product((BUDGET, None), (False, True))):
        torch.manual_seed(seed)
        x, weight, _, target = random_layer(ROWS, HIDDEN, VOCAB, "cpu")
        x = 40 * x
        weight[: VOCAB // 2 + 1] /= 20
        target[target >= 0] %= 200 + 300 * (seed % 2)
        x[target == -100] = torch.nan
        LogProbSteps.overflows = LogProbSteps.moved = 0
        with engine_calls() as ran:
            check(rank, world, f"seed {seed}", x, weight, target, with_entropy, budget=budget, tolerance=1e-4)
            steps = sm90.steps
        counts = torch.tensor([steps.overflows, steps.moved])
        dist.all_reduce(counts)
        assert ran and counts[0] > 0 and (counts[1] > 0) == (world > 1 and budget is None), counts


@in_processes(2)
def test_layouts_and_what_is_trained(rank, world):
    x, weight, _, target = random_layer(ROWS, HIDDEN, VOCAB, "cpu")
    with engine_calls() as ran:
        for bounds, budget in itertools.product(([0, 1, VOCAB], [0, VOCAB - 130, VOCAB]), (BUDGET, None)):
            layout = {"vocab_start": bounds[rank], "vocab_size": VOCAB}
            check(rank, world, f"{bounds}", x, weight, target, bounds=bounds, layout=layout, budget=budget)
        for trained, entropy in itertools.product(((True, False), (False, True)), (False, True)):
            for budget in (BUDGET, None):
                check(rank, world, f"{trained}", x, weight, target, entropy, trained, budget=budget)
        check(rank, world, "int32 targets", x, weight, target.int())
        for kept in (1, 130):
            few = target.clone()
            few[few.nonzero().squeeze(1)[kept:]] = -100
            few[few == 0] = -100
            check(rank, world, f"{kept} rows", x, weight, few)
        assert ran
        # All rows ignored.
        mine = [leaves(x)[0], part_of(weight, rank, world)]
        none = torch.full_like(target, -100)
        found = in_shards.fused_linear_logprobs(*mine, none, vocab_size=VOCAB, metrics=("entropy",))
        (found.logprobs.sum() + found.entropy.sum()).backward()
        assert not any(t.any() for t in (*found[:2], mine[0].grad, mine[1].grad))
        # Sharded tokens and a DTensor weight.
        mesh = init_device_mesh("cpu", (world,))
        hidden, shard = (distribute_tensor(t, mesh, [Shard(0)]).requires_grad_() for t in (x, weight))
        in_shards.fused_linear_logprobs(hidden, shard, target).sum().backward()
        exact = leaves(x.double(), weight.double())
        exact_of(*exact, target)[0].sum().backward()
        for tensor, wanted in zip((hidden, shard), exact, strict=True):
            assert tensor.grad.placements == (Shard(0),)
            assert_close(tensor.grad.full_tensor(), wanted.grad, "DTensors")
        # A NaN is a NaN everywhere.
        broken = x.clone()
        broken[5], target[5] = torch.nan, 3
        for budget in (BUDGET, None):
            mine = [leaves(broken)[0], part_of(weight, rank, world)]
            found = in_shards.fused_linear_logprobs(*mine, target, vocab_size=VOCAB, memory_budget=budget)
            found.sum().backward()
            assert found[5].isnan() and mine[0].grad[5].isnan().all() and mine[1].grad.isnan().all()
            assert mine[0].grad[:5].isfinite().all() and found[:5].isfinite().all()


@in_processes(2)
def test_all_processes_choose_the_same(rank, world):
    """All processes choose the same engine, and forward and backward may be of different ones."""
    x, weight, bias, target = random_layer(ROWS, HIDDEN, VOCAB, "cpu")
    shard = part_of(weight, rank, world)

    def ran_for(*tensors, changes=None, **chosen):
        with engine_calls(**(changes or {"cluster_count": 60 + rank})) as ran:
            in_shards.fused_linear_logprobs(*tensors, vocab_size=VOCAB, **chosen)
        return bool(ran)

    assert ran_for(x, shard, target) and ran_for(x, shard, target, memory_budget=BUDGET)
    assert not ran_for(x, shard, target, part_of(bias, rank, world))
    for option in (
        {"softcap": 30.0},
        {"logits_dtype": torch.float32},
        {"metrics": ("log_sum_sq_probs",)},
        {"metrics": ("mean_logits",)},
    ):
        assert not ran_for(x, shard, target, **option), option
    assert not ran_for(x[:255], shard, target[:255]) and not ran_for(x[:0], shard, target[:0])
    assert not ran_for(x[:, :60].contiguous(), shard[:, :60].contiguous(), target)
    for changes in (
        {"cluster_count": rank},
        {"are_built": staticmethod(lambda: False)},
        {"take": staticmethod(lambda _: False)},
    ):
        assert not ran_for(x, shard, target, changes=changes), changes

    @contextlib.contextmanager
    def only(count, changes):
        with engine_calls(**changes) as ran:
            yield
        assert bool(ran) == (count > 0)

    without = {"are_built": staticmethod(lambda: False)}
    for budget in (BUDGET, None):
        with engine_calls():
            check(rank, world, "torch's backward", x, weight, target, budget=budget,
                  between=lambda: only(0, without))  # fmt: skip
        with engine_calls(**without):
            check(
                rank, world, "torch's forward", x, weight, target, budget=budget, between=lambda: only(1, {})
            )


@in_processes(2)
def test_autograd_and_compile(rank, world):
    x, weight, _, target = random_layer(ROWS, HIDDEN, VOCAB, "cpu")

    def loss(x, w, budget):
        found = in_shards.fused_linear_logprobs(
            x, w, target, vocab_size=VOCAB, temperature=0.5, metrics=("entropy",), memory_budget=budget
        )
        return found.logprobs.sum() + found.entropy.square().sum()

    with engine_calls() as ran:
        results = []
        for budget in (BUDGET, None):
            mine = [leaves(x)[0], part_of(weight, rank, world)]
            value = loss(*mine, budget)
            # Twice, and without gradients.
            first, second = (torch.autograd.grad(value, mine, retain_graph=True) for _ in range(2))
            assert all(map(torch.equal, first, second))
            results.append([value, *first])
            del ran[:]
            with torch.no_grad():
                assert torch.allclose(loss(*mine, budget), value)
            assert ran and not any(kept for *_, kept in ran)
        # Compiled code keeps nothing.
        del ran[:]
        mine = [leaves(x)[0], part_of(weight, rank, world)]
        value = torch.compile(loss, backend="aot_eager", fullgraph=True)(*mine, None)
        results.append([value, *torch.autograd.grad(value, mine)])
        assert ran and not any(kept for *_, kept in ran)
        # The results may change before the backward.
        mine = [leaves(x)[0], part_of(weight, rank, world)]
        logprobs = in_shards.fused_linear_logprobs(*mine, target, vocab_size=VOCAB)
        logprobs.mul_(2.0).sum().backward()
    for others in zip(*results, strict=True):
        for other in others[1:]:
            torch.testing.assert_close(other, others[0], rtol=1e-4, atol=1e-4)
