# SPDX-License-Identifier: BSD-3-Clause
"""The attention calls of a layer, as an observer sees them before they run.

A layer calls attention through the interface of transformers, a table of functions by name. Each function
there that a planned model uses is replaced, once in a process, by one that asks whether an observer is set in
this thread. SDPA is intercepted where transformers calls it, after keys and values were repeated.
"""

import functools
import sys

import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._pytree import tree_leaves

from ..._core.op.autocast import autocast_operands
from ..recipe import trials
from ..recipe.local import Local
from ..recipe.rename import rename_global, uses_global

_MATH, _EFFICIENT, _CUDNN = 0, 2, 3  # torch.nn.attention.SDPBackend
# Older versions convert a boolean mask for cuDNN's kernel in another way than for the others.
_CONVERTS_ALIKE = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 12)
_TABLE = "ALL_ATTENTION_FUNCTIONS"


# Whom the attention calls of the running layer report to, by ``observer.attend(call)``, or None.
_observer = Local()
observed = _observer.holding


# --- calls of attention -----------------------------------------------------------------------------------


class SDPA:
    """A call of torch's scaled_dot_product_attention."""

    name = "SDPA"

    def __init__(self, query, key, value, mask, dropout, is_causal, scale, enable_gqa):
        # In autocast SDPA casts them: it chooses the kernel for the copies, and its node saves the copies.
        self.tensors = list(autocast_operands(query, key, value, mask))
        self.dropout, self.is_causal, self.scale, self.enable_gqa = dropout, is_causal, scale, enable_gqa
        self.kernel, self._inputs = None, None

    def plain(self):
        return self.run(self.tensors)

    def run(self, tensors):
        return scaled_dot_product_attention(
            *tensors, self.dropout, self.is_causal, scale=self.scale, enable_gqa=self.enable_gqa
        )

    def inputs(self):
        """The tensors of the kernel.

        SDPA's node would save a converted and padded mask. Here the recomputation makes it again.
        """
        if self._inputs is None:
            *others, mask = self.tensors
            if mask is not None and mask.dtype is torch.bool:
                mask = torch.zeros_like(mask, dtype=others[0].dtype).masked_fill_(~mask, -torch.inf)
            if mask is not None and self.kernel == _EFFICIENT:
                mask = torch.nn.functional.pad(mask, (0, -mask.shape[-1] % 16))[..., : mask.shape[-1]]
            self._inputs = [*others, mask]
        return self._inputs

    def refusal(self):
        """The reason why the kernel's output cannot be kept, or None; sets ``kernel``, which SDPA takes."""
        if any(t is not None and type(t) is not torch.Tensor for t in self.tensors):
            return "its tensors are of another class than torch.Tensor"
        self.kernel = self._chosen(self.tensors)
        if self.kernel == _MATH:
            return "SDPA takes its math kernel, which saves all weights of attention"
        mask = self.tensors[3]
        if mask is None:
            return None
        if mask.dtype is torch.bool and self.kernel == _CUDNN and not _CONVERTS_ALIKE:
            return "this torch converts a boolean mask for cuDNN in its own way"
        if self._chosen(self.inputs()) != self.kernel:
            return "SDPA takes another kernel for a converted mask"
        return None

    def _chosen(self, tensors):
        return torch._fused_sdp_choice(
            *tensors, self.dropout, self.is_causal, scale=self.scale, enable_gqa=self.enable_gqa
        )

    @property
    def flops(self):
        """Of the forward."""
        query, key, value, _ = self.tensors
        rows = query.numel() // query.shape[-1]
        product = 2 * rows * key.shape[-2] * (query.shape[-1] + value.shape[-1])
        return product // 2 if self.is_causal else product


class Function:
    """A call of another function of the interface, which takes the arguments of transformers."""

    kernel = None

    def __init__(self, name, function, args, kwargs):
        self.name, self.function, self.args, self.kwargs = name, function, args, kwargs
        self.dropout = kwargs.get("dropout") or 0.0

    def plain(self):
        return self.function(*self.args, **self.kwargs)

    def run(self, tensors):
        return self.plain()

    def inputs(self):
        """All tensors of the call, and the parameters of the module, such as sinks."""
        module = self.args[0]
        own = (*module._parameters.values(), *module._buffers.values())
        leaves = tree_leaves((self.args[1:], self.kwargs))
        return [t for t in (*leaves, *own) if isinstance(t, torch.Tensor)]

    def refusal(self):
        if any(type(t) is not torch.Tensor for t in self.args[1:4]):
            return "its tensors are of another class than torch.Tensor"
        return None

    @property
    def flops(self):
        query, key = self.args[1:3]
        return 2 * query.numel() * key.shape[-2]


# --- the interface of transformers ------------------------------------------------------------------------


def intercept(layer):
    """Replaces the functions of transformers' interface that the attention of a layer calls."""
    for table, name in _named(layer):
        function = table[name]
        if not hasattr(function, "_liger_original"):
            replaced = _intercepting(name, function)
            if name in getattr(table, "_local_mapping", {}):
                table[name] = replaced
            else:
                type(table).register(name, replaced)


def is_named(layer):
    """True if the attention of a layer is called by its name in transformers' interface."""
    return any(True for _ in _named(layer))


def _named(layer):
    for module in layer.modules():
        table = getattr(sys.modules.get(trials.original(module).__module__), _TABLE, None)
        name = getattr(getattr(module, "config", None), "_attn_implementation", None)
        if table is not None and name is not None and name in table:
            yield table, name


def _intercepting(name, function):
    inside = _with_sdpa(function)

    @functools.wraps(function)
    def attention(*args, **kwargs):
        if torch.compiler.is_compiling() or _observer.value is None:
            return function(*args, **kwargs)
        if inside is not None:
            return inside(*args, **kwargs)
        observer = _observer.value
        with observed(None):
            return observer.attend(Function(name, function, args, kwargs))

    attention._liger_original = function
    return attention


class _Torch:
    """The module torch with another ``nn.functional.scaled_dot_product_attention``."""

    def __init__(self, module, **replaced):
        self._module = module
        vars(self).update(replaced)

    def __getattr__(self, name):
        return getattr(self._module, name)


def _observed_sdpa(
    query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False
):
    call = SDPA(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    return call.plain() if _observer.value is None else _observer.value.attend(call)


_functional = _Torch(torch.nn.functional, scaled_dot_product_attention=_observed_sdpa)
_torch = _Torch(torch, nn=_Torch(torch.nn, functional=_functional))
_NAME = "_liger_observed_torch"


def _with_sdpa(function):
    """A copy of transformers' function for SDPA that reports its call of SDPA; None for other functions."""
    if not str(getattr(function, "__module__", "")).endswith("sdpa_attention"):
        return None
    found = uses_global(function, "torch")
    if found is None or found["torch"] is not torch:
        return None
    found[_NAME] = _torch
    return rename_global(function, "torch", _NAME)
