# SPDX-License-Identifier: BSD-3-Clause
"""Norms of queries and keys and their rotation in one op: which attentions get it, and that nothing else
changes."""

import inspect

import pytest
import torch

import liger

transformers = pytest.importorskip("transformers")

from called_ops import CalledOps  # noqa: E402
from combinations import inputs_of, lora, seeded_step, tiny  # noqa: E402
from tiny_models import assert_same_step, batch, first_is_quick, make, step, twin  # noqa: E402
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention  # noqa: E402

from liger.transformers import patch_report  # noqa: E402

KIND = "qk_norm_rope"
TYPES = ["qwen3", "gemma3_text", "qwen3_moe"]


class Ops(CalledOps):
    def counts(self):
        return {name: self.names.count(name) for name in (KIND, "rope", "rms_norm")}


def kinds(model):
    return list(patch_report(model).replaced.values())


def pair(model_type, **options):
    """A patched model and its twin as before."""
    plain = tiny(model_type)
    return liger.patch(twin(plain), **options), plain


# --- the same results ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("model_type", [*TYPES, "gemma3"])
def test_a_step(model_type, recompute):
    ours, plain = pair(model_type, recompute=recompute)
    assert kinds(ours).count(KIND) == len(plain.get_decoder().layers) and "rope" not in kinds(ours)
    assert "norms of q, k + rotary embedding" in str(patch_report(ours))
    given = inputs_of(model_type)
    expected = seeded_step(plain, given)
    with Ops() as ops:
        found = seeded_step(ours, given)
    assert_same_step(found, expected)
    assert ops.counts()["rope"] == 0 and ops.counts()[KIND] == kinds(ours).count(KIND) * (1 + recompute)
    assert any("q_norm.weight" in name for name in found[1])


@pytest.mark.parametrize("recompute", [False, True])
def test_planned_checkpointing(recompute):
    ours, plain = pair("qwen3", recompute=recompute)
    liger.transformers.checkpoint(ours, 10**9)
    expected = seeded_step(plain, inputs_of("qwen3"))
    for _ in range(3):
        assert_same_step(seeded_step(ours, inputs_of("qwen3")), expected)


def test_positions_after_a_cache():
    """Logits of tokens after cached ones, whose positions the mask shifts."""
    ours, plain = pair("qwen3")
    ids = inputs_of("qwen3")["input_ids"][:, :8]
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    # The name since transformers 5.24, and before.
    cache = "cache" if "cache" in inspect.signature(type(plain).forward).parameters else "past_key_values"
    results = []
    for model in (ours.eval(), plain.eval()):
        with torch.no_grad():
            first = model(input_ids=ids[:, :5], attention_mask=mask[:, :5], use_cache=True)
            positions = (mask.cumsum(1) - 1).clamp_min(0)[:, 5:]
            given = {"attention_mask": mask, "position_ids": positions, cache: first[cache]}
            results.append(model(input_ids=ids[:, 5:], **given).logits)
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)


def test_packed_positions():
    ours, plain = pair("qwen3")
    given = inputs_of("qwen3")
    tokens = given["input_ids"].shape[1]
    positions = torch.cat((torch.arange(tokens // 2), torch.arange(tokens - tokens // 2)))
    given = {
        "input_ids": given["input_ids"][:1],
        "labels": given["labels"][:1],
        "position_ids": positions[None],
    }
    assert_same_step(*(seeded_step(model, given) for model in (ours, plain)))


@pytest.mark.parametrize("model_type", first_is_quick("qwen3", "gemma3_text"))
def test_compiled_without_a_graph_break(model_type):
    torch._dynamo.reset()
    ours, plain = pair(model_type)
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph.print_readable(print_output=False))
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    compiled = torch.compile(ours, backend=backend, fullgraph=True)
    given = {**inputs_of(model_type), "use_cache": False}
    output, _ = step(compiled, **given)
    grads = {name: p.grad for name, p in ours.named_parameters() if p.grad is not None}
    assert_same_step((output, grads), step(plain, **given))
    (graph,) = graphs
    assert KIND in graph and "liger.rope" not in graph
    torch._dynamo.reset()


@pytest.mark.parametrize("targets", [("q_proj",), ("k_proj", "v_proj"), ("q_proj", "k_proj")])
@pytest.mark.parametrize("recompute", [False, True])
def test_adapters(targets, recompute):
    pytest.importorskip("peft")
    models = [lora(model, *targets, init_lora_weights=False) for model in pair("qwen3", recompute=recompute)]
    assert_same_step(*(seeded_step(model, inputs_of("qwen3")) for model in models))


@pytest.mark.parametrize("trained", ["q_norm.weight", "k_norm.weight", "q_proj.weight", "v_proj.weight"])
def test_few_trained_weights(trained):
    ours, plain = pair("qwen3", recompute=True)
    for model in (ours, plain):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name.endswith(trained))
    found, expected = (seeded_step(model, inputs_of("qwen3")) for model in (ours, plain))
    assert len(found[1]) == 2
    assert_same_step(found, expected)


# --- what is replaced, and what is not ----------------------------------------------------------------------


def test_unpatch():
    ours, plain = pair("qwen3")
    attention = ours.model.layers[0].self_attn
    names = {name for name in dir(attention) if "deferred" in name}
    assert names == {"_liger_deferred_q_norm", "_liger_deferred_k_norm"}
    liger.unpatch(ours)
    assert type(attention) is Qwen3Attention and not any("deferred" in name for name in dir(attention))
    given = inputs_of("qwen3")
    assert torch.equal(ours(**given).logits, plain(**given).logits)
    liger.patch(ours)
    assert kinds(ours).count(KIND) == 2


@pytest.mark.parametrize("options", [{KIND: False}, {"rms_norm": False}])
def test_options(options):
    ours, plain = pair("qwen3", **options)
    assert KIND not in kinds(ours) and kinds(ours).count("rope") == 2
    with Ops() as ops:
        found = seeded_step(ours, inputs_of("qwen3"))
    assert ops.counts()["rope"] == 2 and ops.counts()[KIND] == 0
    assert_same_step(found, seeded_step(plain, inputs_of("qwen3")))
    liger.patch(ours, rope=False)
    assert not {KIND, "rope"} & set(kinds(ours))


def test_norms_with_hooks_are_called():
    ours, plain = pair("qwen3")
    seen = []
    for model in (ours, plain):
        norm = model.model.layers[0].self_attn.q_norm
        norm.register_forward_hook(lambda module, args, output: seen.append(type(output)) or 2 * output)
    with Ops() as ops:
        found = seeded_step(ours, inputs_of("qwen3"))
    assert ops.counts()[KIND] == ops.counts()["rope"] == 1
    assert_same_step(found, seeded_step(plain, inputs_of("qwen3")))
    assert set(seen) == {torch.Tensor}


def test_norms_of_several_settings():
    """The op has one eps: norms with two stay as they are."""
    plain = tiny("qwen3")
    plain.model.layers[1].self_attn.k_norm.variance_epsilon = 0.5
    ours = liger.patch(twin(plain))
    assert kinds(ours).count(KIND) == 1 and kinds(ours).count("rope") == 1
    assert_same_step(*(seeded_step(model, inputs_of("qwen3")) for model in (ours, plain)))
    ours.model.layers[0].self_attn.k_norm.variance_epsilon = 0.5
    plain.model.layers[0].self_attn.k_norm.variance_epsilon = 0.5
    assert_same_step(*(seeded_step(model, inputs_of("qwen3")) for model in (ours, plain)))


def test_a_norm_whose_forward_was_replaced():
    plain = tiny("qwen3")
    norm = plain.model.layers[0].self_attn.q_norm
    norm.forward = lambda x: 0.5 * x
    ours = twin(plain)
    ours.model.layers[0].self_attn.q_norm.forward = lambda x: 0.5 * x
    liger.patch(ours)
    assert kinds(ours).count(KIND) == 1
    given = inputs_of("qwen3")
    assert_same_step(*(seeded_step(model, given) for model in (ours, plain)))


def test_a_forward_that_was_replaced_later():
    """It reads the norms as modules."""
    ours, plain = pair("qwen3")
    for model in (ours, plain):
        attention = model.model.layers[0].self_attn
        attention.forward = Qwen3Attention.forward.__get__(attention)
    with Ops() as ops:
        found = seeded_step(ours, inputs_of("qwen3"))
    assert ops.counts()[KIND] == 1
    assert_same_step(found, seeded_step(plain, inputs_of("qwen3")))


def test_the_trial_has_a_cache(monkeypatch):
    """Whatever transformers calls that argument."""
    seen = []

    def update(cache, keys, values, *args, **kwargs):
        seen.append(keys)
        return keys, values

    monkeypatch.setattr("liger.transformers.attention.qk_norm_rope._Cache.update", update)
    assert KIND in kinds(liger.patch(tiny("qwen3"))) and seen


def test_norms_of_whole_rows():
    """OLMo 2 normalises all heads together."""
    plain = make("Olmo2")
    ours = liger.patch(twin(plain))
    assert KIND not in kinds(ours) and kinds(ours).count("rope") == 2
    assert_same_step(step(ours, **batch()), step(plain, **batch()))
