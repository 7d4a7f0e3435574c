# SPDX-License-Identifier: BSD-3-Clause
"""Attentions that differ from the usual form in one respect: which of them get norms and rotation in one
op."""

import pytest
import torch

import liger

pytest.importorskip("transformers")

from called_ops import CalledOps
from tiny_models import assert_same_step, batch, make, step, twin
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3Attention,
    apply_rotary_pos_emb,
    eager_attention_forward,
)

from liger.transformers.recipe.classes import recipe_of

KIND = "qk_norm_rope"


class Attention(Qwen3Attention):
    """The usual form; the classes below replace one of its parts."""

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
    """The number of a layer decides if it rotates; no layer may get a norm that is not computed."""

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


@pytest.mark.covering(1)
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
    with CalledOps() as ops:
        output = ours(**batch())
    assert ops.names.count(KIND) == count
    del output
    assert_same_step(step(ours, **batch()), step(plain, **batch()))
