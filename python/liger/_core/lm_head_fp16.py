"""Gradients of an lm_head in float16, from gradients of the logits in float16 with a scale.

The gradient of a logit is at most a probability divided by the number of tokens: in float16 it would underflow or lose
most of its bits. So it is multiplied by a power of two, as by a loss scale. The GEMMs accumulate in float32, and their
results are divided by the scale before they are rounded.
"""

import torch

from .lm_head import LMHeadGradients
from .matmul import product
from .row_blocks import row_blocks

# The largest gradient of a logit is about the largest weight of a row, that of a reverse KL up to a hundred times that.
_LARGEST_EXPONENT = 8


def scale_of(weights):
    """() a power of two, without synchronisation, for losses of rows that have these weights, in float32."""
    if weights.numel() == 0:
        return weights.new_ones(())
    exponent = (_LARGEST_EXPONENT - torch.frexp(weights.abs().amax()).exponent).clamp(-100, 100)
    # By an integer, torch 2.10 returns the default dtype.
    return torch.ldexp(weights.new_ones(()), exponent.to(weights.dtype))


class ScaledLMHeadGradients(LMHeadGradients):
    """As :class:`LMHeadGradients`, from gradients of logits that come ``scale`` times as large."""

    def __init__(self, x, weight, bias, wanted, chunks, exact, scale):
        super().__init__(x, weight, bias, wanted, chunks, exact)
        self._factor = scale.reciprocal()

    def add(self, x, dlogits, grad_x, ignored):
        need_input, need_weight, need_bias = self.wanted
        x = self._valid_rows(x, ignored, grad_x)
        first, self.chunks_added = self.chunks_added == 0, self.chunks_added + 1
        if need_weight and self.separate_sum:
            product(dlogits.t(), x, self.sum, add=not first)
        elif need_weight:
            for classes in row_blocks(self.weight):
                part = self._product(dlogits[:, classes].t(), x)
                self.weight[classes] = part if first else part + self.weight[classes]
        if need_input:
            grad_x.copy_(self._product(dlogits, self.head_weight))
        if need_bias:
            self.bias += dlogits.sum(0, dtype=self.bias.dtype)

    def _product(self, a, b):
        out = a.new_empty((a.shape[0], b.shape[1]), dtype=self._factor.dtype)
        product(a, b, out)
        return out.mul_(self._factor)

    def finish(self):
        if self.separate_sum:
            self.sum *= self._factor
        self.bias *= self._factor
        return super().finish()
