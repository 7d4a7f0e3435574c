"""How tiled_mlp plans its shards, what it keeps and where that lies, and that it holds no more."""

import itertools

import pytest
import torch

import liger
from liger.ops._tiles import Tiles, lay_out, plan_tiles

MIB = 1 << 20
SIZES = list(
    itertools.product(
        [1, 5, 127, 128, 129, 2048, 8191, 32768, 131072, 1_000_003],  # tokens
        [(64, 96), (4096, 12288), (1024, 4096)],
        [2, 4],
        [None, 1, 40 * MIB, 1 << 30, 1 << 40],
    )
)


def held(tokens, hidden, intermediate, element_size, tiles):
    """Bytes that the backward holds beyond results and gradients, by the list in docs/performance/tiled_mlp.md."""
    row = intermediate * element_size
    if tiles.shard_rows == tokens:
        missing = tokens * hidden * element_size + 2 * hidden * row
        return max(2 * row * tokens, 3 * row * tokens - missing)
    sums = 3 * hidden * intermediate * (4 - element_size)
    if not tiles.spare_rows:
        return sums + 3 * row * tiles.shard_rows
    return sums + 2 * row * tiles.kept_rows - tokens * hidden * element_size + row * tiles.spare_rows


def test_plans_keep_to_the_budget():
    for tokens, (hidden, intermediate), element_size, budget in SIZES:
        tiles = plan_tiles(tokens, hidden, intermediate, element_size, None, budget)
        assert tiles.shard_rows >= 1 and 0 <= tiles.kept_rows <= tokens
        if budget is not None:
            least = 3 * hidden * intermediate * (4 - element_size) + 128 * 3 * intermediate * element_size
            bytes_held = held(tokens, hidden, intermediate, element_size, tiles)
            # What is kept is whole rows.
            most = max(budget, least) + 2 * intermediate * element_size
            assert bytes_held <= most, (tokens, hidden, element_size, budget, tiles)


def test_default_plans_of_the_sizes_in_the_notes():
    def plan(tokens):
        return plan_tiles(tokens, 4096, 12288, 2)

    def beyond_inputs(tokens):
        results = 2 * tokens * 4096 * 2 + 3 * 4096 * 12288 * 2
        return (results + held(tokens, 4096, 12288, 2, plan(tokens))) / MIB

    assert plan(2048) == Tiles(2048, 2048)
    assert plan(8192) == Tiles(8192, 8192)
    assert plan(32768) == Tiles(8192, 9558, 4096)
    assert plan(131072) == Tiles(8192, 25942, 4096)
    assert [round(beyond_inputs(tokens)) for tokens in (2048, 8192, 32768, 131072)] == [416, 800, 1376, 2912]


def test_never_more_memory_than_without_shards():
    """Eager keeps gate, up, silu(gate) and the product, and its backward makes three of that size at its peak."""
    for tokens, (hidden, intermediate), element_size, _ in SIZES:
        tiles = plan_tiles(tokens, hidden, intermediate, element_size)
        eager = 6 * tokens * intermediate * element_size
        assert held(tokens, hidden, intermediate, element_size, tiles) <= eager


def spans(steps, tokens, hidden, intermediate, tiles):
    """Per step, what it uses of the shared memory as (first, end): gate and up, hidden gradient, gradient of x."""
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
        tiles = plan_tiles(tokens, hidden, intermediate, element_size, None, budget)
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
    tiles = plan_tiles(131072, 4096, 12288, 2)
    rows = [step.stop - step.start for step in lay_out(131072, 4096, 12288, tiles)]
    assert min(rows) >= 1024 and len(rows) <= 26


def test_given_numbers_of_shards():
    assert plan_tiles(10, 8, 8, 4, 3) == Tiles(4, 0)
    assert plan_tiles(1000, 8, 8, 4, 4) == Tiles(256, 0)
    assert plan_tiles(1000, 8, 8, 4, 999) == Tiles(2, 0)
    assert plan_tiles(1000, 8, 8, 4, 4, 1 << 30) == Tiles(256, 1000, 256)
    assert plan_tiles(1000, 8, 8, 4, 4, 1 << 30, keep=False) == Tiles(256, 0)
    assert plan_tiles(1000, 8, 4, 4, 4, 1 << 30) == Tiles(
        256, 0
    )  # what is kept would be no place for the rest
    assert plan_tiles(0, 8, 8, 4) == plan_tiles(0, 8, 8, 4, 1) == Tiles(0, 0)


def test_budget_from_the_environment(monkeypatch):
    default = plan_tiles(1 << 20, 4096, 12288, 2)
    monkeypatch.setenv("LIGER_MEMORY_BUDGET", "4G")
    assert (
        plan_tiles(1 << 20, 4096, 12288, 2) == plan_tiles(1 << 20, 4096, 12288, 2, None, 4 << 30) != default
    )
    monkeypatch.setenv("LIGER_MEMORY_BUDGET", "")
    assert plan_tiles(1 << 20, 4096, 12288, 2) == default


@pytest.mark.gpu
def test_peak_memory(device, backend):
    """At its peak the op holds what the plan says, and a little for what is kept per call."""
    if backend == "torch":
        pytest.skip("the formula of swiglu has float32 tensors of its own")
    tokens, hidden, intermediate = 8192, 512, 2048
    shapes = [(tokens, hidden), (intermediate, hidden), (intermediate, hidden), (hidden, intermediate)]
    tensors = [torch.randn(s, device=device, dtype=torch.bfloat16, requires_grad=True) for s in shapes]
    upstream = torch.randn_like(tensors[0])
    for budget in (64 * MIB, 96 * MIB, 1 << 30):
        for _ in range(2):
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            y = liger.tiled_mlp(*tensors, memory_budget=budget)
            grads = torch.autograd.grad(y, tensors, upstream)
            peak = torch.cuda.max_memory_allocated() - before
            given = sum(t.nbytes for t in (y, *grads))
            del y, grads
        tiles = plan_tiles(tokens, hidden, intermediate, 2, None, budget)
        # When the working memory is gone, one gradient is there beside its float32 sum.
        assert peak - given <= held(tokens, hidden, intermediate, 2, tiles) + tensors[1].nbytes + MIB
