# SPDX-License-Identifier: BSD-3-Clause
"""Gradients of an lm_head in float16, from gradients of the logits in float16 with a scale.

The gradient of a logit is at most a probability divided by the number of tokens: in float16 it would
underflow or lose most of its bits. It is therefore multiplied by a power of two, a loss scale. The GEMMs
accumulate in float32, and their results are divided by the scale before they are rounded.

Between forward and backward gradients are larger by another factor, :func:`float16_factor`: the gradients of
a mean over thousands of rows are subnormal numbers of a few bits in float16, and the backward multiplies by a
loss scale too late. Therefore a forward that computes gradients computes the gradients of a larger loss.
"""

import torch

from ..math.matmul import product
from ..math.row_blocks import row_blocks
from .lm_head import LMHeadGradients

# The largest gradient of a logit is about the largest row weight; with a reverse KL up to a hundred times
# that.
_LARGEST_EXPONENT = 8
_MAX_FACTOR = 64.0


def scale_of(weights):
    """() a power of two in the dtype of ``weights``, the (rows,) factors of the row losses. No
    synchronisation."""
    if weights.numel() == 0:
        return weights.new_ones(())
    exponent = (_LARGEST_EXPONENT - torch.frexp(weights.abs().amax()).exponent).clamp(-100, 100)
    # With an integer exponent torch 2.10 returns the default dtype.
    return torch.ldexp(weights.new_ones(()), exponent.to(weights.dtype))


class ScaledLMHeadGradients(LMHeadGradients):
    """:class:`LMHeadGradients` for gradients of logits that are multiplied by ``scale``."""

    def __init__(self, x, weight, bias, needs_grad, chunks, exact, scale):
        super().__init__(x, weight, bias, needs_grad, chunks, exact)
        self._factor = scale.reciprocal()

    def add(self, x, dlogits, grad_x, ignored):
        need_input, need_weight, _ = self.needs_grad
        x = self._valid_rows(x, ignored, grad_x)
        first, self.chunks_added = self.chunks_added == 0, self.chunks_added + 1
        if need_weight and self.separate_sum:
            product(dlogits.t(), x, self.sum, add=not first)
        elif need_weight:
            for classes in row_blocks(self.weight):
                grad = self._product(dlogits[:, classes].t(), x)
                self.weight[classes] = grad if first else grad + self.weight[classes]
        if need_input:
            grad_x.copy_(self._product(dlogits, self.head_weight))
        self._add_bias(dlogits)

    def _product(self, a, b):
        out = a.new_empty((a.shape[0], b.shape[1]), dtype=self._factor.dtype)
        product(a, b, out)
        return out.mul_(self._factor)

    def finish(self):
        if self.separate_sum:
            self.sum *= self._factor
        self.bias *= self._factor
        return super().finish()


def float16_factor(divisor, rows):
    """The factor for a loss that is a sum over ``rows`` rows divided by ``divisor``, a float32 0-d tensor.

    A power of 2, so that the loss keeps its bits. With a divisor of 1 or more, the divisor over the factor is
    no smaller than 1, so that no gradient overflows that is far from it now. The rows may be a micro-batch: a
    divisor beyond their number makes gradients smaller than a mean over them does.
    """
    most = _MAX_FACTOR * (divisor / max(rows, 1)).clamp(min=1.0)
    factor = torch.where((divisor > 1) & divisor.isfinite(), torch.minimum(divisor, most), 1.0)
    return torch.exp2(torch.log2(factor).floor())
