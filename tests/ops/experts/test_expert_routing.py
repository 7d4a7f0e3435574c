# SPDX-License-Identifier: BSD-3-Clause
"""The sort of the slots of grouped_experts by expert: its kernels give the bits of the torch code."""

import re
from pathlib import Path

import pytest
import torch
from cuda_graphs import no_synchronisation

import liger
from liger.ops.grouped_experts import counting_sort
from liger.ops.grouped_experts.routing import Routing

SOURCE = Path(__file__).parents[3] / "csrc/experts/routing.cu"
NAMES = "ends", "order", "tokens", "experts", "inverse", "weights"
DTYPES = None, torch.float32, torch.bfloat16, torch.float16, torch.float64
# Tokens, choices, experts: one slot; one chunk and several, the last of them not whole; experts that are a
# power of two, one less, and the most.
SIZES = [(1, 1, 1), (13, 3, 5), (64, 2, 127), (70, 4, 128), (300, 3, 31), (150, 2, 1023), (9, 2, 1024)]
ROUTINGS = {
    "random": lambda shape, experts: torch.randint(experts, shape),
    "sentinels": lambda shape, experts: torch.randint(2 * experts, shape),
    "one expert": lambda shape, experts: torch.full(shape, experts // 2),
    "sentinels alone": lambda shape, experts: torch.full(shape, experts),
    "two experts and far sentinels": lambda shape, experts: torch.randint(2, shape) * (2**31 - 1),
}


def assert_same_bits(index, experts, dtype=None):
    """``dtype``: of the routing weights."""
    weights = None if dtype is None else torch.rand(index.shape, device=index.device).to(dtype)
    found = Routing(index, experts, weights)
    with liger.use_backend("torch"):
        expected = Routing(index, experts, weights)
    for name in NAMES:
        ours, theirs = getattr(found, name), getattr(expected, name)
        if ours is theirs is None:
            continue
        assert ours.dtype == theirs.dtype and ours.stride() == theirs.stride(), name
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True, msg=name)
    slots = index.flatten().cpu().tolist()
    rows = sorted((slot for slot, expert in enumerate(slots) if expert < experts), key=slots.__getitem__)
    assert found.order[: len(rows)].tolist() == rows and int(found.ends[-1]) == len(rows)


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.covering(1)
def test_same_bits(size, routing, device):
    tokens, choices, experts = size
    index = ROUTINGS[routing]((tokens, choices), experts).to(device)
    for dtype in DTYPES:
        assert_same_bits(index, experts, dtype)
    assert_same_bits(index.int(), experts, torch.float32)
    assert_same_bits(index.t().contiguous().t(), experts, torch.float32)


def test_weights_of_negative_indices(device):
    index = torch.tensor([[0, 2], [-1, 7], [1, 2]], device=device)
    weights = torch.tensor([[0.5, 0.25], [3.0, torch.inf], [2.0, 1.0]], device=device)
    found = Routing(index, 3, weights).weights
    # Slots 0 and 2 of expert 0, slot 4, slots 1 and 5, the sentinel, and the pad.
    expected = torch.tensor([[0.5, torch.nan, 2.0, 0.25, 1.0, torch.inf, 0.0]], device=device).t()
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.gpu
@pytest.mark.parametrize("experts", [8, 128, 1023])
def test_millions_of_slots(experts, device):
    index = torch.randint(experts + experts // 4, (1 << 19, 8), device=device)
    assert_same_bits(index, experts, torch.float32)
    with no_synchronisation():
        Routing(index, experts)


def sort_in_torch(index, weights, chunk, counts, ends, order, tokens, experts, inverse, row_weights):
    """The op of csrc/experts/routing.cu."""
    assert chunk % 256 == 0 and counts.shape == (-(-index.numel() // chunk), len(ends) + 1)
    expected = Routing(index, len(ends), weights)
    found = ends, order, tokens, experts, inverse, row_weights
    for name, tensor in zip(NAMES, found, strict=True):
        if tensor is not None:
            tensor.copy_(getattr(expected, name))


@pytest.mark.parametrize("dtype", DTYPES[:-1], ids=str)
@pytest.mark.parametrize("size", [(1, 1, 1), (700, 3, 5), (70000, 2, 9)], ids=str)
def test_the_call_of_the_compiled_sort(monkeypatch, size, dtype):
    if not SOURCE.is_file():
        pytest.skip("not a checkout")
    (schema,) = re.findall(r'm\.def\("(.*?)"\)', SOURCE.read_text())
    library = torch.library.Library("liger_experts", "FRAGMENT")
    try:
        if not hasattr(torch.ops.liger_experts, "sort"):
            library.define(schema)
        library.impl("sort", sort_in_torch, "CPU")
        tokens, choices, experts = size
        index = torch.randint(2 * experts, (tokens, choices))
        weights = None if dtype is None else torch.rand(tokens, choices).to(dtype)
        expected = Routing(index, experts, weights)
        for name, tensor in zip(NAMES, counting_sort.route(index, experts, weights), strict=True):
            assert (
                tensor is None if getattr(expected, name) is None else tensor.equal(getattr(expected, name))
            )
    finally:
        library._destroy()
        torch.ops.liger_experts.__dict__.pop("sort", None)


@pytest.mark.gpu
def test_the_cuda_backend_has_the_compiled_sort(device, backend):
    index = torch.zeros(2, 2, dtype=torch.int64, device=device)
    assert counting_sort.sorts(index, 1024, index.float()) == (backend == "cuda")
    assert not counting_sort.sorts(index, 1025, None) and not counting_sort.sorts(index, 4, index.double())
