# SPDX-License-Identifier: BSD-3-Clause
"""Inputs of the rows of an lm_head, their float32 reference, and the GEMMs that they need at least."""

import torch

from ..harness import Work, normal, targets

WEIGHT_STD = 0.02
# Rows of logits in float32 at a time.
REFERENCE_ROWS = 2048


def layer(options, tokens, hidden, vocabulary, ignored=""):
    """Hidden states, weight and targets. The standard deviation of logits is as in a trained model; in the
    self-test, which bounds every error, it is smaller."""
    logits_std = options.pick(2.5, 2.5, 0.5)
    return {
        "input": normal(options, tokens, hidden, std=logits_std / (WEIGHT_STD * hidden**0.5)),
        "weight": normal(options, vocabulary, hidden, std=WEIGHT_STD),
        "target": targets(options, tokens, vocabulary, ignored),
    }


def float32_reference(loss, leaves, of_rows=("target",)):
    """A function of the inputs: the loss, a mean over all rows, and gradients of ``leaves``. Computed in
    float32, in blocks of the rows of ``"input"`` and of the tensors ``of_rows``."""

    def run(inputs):
        whole = {n: t.detach().float() if t.is_floating_point() else t for n, t in inputs.items()}
        tensors = [whole[n].requires_grad_() for n in leaves]
        rows, total, grads = len(whole["input"]), 0.0, [torch.zeros_like(t) for t in tensors]
        for part in torch.arange(rows, device=whole["input"].device).split(REFERENCE_ROWS):
            value = loss(whole | {n: whole[n][part] for n in ("input", *of_rows)}) * (len(part) / rows)
            for grad, more in zip(grads, torch.autograd.grad(value, tensors), strict=True):
                grad += more
            total = total + value.detach()
        return {"loss": total, **{f"d{n}": grad for n, grad in zip(leaves, grads, strict=True)}}

    return run


def head_gemms(*heads, gradients=True):
    """The logits of each (hidden states, weight) and both gradients of the last, by cuBLAS into preallocated
    memory."""
    x, weight = heads[-1]
    logits = x.new_empty(x.shape[0], weight.shape[0])
    grad_x, grad_weight = (torch.empty_like(x), torch.empty_like(weight)) if gradients else (None, None)

    def run():
        for states, classes in heads:
            torch.mm(states, classes.T, out=logits)
        if gradients:
            torch.mm(logits, weight, out=grad_x)
            torch.mm(logits.T, x, out=grad_weight)
        return {}

    return Work(run)
