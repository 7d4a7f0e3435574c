# SPDX-License-Identifier: BSD-3-Clause
"""RMS norms of queries and keys that the rotation computes: one ``liger.qk_norm_rope`` instead of three ops.

The forward of an attention normalises queries and keys, swaps dimensions, and rotates. In its patched copy
the norm returns a :class:`DeferredNorm`, and the rotary function computes norm and rotation at once. Other
code that reads it gets the result of the norm, so the copy computes the same as the original in any case.
"""

import torch
from torch.utils._pytree import tree_map

from ...ops.rope.qk_norm_rope import qk_norm_rope
from ..norms.norm import NormRecipe
from ..recipe import recomputed
from ..recipe.classes import is_called_plainly, recipe_of
from .rotations import Rotation, layout


class DeferredNorm:
    """A norm over the last dimension of ``x``, computed when something else than a rotation reads it."""

    def __init__(self, norm, x, swaps=()):
        self.norm, self.x, self.swaps = norm, x, swaps
        self._result = None

    def transpose(self, first, second):
        last = self.x.dim() - 1
        if last in (first % (last + 1), second % (last + 1)):
            return self.read().transpose(first, second)
        return type(self)(self.norm, self.x, (*self.swaps, (first, second)))

    def heads(self):
        """``x`` in the shape of the result."""
        return self._swapped(self.x)

    def read(self):
        """The result of the norm."""
        if self._result is None:
            self._result = self._swapped(self.norm(self.x))
        return self._result

    def _swapped(self, tensor):
        for pair in self.swaps:
            tensor = tensor.transpose(*pair)
        return tensor

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return func(*tree_map(computed, args), **tree_map(computed, kwargs or {}))

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        # The norm changes none of these.
        same = name in ("shape", "dtype", "device", "ndim", "dim", "size")
        return getattr(self.heads() if same else self.read(), name)


def _operator(name):
    def method(self, *args):
        return getattr(self.read(), name)(*args)

    return method


_OPERATORS = "add radd sub rsub mul rmul truediv rtruediv matmul rmatmul neg pow getitem len iter"
for _name in _OPERATORS.split():
    setattr(DeferredNorm, f"__{_name}__", _operator(f"__{_name}__"))


def computed(value):
    """The tensor instead of a :class:`DeferredNorm`; other values as they are."""
    return value.read() if isinstance(value, DeferredNorm) else value


def deferred(norm, x, make=DeferredNorm):
    """``norm(x)``, as a :class:`DeferredNorm` if the op may compute it."""
    recipe = recipe_of(norm)
    is_known = isinstance(recipe, NormRecipe) and recipe.kind == "rms_norm" and isinstance(x, torch.Tensor)
    if is_known and is_called_plainly(norm, x):
        operand = recipe.operand(norm, x, _weight(norm))
        if operand is not None:
            return make(norm, operand)
    return norm(x)


def _weight(norm):
    return getattr(norm, "weight", None) if recipe_of(norm).weighted else None


def _settings(norm):
    recipe = recipe_of(norm)
    return recipe.eps_of(norm), recipe.offset, recipe.casting_mode


def normalise_and_rotate(found, values, tables, unsqueeze):
    """The rotated results of one or two norms; None where the op does not compute them.

    Args:
        found: the form and the layouts of the rotary function.
        values: its arguments; at least one is a :class:`DeferredNorm`.
        tables: cos and sin.
    """
    form = found.form
    if not isinstance(form, Rotation) or not form.is_of_heads:
        return None
    if not all(isinstance(v, DeferredNorm) for v in values) or not all(
        isinstance(t, torch.Tensor) for t in tables
    ):
        return None
    settings = _settings(values[0].norm)
    if any(_settings(v.norm) != settings for v in values):
        return None
    tensors, weights = [v.heads() for v in values], [_weight(v.norm) for v in values]
    if layout(tensors, tables) not in found.layouts:
        return None
    function = _function(form, len(values), unsqueeze, settings)
    outputs = function(*tensors, *weights, *tables)
    if outputs is not None and recomputed.is_active():
        # The op saves its inputs.
        recomputed.register(function, (*tensors, *weights, *tables), outputs)
    return outputs


def _function(form, count, unsqueeze, settings):
    """Norm and rotation as a function of tensors, weights and tables. It must not refer to any tensor."""

    def function(*given):
        tensors, weights, tables = given[:count], given[count : 2 * count], given[2 * count :]
        # Only one tensor is rotated: the keys have no heads.
        k_weight = weights[1] if count == 2 else None

        def op(q, k, cos, sin, heads, interleaved):
            return qk_norm_rope(q, k, weights[0], k_weight, cos, sin, *settings, heads, interleaved)

        return form.rotate(tensors, tables, unsqueeze, op)

    return function
