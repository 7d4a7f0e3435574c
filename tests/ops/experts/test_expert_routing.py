# SPDX-License-Identifier: BSD-3-Clause
"""The sort of the slots of grouped_experts by expert: its kernels give the bits of the torch code."""

import pytest
import torch
from cuda_graphs import no_synchronisation

import liger
from liger.ops.grouped_experts.routing import Routing

NAMES = "ends", "order", "tokens", "experts", "valid", "inverse"
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


def assert_same_bits(index, experts):
    found = Routing(index, experts)
    with liger.use_backend("torch"):
        expected = Routing(index, experts)
    for name in NAMES:
        ours, theirs = getattr(found, name), getattr(expected, name)
        assert ours.dtype == theirs.dtype and ours.stride() == theirs.stride(), name
        assert torch.equal(ours, theirs), name
    slots = index.flatten().cpu().tolist()
    rows = sorted((slot for slot, expert in enumerate(slots) if expert < experts), key=slots.__getitem__)
    assert found.order[: len(rows)].tolist() == rows and int(found.ends[-1]) == len(rows)


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.covering(1)
def test_same_bits(size, routing, device):
    tokens, choices, experts = size
    index = ROUTINGS[routing]((tokens, choices), experts).to(device)
    assert_same_bits(index, experts)
    assert_same_bits(index.int(), experts)
    assert_same_bits(index.t().contiguous().t(), experts)


@pytest.mark.gpu
@pytest.mark.parametrize("experts", [8, 128, 1023])
def test_millions_of_slots(experts, device):
    index = torch.randint(experts + experts // 4, (1 << 19, 8), device=device)
    assert_same_bits(index, experts)
    with no_synchronisation():
        Routing(index, experts)
