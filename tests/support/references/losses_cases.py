# SPDX-License-Identifier: BSD-3-Clause
"""Batches for the tests of the losses, and how a loss is compared with its reference."""

import torch
from cases import assert_as_exact_as_torch

HIDDEN, VOCAB, LENGTH = 8, 29, 6
# Everything in one chunk; some units to a chunk; not one sequence fits.
BUDGETS = {"whole": None, "chunks": 2 * LENGTH * VOCAB * 4, "recompute": 2 * VOCAB * 4}


def make(device, sequences=6, dtype=torch.float32):
    """(hidden, weight, target, bias): sequences of unequal length, one with a hole, one without a token."""
    hidden = torch.randn(sequences, LENGTH, HIDDEN, device=device).to(dtype)
    weight = (torch.randn(VOCAB, HIDDEN, device=device) / 3).to(dtype)
    target = torch.randint(VOCAB, (sequences, LENGTH), device=device)
    target[0, 4:] = target[1, 2] = target[2, 1:] = -100
    target[-1] = -100
    return hidden, weight, target, (torch.randn(VOCAB, device=device) / 3).to(dtype)


def leaf(tensor, dtype=None):
    return tensor.detach().to(dtype or tensor.dtype).clone().requires_grad_()


def packed(tensors, target):
    """Tensors (S, L, ...) one sequence after the other, without what lies behind its last token; two rows
    before them and three after them belong to no sequence. Returns (the tensors, (1, T, ...)), cumulative
    lengths."""
    lengths = [int((row != -100).nonzero().max()) + 1 if (row != -100).any() else 2 for row in target]
    ends = torch.tensor([2, *lengths], device=target.device).cumsum(0).int()
    parts = [torch.cat([t[0, :2], *(t[i, :n] for i, n in enumerate(lengths)), t[0, :3]]) for t in tensors]
    return [p.unsqueeze(0) for p in parts], ends


def check(mine, plain, hidden, weight, bias, intermediate=8.0):
    """``mine`` and ``plain`` give a loss of (hidden, weight, bias): loss and gradients against float64."""

    def run(function, dtype=None):
        leaves = [leaf(t, dtype) for t in (hidden, weight, bias)]
        loss = function(*leaves)
        # An upstream gradient other than 1, as in gradient accumulation.
        return [loss.detach(), *torch.autograd.grad(loss * 0.5, leaves)]

    results = run(mine), run(plain), run(plain, torch.float64)
    # Terms of about 1 may cancel in the loss; their errors do not.
    cancelled = 1 / results[2][0].abs().clamp(1e-3, 1).item()
    for name, a, b, c in zip(("loss", "hidden", "weight", "bias"), *results, strict=True):
        size = intermediate * (cancelled if name == "loss" else 1.0)
        assert_as_exact_as_torch(a, b, c, name, intermediate=size)
