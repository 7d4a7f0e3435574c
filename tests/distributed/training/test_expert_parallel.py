# SPDX-License-Identifier: BSD-3-Clause
"""Experts distributed over the ranks by examples/expert_parallel.py: values and gradients of one process."""

import functools
import importlib.util
from pathlib import Path

import families
import pytest
import ranks
import torch
import torch.distributed as dist
from tiny_models import enable_checkpointing
from torch.nn.parallel import DistributedDataParallel

import liger

EXAMPLE = Path(__file__).parents[3] / "examples" / "expert_parallel.py"
if not EXAMPLE.is_file():
    pytest.skip("no examples beside the tests", allow_module_level=True)

EXPERTS, CHOICES, HIDDEN, INTERMEDIATE = 8, 3, 16, 24
LOCAL = EXPERTS // ranks.WORLD


@functools.cache
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


def distributed_model(name, dtype=torch.float32):
    model = liger.patch(families.make(name, output_router_logits=False).to(dtype))
    return example().expert_parallel(model, dist.group.WORLD)


def loss_of(wrapped, name, step):
    return wrapped(**families.to(families.batch(name, step, ranks.RANK), ranks.DEVICE)).loss


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_a_model_trains_as_with_all_experts_on_each_rank(name):
    """Two steps of SGD with clipped gradients; the other parameters are replicated by DDP in both runs."""
    runs = []
    for distributed in (False, True):
        if distributed:
            model = distributed_model(name)
            assert {len(p) for p in example().parts_of(model)} == {families.EXPERTS // ranks.WORLD}
        else:
            model = liger.patch(families.make(name, output_router_logits=False))
        wrapped, found = DistributedDataParallel(model), []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(2):
            loss = loss_of(wrapped, name, step)
            loss.backward()
            if distributed:
                norm = example().clip_grad_norm_(model, 0.5, dist.group.WORLD)
            else:
                norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            found += [loss.detach(), norm]
        assert min(found[1::2]) > 0.5
        weights = example().state_dict(model, dist.group.WORLD)
        runs.append((torch.stack(found), weights))
    torch.testing.assert_close(runs[1][0], runs[0][0], rtol=1e-5, atol=0)
    torch.testing.assert_close(runs[1][1], runs[0][1], rtol=1e-5, atol=1e-6)


def test_checkpointing_in_bfloat16():
    """The recomputation exchanges the same tokens: gradients have the same bits."""
    runs = []
    for checkpointing in (False, True):
        model = distributed_model("qwen3_moe", torch.bfloat16)
        if checkpointing:
            enable_checkpointing(model)
        loss_of(DistributedDataParallel(model), "qwen3_moe", 0).backward()
        runs.append({name: p.grad for name, p in model.named_parameters()})
    assert all(torch.equal(runs[1][name], grad) for name, grad in runs[0].items())
    assert all(p.grad.any() for p in example().parts_of(model))


def test_adapters_of_attention():
    """The parts are frozen, adapters are replicated."""
    peft = pytest.importorskip("peft")
    model = families.make("qwen3_moe", output_router_logits=False)
    settings = peft.LoraConfig(r=4, init_lora_weights=False, target_modules=["q_proj"])
    torch.manual_seed(3)
    model = liger.patch(peft.get_peft_model(model, settings))
    wrapped = DistributedDataParallel(model)
    found = []
    for distributed in (False, True):
        if distributed:
            wrapped = DistributedDataParallel(example().expert_parallel(model, dist.group.WORLD))
        loss_of(wrapped, "qwen3_moe", 0).backward()
        found.append([p.grad.clone() for p in model.parameters() if p.requires_grad])
        model.zero_grad()
    assert len(example().parts_of(model)) == 4
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-7)


def test_experts_that_the_ranks_do_not_divide():
    experts = liger.nn.GroupedExperts(ranks.WORLD + 1, HIDDEN, INTERMEDIATE)
    words = f"got {ranks.WORLD + 1} experts, expected a multiple of the group's {ranks.WORLD} ranks"
    with pytest.raises(ValueError, match=f"ExpertParallel: {words}"):
        example().ExpertParallel(experts, dist.group.WORLD)
