# SPDX-License-Identifier: BSD-3-Clause
"""How tiled_mlp plans its shards, what it keeps and where that lies, and that it holds no more."""

import itertools
from functools import partial

import pytest
import torch
import torch.nn.functional as F

import liger
from liger.ops.tiled_mlp.plan import Problem, Tiles, block_columns, forward_step, lay_out, plan_tiles

MIB = 1 << 20
SIZES = list(
    itertools.product(
        [1, 5, 127, 128, 129, 2048, 8191, 32768, 131072, 1_000_003],  # tokens
        [(64, 96), (4096, 12288), (1024, 4096)],
        [2, 4],
        [None, 1, 40 * MIB, 1 << 30, 1 << 40],
    )
)


class Memory:
    """What the allocator of a GPU counts: bytes by name, and the most there were at a time."""

    def __init__(self, **held):
        self.held, self.peak = held, sum(held.values())

    def get(self, **more):
        assert not self.held.keys() & more.keys()
        self.held |= more
        self.peak = max(self.peak, sum(self.held.values()))

    def let_go(self, *names):
        for name in names:
            del self.held[name]


def of_one_shard(problem):
    """The peak of a backward of one shard, by its allocations in order: beside its inputs, the result
    included."""
    activations = problem.rows * problem.row
    memory = Memory(y=problem.x, gate=activations, up=activations)
    memory.get(grad_down=problem.weight)
    for first in range(0, problem.intermediate, block_columns(problem)):
        columns = min(block_columns(problem), problem.intermediate - first)
        memory.get(hidden=problem.rows * columns * problem.element_size)
        memory.let_go("hidden")
    memory.get(grad_x=problem.x)
    if problem.packed:
        memory.get(grad_gate_up=2 * problem.weight)
    else:
        memory.get(grad_gate=problem.weight)
        memory.let_go("gate")
        memory.get(grad_up=problem.weight)
    return memory.peak


def of_shards(problem, tiles):
    """The same of several shards, whose product is gone when the gradient of x begins to exist."""
    row, sums = problem.row, problem.weight + problem.sums // 3
    memory = Memory(y=problem.x)
    if tiles.spare_rows:
        # All that the shards need, the gradient of x too, is in these.
        memory.get(kept=2 * row * tiles.kept_rows, hidden=row * tiles.spare_rows)
        memory.get(down=sums, gate=sums, up=sums)
        memory.let_go("hidden")
    else:
        assert not tiles.kept_rows
        memory.get(working=2 * row * tiles.shard_rows)
        for step in range(0, problem.rows, tiles.shard_rows):
            memory.get(hidden=row * min(tiles.shard_rows, problem.rows - step))
            if step == 0:
                memory.get(down=sums)
            memory.let_go("hidden")
            if step == 0:
                memory.get(grad_x=problem.x, gate=sums, up=sums)
        memory.let_go("working")
    if problem.sums:
        for name in ("gate", "up", "down"):
            memory.get(**{f"rounded_{name}": problem.weight})
            memory.let_go(name)
    return memory.peak


def of_backward(problem, tiles):
    return of_one_shard(problem) if tiles.has_one(problem.rows) else of_shards(problem, tiles)


def of_forward(problem, tiles):
    rows = min(forward_step(problem, tiles), problem.rows)
    working = 0 if tiles.kept_rows else 2 * rows
    return problem.x + problem.row * (2 * tiles.kept_rows + working + rows)


def results(problem):
    return 2 * problem.x + 3 * problem.weight


def of_eager(problem):
    """Eager code keeps gate, up, silu(gate) and the product, and its backward makes three of that size at its
    peak."""
    activations = problem.rows * problem.row
    # The result and the gradient of down_weight exist by then. Of few tokens, the end is the peak.
    middle = problem.x + problem.weight + 6 * activations
    return max(middle, results(problem) + activations * (2 if problem.packed else 1))


def problems():
    for tokens, (hidden, intermediate), element_size, budget in SIZES:
        for packed in (False, True):
            yield Problem(tokens, hidden, intermediate, element_size, packed), budget


def test_plans_keep_to_the_budget():
    for problem, budget in problems():
        tiles = plan_tiles(problem, None, budget)
        assert tiles.shard_rows >= 1 and 0 <= tiles.kept_rows <= problem.rows
        assert 1 <= tiles.forward_rows <= problem.rows or tiles.spare_rows
        if budget is not None:
            least = problem.sums + 128 * 3 * problem.row
            # What is kept is whole rows. The first gradient is there beside its float32 sum.
            most = max(budget, least) + 2 * problem.row + (problem.weight if problem.sums else 0)
            assert of_backward(problem, tiles) - results(problem) <= most, (problem, budget, tiles)


def test_default_plans_of_the_sizes_in_the_notes():
    def plan(tokens, packed=False):
        return plan_tiles(Problem(tokens, 4096, 12288, 2, packed))

    def peak(tokens, packed=False):
        return of_backward(Problem(tokens, 4096, 12288, 2, packed), plan(tokens, packed)) / MIB

    assert plan(2048) == Tiles(2048, 2048, 2048)
    assert plan(8192) == Tiles(8192, 8192, 8192)
    assert plan(14336) == Tiles(14336, 14336, 14336)
    long = Problem(14336, 4096, 12288, 2)
    assert forward_step(long, plan(14336)) == 7168 and block_columns(long) == 6144
    assert plan(32768) == Tiles(4096, 8192, 9558, 4096)
    assert plan(131072) == Tiles(4096, 8192, 25942, 4096)
    sizes = (2048, 8192, 14336, 32768, 131072)
    assert [round(peak(tokens)) for tokens in sizes] == [368, 704, 1088, 1376, 2912]
    assert [round(peak(tokens, packed=True)) for tokens in (2048, 8192)] == [416, 800]


def test_the_forward_is_not_the_peak():
    """Where it need not be: parts of tokens that were asked for are its parts, too."""
    for problem, budget in problems():
        tiles = plan_tiles(problem, None, budget)
        assert of_forward(problem, tiles) <= of_backward(problem, tiles) + problem.row, (problem, budget)


def test_never_more_memory_than_without_shards():
    for problem, _ in problems():
        for num_shards in (None, 1, 2, 4, 50):
            if num_shards is not None and num_shards > problem.rows:
                continue
            tiles = plan_tiles(problem, num_shards)
            most = of_eager(problem)
            assert of_forward(problem, tiles) <= most and of_backward(problem, tiles) <= most, (
                problem,
                num_shards,
            )


def test_shards_are_joined_where_that_takes_no_more_memory():
    """Of the two backwards, the one with the smaller peak. Nothing is kept for it."""
    joined = total = 0
    for problem, _ in problems():
        for num_shards in (2, 3, 4, 7, 100, 4096):
            if num_shards > problem.rows:
                continue
            total += 1
            tiles = plan_tiles(problem, num_shards)
            asked = Tiles(tiles.forward_rows, tiles.forward_rows, 0)
            assert tiles.kept_rows == tiles.spare_rows == 0
            assert -(-problem.rows // tiles.forward_rows) <= num_shards
            if tiles.has_one(problem.rows):
                joined += 1
                assert of_one_shard(problem) <= of_shards(problem, asked), (problem, num_shards)
            else:
                assert tiles == asked
                assert of_one_shard(problem) > of_shards(problem, asked), (problem, num_shards)
    assert 100 < joined < total - 100


@pytest.mark.parametrize("budget", [1, 40 * MIB, 1 << 30, 1 << 40])
@pytest.mark.parametrize("num_shards", [None, 4])
def test_a_budget_is_for_one_shard_where_that_takes_no_more(budget, num_shards):
    few, many = Problem(2048, 4096, 12288, 2), Problem(1_000_003, 4096, 12288, 2)
    forward = 2048 if num_shards is None else 512
    assert plan_tiles(few, num_shards, budget) == Tiles(forward, 2048, 2048)
    tiles = plan_tiles(many, num_shards, budget)
    if budget == 1 << 40 and num_shards is None:
        assert tiles.has_one(many.rows)
    else:
        assert of_one_shard(many) > of_shards(many, tiles)


def spans(steps, tokens, hidden, intermediate, tiles):
    """Per step, what it uses of the shared memory as (first, end): gate and up, hidden gradient, gradient of
    x."""
    for step in steps:
        rows = step.stop - step.start
        hidden_span = (0, 0) if step.hidden is None else (step.hidden, step.hidden + rows * intermediate)
        yield (
            (step.gate_up, step.gate_up + rows * 2 * intermediate),
            hidden_span,
            (step.start * hidden, step.stop * hidden),
        )


def apart(a, b):
    return a[1] <= b[0] or b[1] <= a[0] or a[0] == a[1] or b[0] == b[1]


def test_nothing_is_overwritten_in_the_shared_memory():
    """No step writes over activations that are still to come, or over gradients of x that are there."""
    looked_at = 0
    for tokens, (hidden, intermediate), element_size, budget in [*SIZES, (3000, (64, 64), 4, 1 << 20)]:
        tiles = plan_tiles(Problem(tokens, hidden, intermediate, element_size), None, budget)
        if not tiles.spare_rows:
            continue
        looked_at += 1
        memory = tiles.kept_rows * 2 * intermediate
        steps = lay_out(tokens, hidden, intermediate, tiles)
        assert [s.start for s in steps] == [0, *(s.stop for s in steps[:-1])] and steps[-1].stop == tokens
        for step, (gate_up, hidden_span, grad) in zip(
            steps, spans(steps, tokens, hidden, intermediate, tiles), strict=True
        ):
            rows = step.stop - step.start
            assert 0 < rows <= tiles.shard_rows
            there, to_come = (0, grad[0]), (step.stop * 2 * intermediate, memory)
            if step.start < tiles.kept_rows:
                assert step.stop <= tiles.kept_rows and gate_up[0] == step.start * 2 * intermediate
                assert apart(hidden_span, to_come) and apart(grad, to_come)
            assert gate_up[1] <= memory and hidden_span[1] <= memory and grad[1] <= memory
            assert apart(gate_up, there) and apart(hidden_span, there) and apart(gate_up, hidden_span)
            if step.hidden is None:
                assert rows <= tiles.spare_rows
            if not apart(grad, gate_up):
                # It waits in the spare buffer.
                assert step.hidden is None and rows * hidden <= tiles.spare_rows * intermediate
    assert looked_at > 20


def test_shards_of_the_long_sequence_in_the_notes():
    tiles = plan_tiles(Problem(131072, 4096, 12288, 2))
    rows = [step.stop - step.start for step in lay_out(131072, 4096, 12288, tiles)]
    assert min(rows) >= 1024 and len(rows) <= 26


def test_given_numbers_of_shards():
    thousand = Problem(1000, 8, 8, 4)
    assert plan_tiles(Problem(10, 8, 8, 4), 3) == Tiles(4, 10, 0)
    assert plan_tiles(Problem(10, 8, 8, 4), 5) == Tiles(2, 2, 0)
    assert plan_tiles(thousand, 4) == Tiles(256, 256, 0)
    assert plan_tiles(thousand, 999) == Tiles(2, 2, 0)
    assert plan_tiles(thousand, 4, 1 << 30) == Tiles(256, 256, 1000, 256)
    assert plan_tiles(thousand, 4, 1 << 30, keep=False) == Tiles(256, 256, 0)
    # What is kept would be no place for the rest.
    assert plan_tiles(Problem(1000, 8, 4, 4), 4, 1 << 30) == Tiles(256, 256, 0)
    assert plan_tiles(Problem(0, 8, 8, 4)) == plan_tiles(Problem(0, 8, 8, 4), 1) == Tiles(0, 0, 0)


def test_budget_from_the_environment(monkeypatch):
    problem = Problem(1 << 20, 4096, 12288, 2)
    default = plan_tiles(problem)
    monkeypatch.setenv("LIGER_MEMORY_BUDGET", "4G")
    assert plan_tiles(problem) == plan_tiles(problem, None, 4 << 30) != default
    monkeypatch.setenv("LIGER_MEMORY_BUDGET", "")
    assert plan_tiles(problem) == default


# Of each block, the caching allocator leaves up to 1 MiB that it does not split off.
UNSPLIT = 3 * MIB


def measured(call, tensors, upstream):
    """Bytes that a forward and backward allocate at their peak, the second time."""
    for _ in range(2):
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # A cached block may be up to 1 MiB larger than the tensor that gets it.
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        y = call(*tensors)
        grads = torch.autograd.grad(y, tensors, upstream)
        peak = torch.cuda.max_memory_allocated() - before
        del y, grads
    return peak


def mlp_inputs(device, tokens, hidden, intermediate):
    shapes = [(tokens, hidden), (intermediate, hidden), (intermediate, hidden), (hidden, intermediate)]
    tensors = [torch.randn(s, device=device, dtype=torch.bfloat16, requires_grad=True) for s in shapes]
    return tensors, torch.randn_like(tensors[0])


@pytest.mark.gpu
@pytest.mark.parametrize("budget", [64 * MIB, 96 * MIB, 1 << 30])
def test_peak_memory(device, backend, budget):
    """At its peak the op holds what the plan says."""
    if backend == "torch":
        pytest.skip("the formula of swiglu has float32 tensors of its own")
    sizes = (8192, 512, 2048)
    peak = measured(partial(liger.tiled_mlp, memory_budget=budget), *mlp_inputs(device, *sizes))
    problem = Problem(*sizes, 2)
    assert peak <= of_backward(problem, plan_tiles(problem, None, budget)) + UNSPLIT


@pytest.mark.gpu
@pytest.mark.parametrize("num_shards", [None, 4])
@pytest.mark.parametrize("tokens", [1024, 2048])
def test_peak_memory_of_few_tokens(device, backend, tokens, num_shards):
    """No more than eager code's, and what the plan says; with shards, too."""
    if backend == "torch":
        pytest.skip("the formula of swiglu has float32 tensors of its own")

    def eager(x, gate, up, down):
        return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)

    inputs = mlp_inputs(device, tokens, 1024, 3072)
    peak = measured(partial(liger.tiled_mlp, num_shards=num_shards), *inputs)
    problem = Problem(tokens, 1024, 3072, 2)
    tiles = plan_tiles(problem, num_shards)
    assert tiles.has_one(tokens)
    assert peak <= of_backward(problem, tiles) + UNSPLIT
    assert peak <= measured(eager, *inputs) + UNSPLIT
