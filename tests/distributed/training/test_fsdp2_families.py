# SPDX-License-Identifier: BSD-3-Clause
"""fully_shard (FSDP2) of patched models of several families: loss, gradients and weights of some steps."""

import functools

import families
import pytest
import ranks
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.fsdp import FSDPModule, fully_shard

from liger.transformers.checkpointing import methods


def layers_of(model):
    return [m for m in model.modules() if type(m).__name__.endswith(("DecoderLayer", "EncoderLayer"))]


def is_tied(model):
    return model.lm_head.weight is model.get_input_embeddings().weight


def shard(model, layout="root", **options):
    """Units: ``root`` has the layers, and the root has the rest; ``head``: the head is a unit; ``tail``: so
    are final norm and head together, with the embedding if it is tied; ``small``: so is every norm, router
    and experts module.
    """
    wrap = functools.partial(fully_shard, **{"mesh": ranks.mesh(), **options})
    layers, tied, head, embedding = (
        layers_of(model),
        is_tied(model),
        model.lm_head,
        model.get_input_embeddings(),
    )
    if layout == "small":
        for module in model.modules():
            if type(module).__name__.endswith(("Norm", "Experts", "Router")):
                wrap(module)
    for layer in layers:
        wrap(layer)
    if layout == "tail":
        final = model.model.get_decoder().norm if hasattr(model.model, "language_model") else model.model.norm
        wrap([final, embedding, head] if tied else [final, head])
    elif layout in ("head", "small") and not tied:
        wrap(head)
    model = wrap(model)
    assert isinstance(model, FSDPModule)
    return model


def checkpoint(model, kind):
    if kind == "wrapper":
        kinds = tuple({type(layer) for layer in layers_of(model)})
        apply_activation_checkpointing(model, check_fn=lambda m: isinstance(m, kinds))
    elif kind != "none":
        methods.enable(model, use_reentrant=kind == "reentrant")


def train(model, steps):
    """The :class:`families.Result` of a sharded model."""
    optimizer, losses, grads, before = families.optimizer_of(model), [], [], families.weights_of(model)
    for of_ranks in steps:
        optimizer.zero_grad()
        loss = model(**families.to(of_ranks[ranks.RANK], ranks.DEVICE)).loss
        loss.backward()
        losses.append(ranks.total(loss.float()) / ranks.WORLD)
        grads.append(families.gradients_of(model))
        optimizer.step()
    return families.result(losses, grads, before, families.weights_of(model))


def run(
    name, layout="root", checkpointing="none", dtype=torch.float32, tied=None, steps=None, patch=None, parts=None,
    **options,
):  # fmt: skip
    """``patch``: options of liger.patch; ``parts``: how they change the report; ``options``: of
    fully_shard."""
    steps = families.batches(name) if steps is None else steps
    exact = families.exactly(families.make(name, tied), steps)
    results = []
    for is_patched in (False, True):
        model = families.make(name, tied)
        if is_patched:
            families.patched(model, name, parts, **(patch or {}))
        checkpoint(model, checkpointing)
        results.append(train(shard(model, layout, **options), steps))
    families.assert_as_exact(*results[::-1], exact, dtype)


@pytest.mark.parametrize("layout", ["root", "head", "tail", "small"])
@pytest.mark.parametrize("name", families.FAMILIES)
def test_units(name, layout):
    run(name, layout, reshard_after_forward=True)


@pytest.mark.parametrize("name", families.FAMILIES)
def test_no_reshard(name):
    run(name, "tail", reshard_after_forward=False)


@pytest.mark.parametrize("layout", ["root", "tail"])
@pytest.mark.parametrize("name", ["qwen3", "gemma3"])
def test_tied_or_not(name, layout):
    """The other choice than the configuration of the family makes."""
    run(name, layout, tied=name == "qwen3")
