"""Norms of queries and keys and their rotation in one op: which attentions get it, and that nothing else changes."""

import copy
import pickle

import pytest
import torch
from torch import nn

import liger

transformers = pytest.importorskip("transformers")

from called_ops import CalledOps  # noqa: E402
from combinations import inputs_of, lora, seeded_step, tiny  # noqa: E402
from tiny_models import assert_same_step, batch, first_is_quick, make, step, twin  # noqa: E402
from transformers.models.qwen3.modeling_qwen3 import (  # noqa: E402
    Qwen3Attention,
    apply_rotary_pos_emb,
    eager_attention_forward,
)

from liger.transformers import _deferred_norm, patch_report  # noqa: E402
from liger.transformers._classes import recipe_of  # noqa: E402
from liger.transformers._deferred_norm import DeferredNorm  # noqa: E402

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


# --- the same results ---------------------------------------------------------------------------------------------


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


def test_bfloat16():
    """As close to float64 as the model before."""
    plain = make("qwen3", dtype=torch.bfloat16, attn_implementation="sdpa")
    ours, given = liger.patch(twin(plain)), batch()
    exact = step(twin(plain).double(), **given)[1]
    distances = []
    for model in (ours, plain):
        grads = step(model, **given)[1]
        distances.append({n: (grads[n].double() - g).norm() / g.norm() for n, g in exact.items()})
    assert kinds(ours).count(KIND) == 2
    for name, distance in distances[1].items():
        assert distances[0][name] <= 1.5 * distance + 2e-3, name


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("recompute", [False, True])
def test_checkpointing(use_reentrant, recompute):
    ours, plain = pair("qwen3", recompute=recompute)
    for model in (ours, plain):
        model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    assert_same_step(*(seeded_step(model, inputs_of("qwen3")) for model in (ours, plain)))


@pytest.mark.parametrize("recompute", [False, True])
def test_planned_checkpointing(recompute):
    ours, plain = pair("qwen3", recompute=recompute)
    liger.transformers.checkpoint(ours, 10**9)
    expected = seeded_step(plain, inputs_of("qwen3"))
    for _ in range(3):
        assert_same_step(seeded_step(ours, inputs_of("qwen3")), expected)


@pytest.mark.parametrize("model_type", ["qwen3", "gemma3_text"])
def test_generation_with_a_cache(model_type):
    ours, plain = pair(model_type)
    given = {"input_ids": inputs_of(model_type)["input_ids"], "max_new_tokens": 6, "do_sample": False}
    assert torch.equal(ours.eval().generate(**given), plain.eval().generate(**given))


def test_positions_after_a_cache():
    """Logits of tokens after cached ones, whose positions the mask shifts."""
    ours, plain = pair("qwen3")
    ids = inputs_of("qwen3")["input_ids"][:, :8]
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    results = []
    for model in (ours.eval(), plain.eval()):
        with torch.no_grad():
            first = model(input_ids=ids[:, :5], attention_mask=mask[:, :5], use_cache=True)
            positions = (mask.cumsum(1) - 1).clamp_min(0)[:, 5:]
            given = {
                "attention_mask": mask,
                "position_ids": positions,
                "past_key_values": first.past_key_values,
            }
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


def test_functional_transforms():
    ours, plain = pair("qwen3")
    given = inputs_of("qwen3")

    def grads(model):
        def loss(parameters):
            return torch.func.functional_call(model, parameters, (), given).loss

        return torch.func.grad(loss)({n: p.detach() for n, p in model.named_parameters()})

    found, expected = grads(ours), grads(plain)
    for name, grad in expected.items():
        torch.testing.assert_close(found[name], grad, rtol=1e-5, atol=1e-5 * grad.abs().max().item())


# --- what is replaced, and what is not ----------------------------------------------------------------------------


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


def test_a_function_for_the_type():
    model = liger.transformers.apply_liger_kernel_to_qwen3(model=(ours := tiny("qwen3")), qk_norm_rope=False)
    assert model is None and KIND not in kinds(ours)
    liger.transformers.apply_liger_kernel_to_qwen3(model=ours, recompute=True)
    assert KIND in kinds(ours) and len(patch_report(ours).recomputed) == 2


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies(copied):
    ours, plain = pair("qwen3")
    other = copied(ours)
    with Ops() as ops:
        found = seeded_step(other, inputs_of("qwen3"))
    assert ops.counts()[KIND] == 2
    assert_same_step(found, seeded_step(plain, inputs_of("qwen3")))


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


def test_norms_of_whole_rows():
    """OLMo 2 normalises all heads together."""
    plain = make("Olmo2")
    ours = liger.patch(twin(plain))
    assert KIND not in kinds(ours) and kinds(ours).count("rope") == 2
    assert_same_step(step(ours, **batch()), step(plain, **batch()))


# --- attentions that differ from the usual form in one respect ------------------------------------------------------


class Attention(Qwen3Attention):
    """The usual form; the classes below replace one of its parts."""

    def queries(self, x, shape):
        return self.q_norm(self.q_proj(x).view(shape)).transpose(1, 2)

    def forward(self, hidden_states, position_embeddings, attention_mask, past_key_values=None, **kwargs):
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        q = self.q_norm(self.q_proj(hidden_states).view(shape)).transpose(1, 2)
        k = self.k_norm(self.k_proj(hidden_states).view(shape)).transpose(1, 2)
        return self.attend(hidden_states, q, k, position_embeddings, attention_mask)

    def attend(self, x, q, k, tables, mask):
        q, k = apply_rotary_pos_emb(q, k, *tables)
        return self.combine(x, q, k, mask)

    def combine(self, x, q, k, mask):
        shape = (*x.shape[:-1], -1, self.head_dim)
        v = self.v_proj(x).view(shape).transpose(1, 2)
        output, weights = eager_attention_forward(self, q, k, v, mask, scaling=self.scaling)
        return self.o_proj(output.reshape(*x.shape[:-1], -1)), weights


class Usual(Attention):
    """All in one forward, so that it has a rotary function."""

    def forward(self, hidden_states, position_embeddings, attention_mask, past_key_values=None, **kwargs):
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        q = self.q_norm(self.q_proj(hidden_states).view(shape)).transpose(1, 2)
        k = self.k_norm(self.k_proj(hidden_states).view(shape)).transpose(1, 2)
        q, k = apply_rotary_pos_emb(q, k, *position_embeddings)
        return self.combine(hidden_states, q, k, attention_mask)


class HeadsFirst(Attention):
    """The norm after the dimensions were swapped."""

    def forward(self, hidden_states, position_embeddings, attention_mask, past_key_values=None, **kwargs):
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        q = self.q_norm(self.q_proj(hidden_states).view(shape).transpose(1, 2))
        k = self.k_norm(self.k_proj(hidden_states).view(shape).transpose(1, 2))
        q, k = apply_rotary_pos_emb(q, k, *position_embeddings)
        return self.combine(hidden_states, q, k, attention_mask)


class HeadsLast(Attention):
    """The rotation before the dimensions are swapped."""

    def forward(self, hidden_states, position_embeddings, attention_mask, past_key_values=None, **kwargs):
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        q = self.q_norm(self.q_proj(hidden_states).view(shape))
        k = self.k_norm(self.k_proj(hidden_states).view(shape))
        q, k = apply_rotary_pos_emb(q, k, *position_embeddings, unsqueeze_dim=2)
        return self.combine(hidden_states, q.transpose(1, 2), k.transpose(1, 2), attention_mask)


class ScaledAfterTheNorm(Attention):
    def forward(self, hidden_states, position_embeddings, attention_mask, past_key_values=None, **kwargs):
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        q = self.q_norm(self.q_proj(hidden_states).view(shape)).transpose(1, 2) * 1.5
        k = 0.5 * self.k_norm(self.k_proj(hidden_states).view(shape)).transpose(1, 2)
        q, k = apply_rotary_pos_emb(q, k, *position_embeddings)
        return self.combine(hidden_states, q, k, attention_mask)


class NormReadTwice(Attention):
    """The keys before the rotation are added to the keys after it."""

    def forward(self, hidden_states, position_embeddings, attention_mask, past_key_values=None, **kwargs):
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        q = self.q_norm(self.q_proj(hidden_states).view(shape)).transpose(1, 2)
        k = self.k_norm(self.k_proj(hidden_states).view(shape)).transpose(1, 2)
        rotated, turned = apply_rotary_pos_emb(q, k, *position_embeddings)
        return self.combine(hidden_states, rotated, turned + k, attention_mask)


class PartOfTheHead(Attention):
    """The rotation gets a slice of the normalised heads."""

    def forward(self, hidden_states, position_embeddings, attention_mask, past_key_values=None, **kwargs):
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        q = self.q_norm(self.q_proj(hidden_states).view(shape)).transpose(1, 2)
        k = self.k_norm(self.k_proj(hidden_states).view(shape)).transpose(1, 2)
        tables = [t[..., : self.head_dim // 2] for t in position_embeddings]
        half = self.head_dim // 2
        a, b = apply_rotary_pos_emb(q[..., :half], k[..., :half], *tables)
        q, k = torch.cat((a, q[..., half:]), -1), torch.cat((b, k[..., half:]), -1)
        return self.combine(hidden_states, q, k, attention_mask)


class OneNormForBoth(Attention):
    def forward(self, hidden_states, position_embeddings, attention_mask, past_key_values=None, **kwargs):
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        q = self.q_norm(self.q_proj(hidden_states).view(shape)).transpose(1, 2)
        k = self.q_norm(self.k_proj(hidden_states).view(shape)).transpose(1, 2)
        q, k = apply_rotary_pos_emb(q, k, *position_embeddings)
        return self.combine(hidden_states, q, k, attention_mask)


class NormOfValues(Attention):
    def forward(self, hidden_states, position_embeddings, attention_mask, past_key_values=None, **kwargs):
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        q = self.q_norm(self.q_proj(hidden_states).view(shape)).transpose(1, 2)
        k = self.k_norm(self.k_proj(hidden_states).view(shape)).transpose(1, 2)
        q, k = apply_rotary_pos_emb(q, k, *position_embeddings)
        v = self.q_norm(self.v_proj(hidden_states).view(shape)).transpose(1, 2)
        output, weights = eager_attention_forward(self, q, k, v, attention_mask, scaling=self.scaling)
        return self.o_proj(output.reshape(*hidden_states.shape[:-1], -1)), weights


class KeysWithoutNorm(Attention):
    def forward(self, hidden_states, position_embeddings, attention_mask, past_key_values=None, **kwargs):
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        q = self.q_norm(self.q_proj(hidden_states).view(shape)).transpose(1, 2)
        k = self.k_proj(hidden_states).view(shape).transpose(1, 2) + 0 * self.k_norm.weight
        q, k = apply_rotary_pos_emb(q, k, *position_embeddings)
        return self.combine(hidden_states, q, k, attention_mask)


class SomeLayersRotate(Attention):
    """Whether a layer rotates follows from its number; no layer may get a norm that is not computed."""

    def forward(self, hidden_states, position_embeddings, attention_mask, past_key_values=None, **kwargs):
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        q = self.q_norm(self.q_proj(hidden_states).view(shape)).transpose(1, 2)
        k = self.k_norm(self.k_proj(hidden_states).view(shape)).transpose(1, 2)
        if self.layer_idx % 2 == 0:
            q, k = apply_rotary_pos_emb(q, k, *position_embeddings)
        return self.combine(hidden_states, q, k, attention_mask)


class LongSequencesRotate(Attention):
    """A condition that no trial meets."""

    def forward(self, hidden_states, position_embeddings, attention_mask, past_key_values=None, **kwargs):
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        q = self.q_norm(self.q_proj(hidden_states).view(shape)).transpose(1, 2)
        k = self.k_norm(self.k_proj(hidden_states).view(shape)).transpose(1, 2)
        if hidden_states.shape[1] < 8:
            q, k = apply_rotary_pos_emb(q, k, *position_embeddings)
        return self.combine(hidden_states, q, k, attention_mask)


class SetsItsNorm(Attention):
    """Its code cannot be renamed."""

    def forward(self, hidden_states, position_embeddings, attention_mask, past_key_values=None, **kwargs):
        self.q_norm = self.q_norm
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        q = self.q_norm(self.q_proj(hidden_states).view(shape)).transpose(1, 2)
        k = self.k_norm(self.k_proj(hidden_states).view(shape)).transpose(1, 2)
        q, k = apply_rotary_pos_emb(q, k, *position_embeddings)
        return self.combine(hidden_states, q, k, attention_mask)


# Class -> (kind of the attention, calls of the fused op in two layers).
FORMS = {
    Attention: (None, 0),
    Usual: (KIND, 2),
    HeadsFirst: (KIND, 2),
    HeadsLast: (KIND, 2),
    ScaledAfterTheNorm: ("rope", 0),
    NormReadTwice: ("rope", 0),
    PartOfTheHead: ("rope", 0),
    OneNormForBoth: (KIND, 2),
    NormOfValues: ("rope", 0),
    KeysWithoutNorm: ("rope", 0),
    SomeLayersRotate: (KIND, 1),
    LongSequencesRotate: (KIND, 0),
    SetsItsNorm: ("rope", 0),
}


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
def test_forms(form, recompute):
    plain = make("qwen3")
    for layer in plain.model.layers:
        layer.self_attn.__class__ = form
    ours = liger.patch(twin(plain), recompute=recompute)
    kind, count = FORMS[form]
    assert [getattr(recipe_of(layer.self_attn), "kind", None) for layer in ours.model.layers] == [kind] * 2
    output = ours(**batch())
    with Ops() as ops:
        output = ours(**batch())
    assert ops.counts()[KIND] == count
    del output
    assert_same_step(step(ours, **batch()), step(plain, **batch()))


# --- a deferred norm ----------------------------------------------------------------------------------------------


class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.eps, self.calls = nn.Parameter(torch.rand(8) + 0.5), 1e-6, 0

    def forward(self, x):
        self.calls += 1
        return nn.functional.rms_norm(x, (8,), self.weight, self.eps)


READS = {
    "torch function": lambda y: torch.cat((y, y), -1),
    "nested arguments": lambda y: torch.stack([y, y]).sum(0),
    "method": lambda y: y.float().reshape(-1, 4),
    "arithmetic": lambda y: ((1 - y) * 2 / (-(y**2) + 1) - y / 3) @ y.transpose(-1, -2),
    "from the left": lambda y: torch.ones(8) * y + (torch.ones(8, 8) @ y.transpose(-1, -2)).transpose(-1, -2),
    "index": lambda y: y[..., :4],
    "unpacked": lambda y: next(iter(y)) + len(y),
    "last dimension swapped": lambda y: y.transpose(1, 2).transpose(0, -1),
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_everything_but_a_rotation_reads_the_norm(read):
    norm, x = Norm(), torch.randn(2, 3, 8)
    deferred = DeferredNorm(norm, x)
    assert deferred.shape == x.shape and deferred.dtype == x.dtype and deferred.dim() == 3
    assert deferred.device == x.device and norm.calls == 0
    assert torch.equal(read(deferred), read(norm(x)))
    swapped = DeferredNorm(norm, x).transpose(0, 1)
    assert isinstance(swapped, DeferredNorm) and swapped.shape == (3, 2, 8)
    assert torch.equal(read(swapped), read(norm(x).transpose(0, 1)))


def test_a_deferred_norm_is_computed_once():
    norm = Norm()
    deferred = DeferredNorm(norm, torch.randn(2, 3, 8))
    deferred + deferred
    deferred.sum()
    assert norm.calls == 1
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = deferred.no_such_name
    assert _deferred_norm.computed(3) == 3
