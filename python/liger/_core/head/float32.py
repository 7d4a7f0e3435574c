# SPDX-License-Identifier: BSD-3-Clause
"""An lm_head with logits in float32, and its gradients: ``logits_dtype=torch.float32``.

The logits of a chunk are float32 on every backend, as exact as IEEE float32 (:mod:`.float32_matmul`), and so
are the probabilities of the backward. Where hidden states and weight have one 16-bit dtype, the finished
gradient of the logits is rounded once to that dtype, as an operand of the GEMMs of both gradients. With a
float32 weight nothing is rounded but the results.
"""

import torch

from ..math.float32_matmul import float32_product, weight_blocks
from ..math.matmul import product
from .lm_head import LMHeadGradients, planned_rows

# float16: the largest gradient of a logit becomes a number below 2^15.
_LARGEST_EXPONENT = 15


def _is_narrow(x, weight):
    return x.dtype == weight.dtype != torch.float32


def bytes_per_logit(x, weight, with_gradients):
    """4, and 2 for a gradient that is rounded."""
    return 6 if with_gradients and _is_narrow(x, weight) else 4


def float32_chunk_rows(x, weight, with_gradients, memory_budget):
    """(rows of a chunk, number of chunks)"""
    return planned_rows(x, weight, False, True, memory_budget, bytes_per_logit(x, weight, with_gradients))


class Float32LMHeadGradients(LMHeadGradients):
    """:class:`LMHeadGradients` from gradients of the logits in float32."""

    def __init__(self, x, weight, bias, needs_grad, chunks, exact, total=None):
        super().__init__(x, weight, bias, needs_grad, chunks, exact, total)
        self._narrow = _is_narrow(x, weight)
        self._rounded = None

    def new_logits(self, rows):
        """float32 memory for rows of logits. Their rounded gradient has memory of its own: the memory of the
        weight gradient if its sum is a separate buffer."""
        if self._narrow and any(self.needs_grad):
            self._rounded = super().new_logits(rows)
        return float32_logits(self.head_weight, rows)

    def add(self, x, dlogits, grad_x, ignored):
        """As :meth:`LMHeadGradients.add`; dlogits is float32."""
        if not self._narrow:
            return self._add_wide(x, dlogits, grad_x, ignored)
        rounded = self._rounded[: dlogits.shape[0]]
        if x.dtype == torch.float16:
            return self._add_scaled(x, dlogits, rounded, grad_x, ignored)
        return super().add(x, rounded.copy_(dlogits), grad_x, ignored)

    def _add_scaled(self, x, dlogits, rounded, grad_x, ignored):
        """The gradient of a logit is at most a probability divided by the number of tokens, which underflows
        in float16: it is multiplied by a power of two, and the products of the chunk are divided by it."""
        largest = torch.linalg.vector_norm(dlogits, torch.inf)
        exponent = (_LARGEST_EXPONENT - torch.frexp(largest).exponent).clamp(-100, 100)
        scale = torch.ldexp(largest.new_ones(()), exponent.to(largest.dtype))
        torch.mul(dlogits, scale, out=rounded)
        need_input, need_weight, _ = self.needs_grad
        factor = scale.reciprocal()

        def scaled(a, b):
            out = dlogits.new_empty(a.shape[0], b.shape[1])
            product(a, b, out)
            return out.mul_(factor)

        if need_weight:
            valid = self._valid_rows(x, ignored, grad_x)
            for classes in weight_blocks(self.head_weight):
                term = scaled(rounded[:, classes].t(), valid)
                self.sum[classes] = self.sum[classes] + term if self.chunks_added else term
        if need_input:
            for block in weight_blocks(x):
                grad_x[block] = scaled(rounded[block], self.head_weight)
        self._add_bias(dlogits)
        self.chunks_added += 1

    def _add_wide(self, x, dlogits, grad_x, ignored):
        need_input, need_weight, _ = self.needs_grad
        valid = self._valid_rows(x, ignored, None) if need_weight else x
        wide = x.new_zeros(x.shape, dtype=torch.float32) if need_input else None
        for classes in weight_blocks(self.head_weight):
            columns = dlogits[:, classes]
            if need_weight:
                float32_product(columns.t(), valid, self.sum[classes], self.chunks_added > 0)
            if need_input:
                float32_product(columns, self.head_weight[classes], wide, True)
        if need_input:
            grad_x.copy_(wide)
        self._add_bias(dlogits)
        self.chunks_added += 1


def float32_logits(weight, rows):
    """float32 memory for rows of logits, each aligned to 16 bytes."""
    classes = weight.shape[0]
    stride = -(-classes // 4) * 4
    return weight.new_empty(rows, stride, dtype=torch.float32)[:, :classes]
