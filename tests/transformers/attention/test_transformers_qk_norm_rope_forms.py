# SPDX-License-Identifier: BSD-3-Clause
"""Attentions that differ from the usual form in one respect: which of them get norms and rotation in one
op."""

import pytest
import torch  # noqa: F401  a form uses it

import liger

pytest.importorskip("transformers")

from called_ops import CalledOps
from tiny_models import assert_same_step, batch, make, step, twin
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3Attention,
    apply_rotary_pos_emb,
    eager_attention_forward,  # noqa: F401
)

from liger.transformers.recipe.classes import recipe_of

KIND = "qk_norm_rope"

# The lines of the usual forward, all in one function, so that it has a rotary function.
HEAD = (
    "def forward(self, hidden_states, position_embeddings, attention_mask, past_key_values=None, **kwargs):\n"
    "    x = hidden_states"
)
SHAPE = "shape = (*x.shape[:-1], -1, self.head_dim)"
Q = "q = self.q_norm(self.q_proj(x).view(shape)).transpose(1, 2)"
K = "k = self.k_norm(self.k_proj(x).view(shape)).transpose(1, 2)"
ROTATE = "q, k = apply_rotary_pos_emb(q, k, *position_embeddings)"
V = "v = self.v_proj(x).view(shape).transpose(1, 2)"
ATTEND = "y, weights = eager_attention_forward(self, q, k, v, attention_mask, scaling=self.scaling)"
RETURN = "return self.o_proj(y.reshape(*x.shape[:-1], -1)), weights"

# Form -> (kind of the attention, calls of the fused op in two layers, what replaces a line).
FORMS = {
    "usual": (KIND, 2, {}),
    "rotation in another method": (None, 0, {ROTATE: "q, k = self.rotated(q, k, position_embeddings)"}),
    "heads first": (
        KIND,
        2,
        {
            Q: "q = self.q_norm(self.q_proj(x).view(shape).transpose(1, 2))",
            K: "k = self.k_norm(self.k_proj(x).view(shape).transpose(1, 2))",
        },
    ),
    "heads last": (
        KIND,
        2,
        {
            Q: "q = self.q_norm(self.q_proj(x).view(shape))",
            K: "k = self.k_norm(self.k_proj(x).view(shape))",
            ROTATE: "q, k = apply_rotary_pos_emb(q, k, *position_embeddings, unsqueeze_dim=2)\n"
            "    q, k = q.transpose(1, 2), k.transpose(1, 2)",
        },
    ),
    "scaled after the norm": ("rope", 0, {Q: f"{Q} * 1.5", K: K.replace("k = ", "k = 0.5 * ", 1)}),
    # The keys before the rotation are added to the keys after it.
    "norm read twice": ("rope", 0, {ROTATE: f"{ROTATE.replace('q, k', 'q, turned', 1)}\n    k = turned + k"}),
    "part of the head": (
        "rope",
        0,
        {
            ROTATE: "half = self.head_dim // 2\n"
            "    tables = [t[..., : self.head_dim // 2] for t in position_embeddings]\n"
            "    a, b = apply_rotary_pos_emb(q[..., :half], k[..., :half], *tables)\n"
            "    q, k = torch.cat((a, q[..., half:]), -1), torch.cat((b, k[..., half:]), -1)"
        },
    ),
    "one norm for both": (KIND, 2, {K: K.replace("k_norm", "q_norm")}),
    "norm of values": ("rope", 0, {V: "v = self.q_norm(self.v_proj(x).view(shape)).transpose(1, 2)"}),
    "keys without norm": (
        "rope",
        0,
        {K: "k = self.k_proj(x).view(shape).transpose(1, 2) + 0 * self.k_norm.weight"},
    ),
    # The number of a layer decides if it rotates; no layer may get a norm that is not computed.
    "some layers rotate": (KIND, 1, {ROTATE: f"if self.layer_idx % 2 == 0: {ROTATE}"}),
    # A condition that no trial meets.
    "long sequences rotate": (KIND, 0, {ROTATE: f"if x.shape[1] < 8: {ROTATE}"}),
    # Its code cannot be renamed.
    "sets its norm": ("rope", 0, {SHAPE: f"self.q_norm = self.q_norm\n    {SHAPE}"}),
}


def attention_class(name):
    changes = FORMS[name][-1]
    lines = [changes.get(line, line) for line in (SHAPE, Q, K, ROTATE, V, ATTEND, RETURN)]
    members = {"rotated": lambda self, q, k, tables: apply_rotary_pos_emb(q, k, *tables)}
    exec("\n    ".join([HEAD, *lines]), globals(), members)
    return type("Attention", (Qwen3Attention,), members)


@pytest.mark.covering(1)
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_forms(form, recompute):
    plain, cls = make("qwen3"), attention_class(form)
    for layer in plain.model.layers:
        layer.self_attn.__class__ = cls
    ours = liger.patch(twin(plain), recompute=recompute)
    kind, count, _ = FORMS[form]
    assert [getattr(recipe_of(layer.self_attn), "kind", None) for layer in ours.model.layers] == [kind] * 2
    ours(**batch())
    with CalledOps() as ops:
        ours(**batch())
    assert ops.names.count(KIND) == count
    assert_same_step(step(ours, **batch()), step(plain, **batch()))
