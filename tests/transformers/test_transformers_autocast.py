# SPDX-License-Identifier: BSD-3-Clause
"""Patched models under autocast: the same ops run as in a model of 16 bits."""

from collections import Counter

import pytest
import torch

import liger

transformers = pytest.importorskip("transformers")

from called_ops import CalledOps  # noqa: E402
from combinations import inputs_of, tiny  # noqa: E402
from graph_nodes import count_nodes  # noqa: E402
from tiny_models import batch, make, step, twin  # noqa: E402

from liger.transformers.recipe import reuse  # noqa: E402

TYPES = ["llama", "qwen3", "qwen3_moe", "mixtral", "gemma3_text"]


def ops_of_a_step(model, given, dtype=None):
    """The ops of liger in a forward and a backward, and how often each runs."""
    with CalledOps() as ops:
        with torch.autocast("cpu", dtype, enabled=dtype is not None):
            loss = model(**given).loss
        loss.backward()
    return Counter(name for name in ops.full_names if name.startswith("liger::"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("model_type", TYPES)
def test_the_ops_of_a_model_with_weights_in_float32(model_type, dtype):
    """Its norms have activations of 16 bits beside weights in float32. Its residual sums stay in float32, so
    additions of the 16 bits of attention are not fused with the norm after them."""
    model, given = liger.patch(tiny(model_type)).train(), inputs_of(model_type)
    expected = ops_of_a_step(twin(model), given)
    found = ops_of_a_step(model, given, dtype)
    for suffix in ("", "_backward"):
        expected[f"liger::rms_norm{suffix}"] += expected.pop(f"liger::fused_add_rms_norm{suffix}", 0)
    assert +found == +expected


@pytest.mark.parametrize("model_type", TYPES)
def test_the_ops_of_a_model_with_weights_of_16_bits(model_type):
    model, given = liger.patch(tiny(model_type)).train().bfloat16(), inputs_of(model_type)
    assert ops_of_a_step(twin(model), given, torch.bfloat16) == ops_of_a_step(model, given)


@pytest.mark.parametrize("norms", ["bfloat16 around norms", "all in float32"])
@pytest.mark.parametrize("model_type", ["llama", "qwen3", "gemma3_text"])
def test_a_step(model_type, norms):
    """As close to float32 as the model before."""
    plain, given = tiny(model_type), inputs_of(model_type)
    exact = step(twin(plain), **given)
    if norms == "bfloat16 around norms":
        for name, parameter in plain.named_parameters():
            parameter.data = parameter.data if "norm" in name else parameter.data.bfloat16()
    results = []
    for model in (liger.patch(twin(plain)), plain):
        with torch.autocast("cpu", torch.bfloat16):
            results.append(step(model, **given))
    for name, goal in exact[1].items():
        ours, theirs = ((grads[name].float() - goal).norm() / goal.norm() for _, grads in results)
        assert ours <= 2 * theirs + torch.finfo(torch.bfloat16).eps, name
    torch.testing.assert_close(results[0][0].loss, results[1][0].loss, rtol=2e-2, atol=0)


@pytest.mark.parametrize("recompute", [False, True])
def test_mlps_of_16_bits_reuse_their_memory(recompute, monkeypatch):
    monkeypatch.setattr(reuse, "WORTH_REUSING", 0)
    model = liger.patch(make("llama", dtype=torch.bfloat16), recompute=recompute)
    steps = []
    for enabled in (False, True):
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            loss = model(**batch()).loss
        steps.append([loss, *torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)])
        nodes = count_nodes(loss)
        assert nodes["_GatedLinearBackward" if recompute else "_LinearOverBackward"] == 2
    assert all(map(torch.equal, *steps))


def test_weights_that_autocast_casts_are_left_to_it(monkeypatch):
    """It keeps the copy of a weight for other calls of the layer."""
    monkeypatch.setattr(reuse, "WORTH_REUSING", 0)
    model = liger.patch(make("llama"))
    with torch.autocast("cpu", torch.bfloat16):
        assert "_LinearOverBackward" not in count_nodes(model(**batch()).loss)
    assert count_nodes(model(**batch()).loss)["_LinearOverBackward"] == 2
