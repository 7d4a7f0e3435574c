# SPDX-License-Identifier: BSD-3-Clause
"""What the ops and losses over an lm_head draw in common."""

import torch
from engine import maybe
from hypothesis import strategies as st

HIDDEN = st.sampled_from([1, 3, 8])
VOCAB = st.sampled_from([2, 3, 5, 17, 33])


def differentiable(draw, *names):
    """Those that get a gradient, at least one."""
    return draw(st.lists(st.sampled_from(names), unique=True, min_size=1))


def budget(draw, vocab, dtype):
    """None, or bytes for some rows of logits."""
    return maybe(draw, 1, 2 * vocab * dtype.itemsize, 5 * vocab * dtype.itemsize)


def items(draw):
    """``denominator``: None, a number or a tensor."""
    return maybe(draw, 3, 2.5, torch.tensor(4), torch.tensor([7.0]))
