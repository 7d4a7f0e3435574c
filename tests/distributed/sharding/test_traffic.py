# SPDX-License-Identifier: BSD-3-Clause
"""The bytes that liger_bench.devices.traffic predicts, against counted ones; sequence parallelism of a whole
step."""

import copy

import pytest
import ranks
import tiny_models
import torch
import torch.distributed as dist
from planned_llama import LAYERS, MOST, PLENTY, attention_first, counts, set_level
from torch.distributed.nn.functional import all_to_all_single

import liger
from liger_bench.devices import on_ranks, traffic, ulysses


@pytest.mark.parametrize(
    "collective, sent",
    [
        ("all_gather", 4 * 24), ("all_gather list", 4 * 24), ("reduce_scatter", 24), ("all_reduce", 2 * 24),
        ("all_to_all", 24),
    ],
)  # fmt: skip
def test_the_bytes_of_a_collective(collective, sent):
    """``sent``: bytes times n / (n - 1) of four ranks; gathers grow with the number of ranks."""
    n = ranks.WORLD
    x = torch.ones(24 // 4 * n, device=ranks.DEVICE)
    with traffic.Traffic() as counted:
        if collective == "all_gather":
            dist.all_gather_into_tensor(torch.empty(n * x.numel(), device=x.device), x)
        elif collective == "all_gather list":
            dist.all_gather([torch.empty_like(x) for _ in range(n)], x)
        elif collective == "reduce_scatter":
            dist.reduce_scatter_tensor(torch.empty(x.numel() // n, device=x.device), x)
        elif collective == "all_reduce":
            dist.all_reduce(x)
        else:
            all_to_all_single(torch.empty_like(x), x)
        dist.barrier()
    name = collective.removesuffix(" list")
    share = {"all_gather": n * x.nbytes, "all_reduce": 2 * x.nbytes}.get(name, x.nbytes)
    assert counted.sent == {name: share * (n - 1) // n}


def llama(**options):
    return tiny_models.make("llama", ranks.DEVICE, tie_word_embeddings=False, **options)


def padded(parameters):
    """How many elements fully_shard sends: it pads the first dimension to a multiple of the ranks."""
    return sum(-(-p.shape[0] // ranks.WORLD) * ranks.WORLD * p[0].numel() for p in parameters)


def test_a_step_under_fsdp2_sends_what_is_predicted():
    model = liger.patch(llama())
    count, in_layers = padded(model.parameters()), padded(model.model.layers.parameters())
    on_ranks.shard(model, ranks.DEVICE)
    inputs = tiny_models.batch(ranks.DEVICE)
    for _ in range(2):
        with traffic.Traffic() as counted:
            model(**inputs).loss.backward()
        predicted = traffic.fsdp2(count, ranks.WORLD, kept=count - in_layers, gathered=4, reduced=4)
        assert counted.total == pytest.approx(predicted, abs=8)
        assert set(counted.sent) == {"all_gather", "reduce_scatter"}


@pytest.mark.parametrize("tokens, hidden", [(64, 32), (256, 8)])
def test_a_sharded_loss_sends_what_is_predicted(tokens, hidden):
    vocabulary = 40
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(tokens, hidden, generator=generator).to(ranks.DEVICE).requires_grad_()
    weight = torch.randn(vocabulary, hidden, generator=generator).to(ranks.DEVICE)
    shard = weight.chunk(ranks.WORLD)[ranks.RANK].clone().requires_grad_()
    target = torch.randint(vocabulary, (tokens,), generator=generator).to(ranks.DEVICE)
    with traffic.Traffic() as counted:
        liger.fused_linear_ce(x, shard, target, group=dist.group.WORLD, vocab_size=vocabulary).backward()
    predicted = traffic.vocabulary(tokens, hidden, ranks.WORLD)
    # The arguments of all ranks are compared, in 40 bytes of each.
    assert predicted <= counted.total <= predicted + 1024
    assert counted.sent["all_reduce"] == 2 * tokens * hidden * 4 * (ranks.WORLD - 1) // ranks.WORLD


@pytest.mark.parametrize("patched", [False, True], ids=["plain", "patched"])
def test_sequence_parallelism_is_the_whole_step(patched):
    """Heads of keys are fewer than the ranks with four of them."""
    length, heads, kv_heads = 8 * ranks.WORLD, 8, 2
    model = llama(num_attention_heads=heads, num_key_value_heads=kv_heads)
    tokens = torch.randint(3, 200, (2, length), generator=torch.Generator().manual_seed(1)).to(ranks.DEVICE)
    plain = copy.deepcopy(model)
    expected = plain(input_ids=tokens, labels=tokens).loss
    expected.backward()
    if patched:
        liger.patch(model)
    ulysses.enable(model)
    with traffic.Traffic() as counted:
        loss = model(**ulysses.inputs(tokens)).loss
        loss.backward()
    torch.testing.assert_close(ranks.total(loss) / ranks.WORLD, expected.detach(), rtol=1e-5, atol=1e-6)
    for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        grad = ranks.total(ours.grad) / ranks.WORLD
        scale = theirs.grad.abs().max().item()
        torch.testing.assert_close(
            grad, theirs.grad, rtol=1e-4, atol=1e-5 * scale, msg=lambda m, n=name: f"{n}: {m}"
        )
    assert counted.sent == {"all_to_all": exchanged(model, tokens, forwards=1)}


def exchanged(model, tokens, forwards):
    """The bytes that sequence parallelism is predicted to send."""
    config = model.config
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return traffic.ulysses(
        tokens.numel(),
        config.num_attention_heads * size,
        max(config.num_key_value_heads, ranks.WORLD) * size,
        config.num_hidden_layers,
        ranks.WORLD,
        element=4,
        forwards=forwards,
    )


@pytest.mark.usefixtures(attention_first.__name__)
def test_a_kept_attention_is_not_exchanged_again():
    """Under a plan, whose layers recompute everything, and then everything but attention."""
    model = ulysses.enable(liger.patch(llama(num_attention_heads=8, num_hidden_layers=LAYERS)))
    liger.transformers.checkpoint(model, PLENTY)
    tokens = torch.randint(3, 200, (2, 8 * ranks.WORLD), generator=torch.Generator().manual_seed(1))
    tokens, expected = tokens.to(ranks.DEVICE), None
    for level in (0, 0, MOST, MOST):
        set_level(model, level)
        model.zero_grad()
        with traffic.Traffic() as counted:
            model(**ulysses.inputs(tokens)).loss.backward()
        expected = expected or [p.grad.clone() for p in model.parameters()]
        assert all(map(torch.equal, expected, (p.grad for p in model.parameters())))
    recomputed, attention, _ = counts(model)
    assert attention == MOST
    assert counted.sent["all_to_all"] == exchanged(model, tokens, forwards=1 + recomputed / LAYERS)


def test_arguments_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match=r"ulysses.inputs: \d+ tokens for \d ranks, expected a multiple"):
        ulysses.inputs(torch.zeros(1, ranks.WORLD + 1, dtype=torch.int64))
    query = torch.zeros(1, ranks.WORLD + 1, 4, 8)
    with pytest.raises(ValueError, match=r"ulysses.attention: \d heads of queries"):
        ulysses.attention(None, query, query, query, None)
