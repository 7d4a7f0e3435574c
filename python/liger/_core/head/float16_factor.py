# SPDX-License-Identifier: BSD-3-Clause
"""The factor by which gradients of float16 are larger between forward and backward.

The gradients of a mean over thousands of rows are subnormal numbers of a few bits in float16, and the
backward multiplies by a loss scale too late. Therefore a forward that computes gradients computes the
gradients of a larger loss.
"""

import torch

_MAX_FACTOR = 64.0


def float16_factor(divisor, rows):
    """The factor for a loss that is a sum over ``rows`` rows divided by ``divisor``, a float32 0-d tensor.

    A power of 2, so that the loss keeps its bits. With a divisor of 1 or more, the divisor over the factor is
    no smaller than 1, so that no gradient overflows that is far from it now. The rows may be a micro-batch: a
    divisor beyond their number makes gradients smaller than a mean over them does.
    """
    most = _MAX_FACTOR * (divisor / max(rows, 1)).clamp(min=1.0)
    factor = torch.where((divisor > 1) & divisor.isfinite(), torch.minimum(divisor, most), 1.0)
    return torch.exp2(torch.log2(factor).floor())
