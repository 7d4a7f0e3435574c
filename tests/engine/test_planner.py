# SPDX-License-Identifier: BSD-3-Clause
"""How fused_linear_ce cuts its rows: properties of the plans of many problems, and the environment
variable."""

import itertools
import os

import pytest
import torch
from forked_python import python

import liger

MIB = 1 << 20
PROBLEMS = list(
    itertools.product(
        [1, 2, 127, 128, 129, 1000, 4096, 16384, 100003],  # rows
        [1, 64, 2048, 4096],  # hidden
        [1, 7, 1000, 32003, 128256],  # vocab
        [2, 4, 8],  # bytes per element
        [False, True],  # weight gradient
        [False, True],  # exact accumulation
        [1, 10_000, 64 * MIB, 512 * MIB, 1 << 40],  # budget
    )
)


def plan(*problem):
    return torch.ops.liger.plan_chunks(*problem)


def ceil_div(a, b):
    return -(-a // b)


def row_bytes(vocab, element_size):
    """Rows of logits start at multiples of 16 bytes."""
    return ceil_div(vocab * element_size, 16) * 16


def sums_in_float32(element_size, need_grad_weight, exact):
    return need_grad_weight and exact and element_size < 4


def test_every_row_is_in_one_chunk():
    for problem in PROBLEMS:
        rows, _, vocab, element_size = problem[:4]
        chunk_rows, chunks, logits_bytes, _ = plan(*problem)
        assert 1 <= chunk_rows <= rows, problem
        assert (chunks - 1) * chunk_rows < rows <= chunks * chunk_rows, problem
        assert logits_bytes == chunk_rows * row_bytes(vocab, element_size), problem


def test_within_the_budget_or_in_memory_that_is_needed_anyway():
    for problem in PROBLEMS:
        _, hidden, vocab, element_size, need_grad_weight, exact, budget = problem
        _, chunks, logits_bytes, accumulator_bytes = plan(*problem)
        allowed = max(budget, row_bytes(vocab, element_size))  # one row is the least there can be
        if sums_in_float32(element_size, need_grad_weight, exact):
            # One chunk: instead of the float32 sum. Several: in the memory of the final gradient.
            allowed = max(allowed, 4 * vocab * hidden if chunks == 1 else element_size * vocab * hidden)
        assert logits_bytes <= allowed, problem
        wants_sum = chunks > 1 and sums_in_float32(element_size, need_grad_weight, exact)
        assert accumulator_bytes == (4 * vocab * hidden if wants_sum else 0), problem


def test_never_more_chunks_than_the_budget_asks_for():
    for problem in PROBLEMS:
        rows, hidden, vocab, element_size, need_grad_weight, exact, budget = problem
        fitting = max(1, budget // row_bytes(vocab, element_size))
        hosted = vocab * hidden * element_size // row_bytes(vocab, element_size)
        if fitting < rows and sums_in_float32(element_size, need_grad_weight, exact) and hosted >= 2048:
            fitting = min(fitting, hosted)  # memory that is there anyway is enough for full speed
        assert plan(*problem)[1] <= ceil_div(rows, fitting), problem


def test_chunks_are_equal_up_to_a_tile():
    for problem in PROBLEMS:
        rows = problem[0]
        chunk_rows, chunks, _, _ = plan(*problem)
        assert chunk_rows - ceil_div(rows, chunks) < 128, problem


def test_chunks_are_whole_tiles_where_the_budget_allows():
    for problem in PROBLEMS:
        _, hidden, vocab, element_size, need, exact, budget = problem
        chunk_rows, chunks, _, _ = plan(*problem)
        if chunks > 1 and chunk_rows % 128:
            rounded = ceil_div(chunk_rows, 128) * 128
            hosted = element_size * vocab * hidden if sums_in_float32(element_size, need, exact) else budget
            assert rounded * row_bytes(vocab, element_size) > min(budget, hosted), problem


def test_a_larger_budget_never_makes_more_chunks():
    for problem in itertools.product(
        [1000, 16384], [64, 4096], [7, 32003], [2, 4], [False, True], [False, True]
    ):
        counts = [plan(*problem, 1 << bits)[1] for bits in range(10, 42)]
        assert counts == sorted(counts, reverse=True) and counts[-1] == 1, problem


# --- where the logits of the chunks lie ---------------------------------------------------------------------

OWN_MEMORY, IN_GRAD_WEIGHT, IN_GRAD_INPUT = range(3)
PLACED = [p for p in PROBLEMS[::5] if p[0] // plan(*p)[0] < 300]


def lay_out(problem, need_grad_input, *valid):
    *sizes, need_grad_weight, exact, budget = problem
    return torch.ops.liger.lay_out_chunks(*sizes, need_grad_input, need_grad_weight, exact, budget, *valid)


@pytest.mark.parametrize("need_grad_input", [False, True])
def test_chunks_cover_the_rows_and_stay_in_their_memory(need_grad_input):
    places = set()
    for problem in PLACED:
        rows, hidden, vocab, element_size = problem[:4]
        chunk_rows, _, logits_bytes, accumulator_bytes = plan(*problem)
        place, stride, elements, accumulator, head, counts, offsets = lay_out(problem, need_grad_input)
        places.add(place)
        assert sum(counts) == rows and accumulator == accumulator_bytes, problem
        assert stride * element_size == row_bytes(vocab, element_size), problem
        assert 0 <= head <= counts[0], problem
        first = 0
        for count, offset in zip(counts, offsets, strict=True):
            assert count >= min(chunk_rows, rows - first), problem
            assert offset + count * stride <= elements, problem
            if place == IN_GRAD_INPUT:
                assert offset >= (first + count) * hidden, "over a gradient that is written"
            first += count
        held = {
            OWN_MEMORY: logits_bytes // element_size,
            IN_GRAD_WEIGHT: vocab * hidden,
            IN_GRAD_INPUT: rows * hidden + logits_bytes // element_size,
        }
        assert elements == held[place], problem
        if place == IN_GRAD_WEIGHT:
            assert accumulator_bytes > 0, "the gradient itself is summed there"
    assert places == ({OWN_MEMORY, IN_GRAD_WEIGHT, IN_GRAD_INPUT} if need_grad_input else {0, 1})


@pytest.mark.parametrize("need_grad_input", [False, True])
def test_valid_rows_change_neither_the_memory_nor_where_the_head_lies(need_grad_input):
    for problem in PLACED:
        rows, hidden = problem[:2]
        *fixed, counts, offsets = lay_out(problem, need_grad_input)
        place, stride, elements, _, head = fixed
        for valid in {0, 1, rows // 3, rows - 1, rows}:
            *same, fewer, places = lay_out(problem, need_grad_input, valid, 0)
            assert same == fixed and sum(fewer) in (valid, rows), problem
            assert len(fewer) <= len(counts) and places[:1] in ([], offsets[:1]), problem
            first = 0
            for count, offset in zip(fewer, places, strict=True):
                assert offset + count * stride <= elements, problem
                assert place != IN_GRAD_INPUT or offset >= (first + count) * hidden, problem
                first += count
            if head and valid < rows:
                assert sum(fewer) == valid, "the first rows are ignored: the head is of compacted rows"


def test_leaving_out_a_few_rows_does_not_pay():
    problem = (16384, 4096, 128256, 2, True, True, 512 * MIB)
    for ignored, left_out in ((1, False), (31, False), (33, True), (8192, True)):
        counts = lay_out(problem, True, 16384 - ignored, 8000)[-2]
        assert sum(counts) == (16384 - ignored if left_out else 16384)


def test_a_short_batch_has_no_head():
    """Nothing that the wait for the number of valid rows could hide behind."""
    for rows, head in ((256, 0), (1023, 0), (1024, 512), (8192, 512)):
        assert lay_out((rows, 4096, 128256, 2, True, True, 1 << 40), True)[4] == head
    assert lay_out((8192, 64, 1000, 2, True, True, 1 << 40), True)[4] == 0


def test_no_rows():
    problem = (0, 64, 1000, 2, True, True, None)
    assert plan(*problem) == [0, 0, 0, 0]
    assert lay_out(problem, True) == (0, 0, 0, 0, 0, [], [])


def test_larger_than_32_bits():
    chunk_rows, chunks, logits_bytes, _ = plan(1 << 33, 4096, 1 << 18, 2, False, False, 1 << 42)
    assert (chunk_rows, chunks, logits_bytes) == (1 << 23, 1 << 10, 1 << 42)


# --- the budget ---------------------------------------------------------------------------------------------


def test_the_default_budget_is_512_mib(monkeypatch):
    monkeypatch.delenv("LIGER_MEMORY_BUDGET", raising=False)
    for problem in ((16384, 64, 128256, 2, False, True), (4096, 4096, 32003, 4, True, True)):
        assert plan(*problem, None) == plan(*problem) == plan(*problem, 512 * MIB)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("100000", 100000),
        ("64K", 64 << 10),
        ("3m", 3 << 20),
        ("2M", 2 << 20),
        ("1G", 1 << 30),
        ("", 512 * MIB),
    ],
)
def test_budget_from_the_environment(monkeypatch, text, number):
    problem = (16384, 64, 32003, 2, False, True)
    monkeypatch.setenv("LIGER_MEMORY_BUDGET", text)
    assert plan(*problem, None) == plan(*problem, number)
    assert plan(*problem, 5 * MIB) == plan(*problem, 5 << 20), "an argument wins over the environment"


def test_budget_from_the_environment_of_a_process():
    code = "import torch, liger; print(torch.ops.liger.plan_chunks(16384, 64, 32003, 2, False, True))"
    done = python("-c", code, environment={**os.environ, "LIGER_MEMORY_BUDGET": "64M"})
    assert done.stdout.strip() == str(plan(16384, 64, 32003, 2, False, True, 64 * MIB)), done.stderr


@pytest.mark.parametrize("text", ["0", "-5", "1T", "12 M", "lots", "1.5G", "99999999999G", "M"])
def test_unreadable_budget_in_the_environment(monkeypatch, text):
    monkeypatch.setenv("LIGER_MEMORY_BUDGET", text)
    words = (
        "LIGER_MEMORY_BUDGET: expected a positive number of bytes, with an optional suffix K, M or G, got "
    )
    with pytest.raises(RuntimeError) as caught:
        plan(128, 64, 1000, 2, True, True, None)
    assert str(caught.value).splitlines()[0] == f"{words}'{text}'"


@pytest.mark.parametrize("budget", [0, -1])
def test_budget_that_is_not_positive(budget):
    with pytest.raises(
        RuntimeError, match=f"memory_budget: expected a positive number of bytes, got {budget}"
    ):
        plan(128, 64, 1000, 2, True, True, budget)


def test_negative_sizes():
    with pytest.raises(RuntimeError, match="must not be negative, got rows=-1 hidden=64 vocab=1000"):
        plan(-1, 64, 1000, 2, True, True, None)


def errors_of(code, **variables):
    done = python("-c", code, environment={**os.environ, **variables})
    assert done.returncode == 0, done.stderr
    return done.stderr.splitlines()


def test_plans_are_logged_once():
    """LIGER_LOG=plan: each new plan on stderr."""
    code = "import torch, liger; f = torch.ops.liger.plan_chunks"
    code += "; [f(16384, 4096, 128256, 2, True, True) for _ in range(2)]"
    code += "; torch.ops.liger.plan_chunks_sm90(16384, 4096, 128256, True, True, True)"
    plans = [
        line for line in errors_of(code, LIGER_LOG="dispatch, plan") if line.startswith("liger: plan of ")
    ]
    assert [line.split(" for ")[0] for line in plans] == [
        "liger: plan of the generic engine", "liger: plan of the wgmma engine",
    ]  # fmt: skip
    assert "16384 rows x 4096 hidden x 128256 classes" in plans[0]
    assert not [line for line in errors_of(code, LIGER_LOG="") if "plan of" in line]


def test_the_plan_is_what_runs(monkeypatch):
    """The environment's budget reaches fused_linear_ce: a budget that cannot be read stops it."""
    monkeypatch.setenv("LIGER_MEMORY_BUDGET", "lots")
    arguments = torch.randn(4, 8), torch.randn(10, 8), torch.tensor([1, 2, 3, 4])
    with pytest.raises(ValueError, match="LIGER_MEMORY_BUDGET"):
        liger.fused_linear_ce(*arguments)
    assert liger.fused_linear_ce(*arguments, memory_budget=1000).isfinite()
