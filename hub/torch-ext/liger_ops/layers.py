# SPDX-License-Identifier: BSD-3-Clause
"""Layer classes that ``kernels.kernelize`` puts in place of layers of transformers.

kernelize takes the forward alone, and binds it to the module that it replaces: ``self`` is that module. So
the classes have no constructor and no members besides ``forward`` and the two flags, and a forward calls no
method of its class.
"""

import torch
from torch import nn
from torch.nn.modules.module import _global_forward_hooks

try:
    import liger
except ModuleNotFoundError as error:
    if error.name != "liger":
        raise
    from ._missing import liger


class LigerRMSNorm(nn.Module):
    """``x * rsqrt(mean(x^2) + eps) * weight`` with ``variance_epsilon`` or ``eps``: RMSNorm of Llama and
    others."""

    can_torch_compile = True
    has_backward = True

    def forward(self, hidden_states):
        eps = self.variance_epsilon if hasattr(self, "variance_epsilon") else self.eps
        if self.weight.dtype == hidden_states.dtype:
            return liger.rms_norm(hidden_states, self.weight, eps)
        # The result has the wider of both dtypes, as the product that transformers computes.
        return self.weight * liger.rms_norm(hidden_states, None, eps)


class LigerRMSNormZeroCentered(nn.Module):
    """``x * rsqrt(mean(x^2) + eps) * (1 + weight)``, rounded once: RMSNorm of Qwen3-Next and Qwen3.5."""

    can_torch_compile = True
    has_backward = True

    def forward(self, x):
        weight = self.weight if self.weight.dtype == x.dtype else self.weight.float()
        return liger.rms_norm(x, weight, self.eps, 1.0, "gemma")


class LigerRMSNormGated(nn.Module):
    """``x * rsqrt(mean(x^2) + eps) * weight * activation(gate)`` with SiLU or sigmoid, as ``activation``
    says.

    16-bit results are rounded as in transformers: with SiLU (Qwen3-Next) the normalised row and its product
    with the weight are rounded, too; with sigmoid (Kimi Linear) only the result.
    """

    can_torch_compile = True
    has_backward = True

    def forward(self, hidden_states, gate=None):
        x, weight = hidden_states, self.weight
        if gate.dtype != x.dtype:
            x, gate = x.float(), gate.float()
        if weight.dtype != x.dtype:
            weight = weight.float()
        activation = "silu" if self.activation == "swish" else self.activation
        casting_mode = "gemma" if activation == "sigmoid" else "llama"
        y = liger.rms_norm_gated(
            x, gate, weight, self.variance_epsilon, casting_mode=casting_mode, activation=activation
        )
        return y.to(hidden_states.dtype)


def _is_ours(projection):
    """Whether the output of a projection has no other reader, so that the backward may overwrite it.

    Readers are forward hooks, and the backward of a layer that is neither nn.Linear nor an adapter of PEFT
    around it.
    """
    if torch.compiler.is_compiling() or _global_forward_hooks:
        return False
    layer = projection
    while layer is not None and not layer._forward_hooks:
        if type(layer) is nn.Linear:
            return True
        layer = (
            layer._modules.get("base_layer") if type(layer).__module__.startswith("peft.tuners.") else None
        )
    return False


class LigerSwiGLUMLP(nn.Module):
    """``down_proj(silu(gate_proj(x)) * up_proj(x))``."""

    can_torch_compile = True
    has_backward = True

    def forward(self, x):
        inplace = _is_ours(self.gate_proj) and _is_ours(self.up_proj)
        return self.down_proj(liger.swiglu(self.gate_proj(x), self.up_proj(x), inplace=inplace))


class LigerGEGLUMLP(nn.Module):
    """``down_proj(gelu(gate_proj(x)) * up_proj(x))`` with the approximation by tanh, as in Gemma."""

    can_torch_compile = True
    has_backward = True

    def forward(self, x):
        inplace = _is_ours(self.gate_proj) and _is_ours(self.up_proj)
        return self.down_proj(liger.geglu(self.gate_proj(x), self.up_proj(x), "tanh", inplace=inplace))


def _tiled_mlp(mlp, x, activation):
    gate, up, down = mlp.gate_proj, mlp.up_proj, mlp.down_proj
    weights = gate.weight, up.weight, down.weight
    return liger.tiled_mlp(x, *weights, gate.bias, up.bias, down.bias, activation=activation)


class LigerTiledSwiGLUMLP(nn.Module):
    """:class:`LigerSwiGLUMLP`, a shard of tokens at a time by ``liger.tiled_mlp``; for plain linear
    projections."""

    can_torch_compile = True
    has_backward = True

    def forward(self, x):
        return _tiled_mlp(self, x, "silu")


class LigerTiledGEGLUMLP(nn.Module):
    """:class:`LigerGEGLUMLP`, a shard of tokens at a time by ``liger.tiled_mlp``; for plain linear
    projections."""

    can_torch_compile = True
    has_backward = True

    def forward(self, x):
        return _tiled_mlp(self, x, "gelu_tanh")


class LigerLinear(nn.Module):
    """The linear layer of torch, whose GEMMs liger does not replace: for mappings that have all names."""

    can_torch_compile = True
    has_backward = True

    def forward(self, input):
        return nn.functional.linear(input, self.weight, self.bias)


class LigerRotaryPosEmb(nn.Module):
    """``apply_rotary_pos_emb`` with tables of equal halves, forward and backward."""

    can_torch_compile = True
    has_backward = True

    def forward(self, q, k, cos, sin, unsqueeze_dim=1):
        return liger.rope(q, k, cos, sin, unsqueeze_dim)


class LigerForCausalLMLoss(nn.Module):
    """ForCausalLMLoss of transformers from logits in their own dtype, by ``liger.cross_entropy``."""

    can_torch_compile = True
    has_backward = True

    def forward(
        self,
        logits,
        labels,
        vocab_size,
        num_items_in_batch=None,
        ignore_index=-100,
        shift_labels=None,
        **kwargs,
    ):
        if shift_labels is None:
            shift_labels = nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        if isinstance(num_items_in_batch, torch.Tensor):
            num_items_in_batch = num_items_in_batch.to(logits.device)
        return liger.cross_entropy(
            logits.reshape(-1, vocab_size), shift_labels.reshape(-1).to(logits.device),
            denominator=num_items_in_batch, ignore_index=ignore_index,
        )  # fmt: skip
