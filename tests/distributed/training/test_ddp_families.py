# SPDX-License-Identifier: BSD-3-Clause
"""DistributedDataParallel of patched models of several families: which parameters get a gradient, and which
one."""

import families
import pytest
import ranks
from torch.nn.parallel import DistributedDataParallel


def train(model, steps, **options):
    """The :class:`families.Result` of a model in DDP."""
    module = DistributedDataParallel(model, **options)
    optimizer, losses, grads, before = families.optimizer_of(model), [], [], families.weights_of(model)
    for of_ranks in steps:
        optimizer.zero_grad()
        loss = module(**families.to(of_ranks[ranks.RANK], ranks.DEVICE)).loss
        loss.backward()
        losses.append(ranks.total(loss) / ranks.WORLD)
        grads.append(families.gradients_of(model))
        optimizer.step()
    return families.result(losses, grads, before, families.weights_of(model))


def run(name, steps=None, settings=None, freeze=(), **options):
    steps = families.batches(name) if steps is None else steps
    settings = settings or {}
    exact = families.exactly(frozen(families.make(name, **settings), freeze), steps)
    plain = train(frozen(families.make(name, **settings), freeze), steps, **options)
    ours = train(families.patched(frozen(families.make(name, **settings), freeze), name), steps, **options)
    families.assert_as_exact(ours, plain, exact)
    return plain


def frozen(model, words):
    for name, parameter in model.named_parameters():
        if any(word in name for word in words):
            parameter.requires_grad_(False)
    return model


@pytest.mark.parametrize("mode", ["dynamic", "static", "find_unused", "views"])
@pytest.mark.parametrize("name", families.FAMILIES)
def test_matches_plain_model(name, mode):
    run(
        name,
        static_graph=mode == "static",
        find_unused_parameters=mode == "find_unused",
        gradient_as_bucket_view=mode == "views",
    )


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm"])
@pytest.mark.parametrize("name", families.MOE)
def test_idle_experts(name, implementation):
    """Experts without tokens, on one rank and on both: their parameters have gradients, with zeros in the
    same rows."""
    settings = {"experts_implementation": implementation}
    steps = families.batches(name)
    for rank in range(ranks.WORLD):
        model = families.make(name, **settings)
        choices = families.Choices(model)
        model(**families.to(steps[0][rank], ranks.DEVICE))
        assert choices.idle
    plain = run(name, steps, settings, find_unused_parameters=True)
    experts = [grad for grad_name, grad in plain.first.items() if grad_name.endswith("experts.down_proj")]
    assert len(experts) == 2
    for grad in experts:
        unused = [e for e in range(families.EXPERTS) if not grad[e].any()]
        assert 0 < len(unused) < families.EXPERTS


@pytest.mark.parametrize("name", families.MOE)
def test_router_loss(name):
    """The loss of the router is added to the loss of the head, in place."""
    run(name, families.batches(name, output_router_logits=True))


@pytest.mark.parametrize("ignored_rank", range(ranks.WORLD))
@pytest.mark.parametrize("name", families.FAMILIES)
def test_rank_without_valid_label(name, ignored_rank):
    run(name, families.batches(name, ignored_rank=ignored_rank))


def test_rank_without_image():
    """The parameters of the vision tower are unused on one rank."""
    run("gemma3_vl", families.batches("gemma3_vl", text_rank=1), find_unused_parameters=True)


def test_no_image():
    """On every rank: gradients of zero or None, as in the plain model."""
    steps = [[families.batches("gemma3_vl", text_rank=1)[0][1]] * ranks.WORLD] * 2
    run("gemma3_vl", steps, find_unused_parameters=True)


@pytest.mark.parametrize(
    "freeze", [("vision_tower",), ("vision_tower", "embed_tokens"), ("language_model", "lm_head")]
)
def test_frozen_parts(freeze):
    run("gemma3_vl", freeze=freeze)


def test_every_expert_frozen():
    run("qwen3_moe", freeze=("experts",))
