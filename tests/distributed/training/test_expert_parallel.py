# SPDX-License-Identifier: BSD-3-Clause
"""Experts distributed over the ranks by examples/expert_parallel.py: values and gradients of one process."""

import importlib.util
from pathlib import Path

import families
import pytest
import ranks
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import liger

EXAMPLE = Path(__file__).parents[3] / "examples" / "expert_parallel.py"
if not EXAMPLE.is_file():
    pytest.skip("no examples beside the tests", allow_module_level=True)

EXPERTS, CHOICES, HIDDEN, INTERMEDIATE = 8, 3, 16, 24
LOCAL = EXPERTS // ranks.WORLD


def example():
    spec = importlib.util.spec_from_file_location("expert_parallel", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


ROUTINGS = {
    "distinct": lambda rank, tokens: torch.rand(tokens, EXPERTS).topk(CHOICES).indices,
    "sentinels": lambda rank, tokens: torch.randint(2 * EXPERTS, (tokens, CHOICES)),
    "one expert": lambda rank, tokens: torch.full((tokens, CHOICES), EXPERTS - 1),
    "the next rank": lambda rank, tokens: (
        torch.randint(LOCAL, (tokens, CHOICES)) + LOCAL * ((rank + 1) % ranks.WORLD)
    ),
    "sentinels alone but on a rank": lambda rank, tokens: (
        torch.randint(EXPERTS, (tokens, CHOICES)) + rank * EXPERTS
    ),
}


@pytest.mark.parametrize("routing", ROUTINGS)
def test_values_and_gradients(routing):
    """Tokens and indices of all ranks as one batch, whose loss is the mean over ranks."""
    torch.manual_seed(5)
    whole = liger.nn.GroupedExperts(EXPERTS, HIDDEN, INTERMEDIATE).to(ranks.DEVICE)
    of_ranks, counts = [], [5 + 4 * rank for rank in range(ranks.WORLD)]
    for rank, tokens in enumerate(counts):
        index = ROUTINGS[routing](rank, tokens)
        of_ranks.append([t.to(ranks.DEVICE) for t in (
            torch.randn(tokens, HIDDEN), index, torch.rand(tokens, CHOICES), torch.randn(tokens, HIDDEN)
        )])  # fmt: skip
    x, index, weights, upstream = (torch.cat(tensors) for tensors in zip(*of_ranks, strict=True))
    x.requires_grad_(), weights.requires_grad_()
    expected = whole(x, index, weights)
    (expected * upstream / ranks.WORLD).sum().backward()
    of_whole = {name: p.grad for name, p in whole.named_parameters()}
    whole.zero_grad()

    ours = example().ExpertParallel(whole, dist.group.WORLD)
    mine, index, my_weights, upstream = of_ranks[ranks.RANK]
    mine.requires_grad_(), my_weights.requires_grad_()
    y = ours(mine, index, my_weights)
    (y * upstream).sum().backward()
    expected = [t.split(counts)[ranks.RANK] for t in (expected, x.grad, weights.grad)]
    found = [y, mine.grad / ranks.WORLD, my_weights.grad / ranks.WORLD]
    torch.testing.assert_close(found, expected)
    for name, parameter in ours.experts.named_parameters():
        assert len(parameter) == LOCAL
        torch.testing.assert_close(parameter.grad, of_whole[name].chunk(ranks.WORLD)[ranks.RANK])


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_a_model_trains_as_with_all_experts_on_each_rank(name):
    """Two steps of SGD; the other parameters are replicated by DDP in both runs."""
    runs = []
    for distributed in (False, True):
        model = liger.patch(families.make(name, output_router_logits=False))
        if distributed:
            example().expert_parallel(model, dist.group.WORLD)
        wrapped = DistributedDataParallel(model)
        optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
        for step in range(2):
            loss = wrapped(**families.to(families.batch(name, step, ranks.RANK), ranks.DEVICE)).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        runs.append((torch.stack(losses), dict(model.named_parameters())))
    torch.testing.assert_close(runs[1][0], runs[0][0], rtol=1e-5, atol=0)
    parts = 0
    for name, parameter in runs[1][1].items():
        expected = runs[0][1][name.replace("experts.experts.", "experts.")]
        if parameter.shape != expected.shape:
            parts, expected = parts + 1, expected.chunk(ranks.WORLD)[ranks.RANK]
        torch.testing.assert_close(
            parameter, expected, rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}"
        )
    assert parts >= 4


def test_experts_that_the_ranks_do_not_divide():
    experts = liger.nn.GroupedExperts(ranks.WORLD + 1, HIDDEN, INTERMEDIATE)
    words = f"got {ranks.WORLD + 1} experts, expected a multiple of the group's {ranks.WORLD} ranks"
    with pytest.raises(ValueError, match=f"ExpertParallel: {words}"):
        example().ExpertParallel(experts, dist.group.WORLD)
