# SPDX-License-Identifier: BSD-3-Clause
"""The low-rank term of an lm_head with adapters (LoRA): logits ``x W^T + down B^T`` with
``down = scale * x A^T``.

Nothing of the size of the weight is allocated: the term is added to a chunk of logits, and the gradients of
its factors are products with the gradient of that chunk. ``W + scale * B A`` would be a second weight, which
in bfloat16 rounds small updates away, and ``[W, B]`` would be a copy.
"""

from typing import NamedTuple

import torch

from ..math.dtypes import accumulate_dtype
from ..math.float32_matmul import float32_product
from ..math.matmul import product, without_ignored, write_linear
from ..op.tensors import check_device, check_floating, check_shape, wrong_shape


def check_factors(op, input, weight, lora_a, lora_b):
    """Raises RuntimeError unless lora_a (r, H), which may be None, and lora_b (V, r) fit input (..., H) and
    weight (V, H)."""
    check_floating(op, "lora_b", lora_b)
    check_device(op, "lora_b", lora_b, "input", input)
    if lora_b.dim() != 2 or lora_b.shape[0] != weight.shape[0] or lora_b.shape[1] == 0:
        expected = f"(vocab, r) with as many rows as weight, {weight.shape[0]}, and r of at least 1"
        raise wrong_shape(op, "lora_b", lora_b, expected)
    if lora_a is None:
        return
    check_floating(op, "lora_a", lora_a)
    check_device(op, "lora_a", lora_a, "input", input)
    if lora_a.shape != (lora_b.shape[1], weight.shape[1]):
        expected = f"(r, hidden), {(lora_b.shape[1], weight.shape[1])}: r is the last dimension of lora_b"
        raise wrong_shape(op, "lora_a", lora_a, expected)


def check_low_rank(op, input, weight, lora_a, lora_b, down):
    """Raises RuntimeError unless the factors of an op fit: lora_a or down (N, r), and lora_b."""
    check_factors(op, input, weight, lora_a, lora_b)
    if (lora_a is None) == (down is None):
        raise RuntimeError(
            f"{op}: expected either lora_a or down, got {'both' if down is not None else 'none'}"
        )
    if down is not None:
        check_floating(op, "down", down)
        check_device(op, "down", down, "input", input)
        check_shape(op, "down", down, (input.shape[0], lora_b.shape[1]), "one row per row of input")


class LowRank(NamedTuple):
    """The factors in the dtype of the products: the dtype of the hidden states, or float32."""

    lora_a: torch.Tensor | None
    lora_b: torch.Tensor
    down: torch.Tensor | None  # scale * x A^T of all rows, in place of lora_a
    scale: float
    float32_logits: bool

    @classmethod
    def of(cls, x, lora_a, lora_b, down, scale, float32_logits=False):
        dtype = torch.float32 if float32_logits else x.dtype
        factors = (t if t is None else t.to(dtype) for t in (lora_a, lora_b, down))
        return cls(*factors, scale, float32_logits)

    def down_of(self, at, x):
        """(rows, r) ``scale * x A^T`` of a chunk x, which are the rows ``at`` of all."""
        if self.lora_a is None:
            return self.down[at]
        out = x.new_empty((x.shape[0], self.lora_b.shape[1]), dtype=self.lora_b.dtype)
        if self.float32_logits:
            float32_product(x, self.lora_a.t(), out, scale=self.scale)
        else:
            write_linear(x, self.lora_a, None, out, self.scale)
        return out

    def add_logits(self, down, logits, factor):
        """Adds ``factor * down B^T`` to a chunk of logits."""
        if self.float32_logits:
            float32_product(down, self.lora_b.t(), logits, add=True, scale=factor)
        else:
            torch.addmm(logits, down, self.lora_b.t(), alpha=factor, out=logits)


class LowRankGradients:
    """The gradients of the factors, chunk by chunk, in float32 (float64 for float64 inputs).

    Args:
        low_rank: :class:`LowRank`.
        factors: (lora_a, lora_b, down) as the op got them; the results have their dtypes.
        rows: N.
        needs_grad: of the factors.
    """

    def __init__(self, low_rank, factors, rows, needs_grad):
        self._low_rank, self._factors = low_rank, factors
        like = low_rank.lora_b
        wide, rank = accumulate_dtype(like.dtype), like.shape[1]
        hidden = 0 if low_rank.lora_a is None else low_rank.lora_a.shape[1]
        need_a, need_b, need_down = (
            need and t is not None for need, t in zip(needs_grad, factors, strict=True)
        )
        self._a = like.new_zeros((rank, hidden) if need_a else 0, dtype=wide)
        self._b = like.new_zeros(like.shape if need_b else 0, dtype=wide)
        self._down = like.new_zeros((rows, rank) if need_down else 0, dtype=wide)
        self._needs_grad = need_a, need_b, need_down

    def add(self, at, x, dlogits, down, ignored, need_input):
        """Adds the gradients of a chunk, before x may be overwritten.

        Args:
            at: the rows of the chunk among all rows, a slice or an index.
            x: (rows, H) hidden states; ignored rows may have NaN.
            dlogits: (rows, V) the gradient of the logits.
            down: (rows, r) of :meth:`LowRank.down_of`.
            ignored: (rows,) mask of ignored rows, or None.
            need_input: whether the gradient of x is needed.

        Returns:
            (rows, r) the gradient of ``down``; None if the gradient of x does not depend on it.
        """
        need_a, need_b, need_down = self._needs_grad
        through_a = need_a or (need_input and self._low_rank.lora_a is not None)
        grad_down = None
        if through_a or need_down:
            grad_down = down.new_empty(down.shape, dtype=self._b.dtype)
            self._product(dlogits, self._low_rank.lora_b, grad_down, False)
            if need_down:
                self._down[at] = grad_down
        if need_b:
            self._product(dlogits.t(), without_ignored(down, ignored), self._b, True)
        if not through_a:
            return None
        grad_down = grad_down.mul_(self._low_rank.scale).to(down.dtype)
        if need_a:
            self._product(grad_down.t(), without_ignored(x, ignored), self._a, True)
        return grad_down if need_input else None

    def _product(self, a, b, out, add):
        (float32_product if self._low_rank.float32_logits else product)(a, b, out, add)

    def add_grad_input(self, grad_x, grad_down):
        """Adds ``grad_down A`` to the gradient of a chunk of hidden states. grad_down: of :meth:`add`."""
        if self._low_rank.float32_logits:
            term = grad_down.new_empty(grad_x.shape)
            float32_product(grad_down, self._low_rank.lora_a, term)
            grad_x += term
        else:
            torch.addmm(grad_x, grad_down, self._low_rank.lora_a, out=grad_x)

    def finish(self):
        """(of lora_a, of lora_b, of down) in their dtypes; empty unless needed."""
        grads, like = (self._a, self._b, self._down), self._factors[1]
        return tuple(
            g.to((like if t is None else t).dtype) for g, t in zip(grads, self._factors, strict=True)
        )


def refuse_one_factor(op, lora_a, lora_b):
    """Raises RuntimeError if only one factor is given."""
    if (lora_a is None) != (lora_b is None):
        given, missing = ("lora_b", "lora_a") if lora_a is None else ("lora_a", "lora_b")
        raise RuntimeError(f"{op}: {missing} is None, expected a tensor with {given}")
