# SPDX-License-Identifier: BSD-3-Clause
"""The pool of host memory: spans, growth within its bound, and what a host has left."""

import pytest
import torch

pytest.importorskip("transformers")

from liger.transformers.checkpointing import host_pool
from liger.transformers.checkpointing.host_pool import HostPool

PAGE = 4096


@pytest.fixture
def host(monkeypatch):
    """A function that sets the bytes that the host has left."""

    def left(size, whole=0):
        monkeypatch.setattr(host_pool, "available", lambda: size)
        monkeypatch.setattr(host_pool, "total", lambda: whole)

    left(2**40)
    return left


def bytes_of(size):
    return torch.zeros(size, dtype=torch.uint8)


def test_spans_do_not_overlap_and_are_used_again(host):
    pool = HostPool(None, bytes_of)
    sizes = [PAGE, 3 * PAGE + 1, 5, 2 * PAGE]
    for _ in range(3):
        spans = [pool.take(size) for size in sizes]
        for number, (span, size) in enumerate(zip(spans, sizes, strict=True)):
            assert pool.memory(span).numel() == span.size >= size and span.size % PAGE == 0
            pool.memory(span).fill_(number + 1)
        assert [pool.memory(span).unique().tolist() for span in spans] == [[1], [2], [3], [4]]
        # The order of a backward.
        for span in reversed(spans):
            pool.give_back(span, None)
        assert pool.settle() == [] and pool.size == 4 * PAGE + 16 * PAGE
    whole = [pool.take(4 * PAGE), pool.take(16 * PAGE)]
    assert {span.block for span in whole} == {0, 1} and pool.size == 20 * PAGE


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0), (1, 3, 0, 2), (2, 0, 3, 1)])
def test_free_neighbours_become_one_span(host, order):
    pool = HostPool(4 * PAGE, bytes_of)
    spans = [pool.take(PAGE) for _ in range(4)]
    assert pool.take(1) is None
    for number in order:
        pool.give_back(spans[number], None)
        pool.settle()
    assert pool.take(4 * PAGE).size == 4 * PAGE


def test_a_span_is_free_after_settle_and_with_its_event(host):
    pool = HostPool(PAGE, bytes_of)
    span = pool.take(PAGE)
    pool.give_back(span, "its last reader")
    assert pool.take(PAGE) is None
    assert pool.settle() == ["its last reader"] and pool.take(PAGE) == span


@pytest.mark.parametrize("limit", [7 * PAGE, 8 * PAGE, 13 * PAGE])
def test_bound(host, limit):
    """Blocks are powers of two, so a bound between two of them is not used up."""
    pool = HostPool(limit, bytes_of)
    taken = 0
    while pool.take(PAGE) is not None:
        taken += PAGE
    assert taken == pool.size <= limit and limit - pool.size < PAGE
    assert HostPool(limit, bytes_of).take(limit + 1) is None


def test_a_reserve_is_left_to_the_host(host):
    host(100 * PAGE, whole=200 * PAGE)
    pool = HostPool(None, bytes_of)
    # A tenth of all memory is 20 pages.
    assert pool.room() == 80 * PAGE
    assert pool.take(80 * PAGE) is None, "a block of a power of two has no room"
    assert pool.take(60 * PAGE).size == 60 * PAGE and pool.size == 64 * PAGE
    host(10 * PAGE, whole=200 * PAGE)
    assert pool.room() == 0 and pool.take(10 * PAGE) is None
    assert HostPool(5 * PAGE, bytes_of).room() == 0


def test_a_system_that_does_not_say_what_it_has(host):
    host(None)
    assert HostPool(None, bytes_of).room() == 0, "without a bound nothing is safe"
    assert HostPool(8 * PAGE, bytes_of).take(8 * PAGE) is not None


def test_memory_that_cannot_be_allocated(host):
    sizes = []

    def allocate(size):
        sizes.append(size)
        if len(sizes) > 1:
            raise RuntimeError("CUDA error: out of memory")
        return bytes_of(size)

    pool = HostPool(None, allocate)
    assert pool.take(PAGE) is not None and pool.take(4 * PAGE) is None
    # It does not ask again, and still has what it has.
    assert pool.take(4 * PAGE) is None and pool.take(3 * PAGE) is not None
    assert sizes == [4 * PAGE, 16 * PAGE]


def test_available_memory_of_this_host():
    left, whole = host_pool.available(), host_pool.total()
    assert 0 < left <= whole < 2**50


def test_limit_of_a_control_group(tmp_path, monkeypatch):
    for name, text in {
        "memory.max": "1000000\n",
        "memory.current": "700000\n",
        "memory.stat": "anon 500000\ninactive_file 150000\nactive_file 3\n",
    }.items():
        (tmp_path / name).write_text(text)
    group = (str(tmp_path / "memory.max"), str(tmp_path / "memory.current"), "inactive_file")
    missing = (str(tmp_path / "no/memory.max"), str(tmp_path / "no/memory.current"), "inactive_file")
    monkeypatch.setattr(host_pool, "_GROUPS", (group, missing))
    assert host_pool.available() == 450000 and host_pool.total() == 1000000
    (tmp_path / "memory.max").write_text("max\n")
    assert host_pool.available() > 1000000 and host_pool.total() > 1000000
