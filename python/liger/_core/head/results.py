# SPDX-License-Identifier: BSD-3-Clause
"""Results of the cross entropy ops: fakes, and the output of the public functions."""

from typing import NamedTuple

import torch

from ..math.dtypes import accumulate_dtype
from ..op.named_results import serialisable
from .cross_entropy import LogProbMetrics


@serialisable
class CrossEntropyOutput(NamedTuple):
    """The loss and the requested metrics; the others are None. docs/guides/cross_entropy.md defines each.

    Attributes:
        loss: () or, with ``reduction="none"``, the shape of the target; float32 (float64 for float64 inputs).
        z_loss: the part of the loss that ``lse_square_scale`` adds; shape and dtype of the loss.
        token_accuracy: (), the fraction of valid rows whose most probable class is the target.
        argmax: the shape of the target, int64: the most probable class; -1 in ignored rows.
        logprobs: the shape of the target, dtype of the loss: log-probability of the target; 0 in ignored
            rows.
        entropy: the shape of the target, dtype of the loss: entropy of each row in nats; 0 in ignored rows.

    Example::

        >>> output = liger.cross_entropy(logits, target, metrics=("token_accuracy",))
        >>> isinstance(output, liger.CrossEntropyOutput), output.token_accuracy.shape
        (True, torch.Size([]))
    """

    loss: torch.Tensor
    z_loss: torch.Tensor | None
    token_accuracy: torch.Tensor | None
    argmax: torch.Tensor | None
    logprobs: torch.Tensor | None
    entropy: torch.Tensor | None


def fake_results(like, rows, reduction, metrics):
    """Fake (loss, z_loss, token_accuracy, argmax, logprobs, entropy) of the cross entropy ops."""
    wide = accumulate_dtype(like.dtype)

    def empty(shape, dtype=wide):
        return like.new_empty(shape, dtype=dtype)

    def per_row(needed, dtype=wide):
        return empty((rows,) if needed else (0,), dtype)

    reduced = (rows,) if reduction == "none" else ()
    return (
        empty(reduced),
        empty(reduced if metrics.z_loss else (0,)),
        empty(() if metrics.token_accuracy else (0,)),
        per_row(metrics.argmax, torch.int64),
        per_row(metrics.logprobs),
        per_row(metrics.entropy),
    )


def new_rows(input, *requested):
    """For each flag one zero per row of the input, in the dtype of statistics; empty unless requested."""
    rows, wide = input.shape[0], accumulate_dtype(input.dtype)
    return tuple(input.new_zeros(rows if flag else 0, dtype=wide) for flag in requested)


class LogProbRows:
    """The results of the ops of log-probabilities, one chunk of rows after the other. Ignored rows, which may
    be skipped, have their values from the beginning.

    Attributes:
        all: (logprobs, entropy, argmax, log_sum_sq_probs, mean_logits); empty unless requested.
    """

    def __init__(self, input, requested):
        self._requested = requested
        logprobs, entropy, *metrics = new_rows(input, True, requested.entropy, *requested[2:])
        argmax = input.new_full((input.shape[0] if requested.argmax else 0,), -1, dtype=torch.int64)
        self.all = logprobs, entropy, argmax, *metrics

    def fill(self, at, head, logits, target):
        """Computes the results of the rows ``at`` from their logits; returns their statistics."""
        requested = self._requested
        found, metrics = head.statistics(logits, target, requested.entropy, requested.argmax), (None, None)
        if any(requested[2:]):
            metrics = head.metrics(logits, target, *requested[2:])
        self.write(at, found.logprobs, found.entropy, found.argmax, *metrics)
        return found

    def write(self, at, *values):
        for result, found in zip(self.all, values, strict=True):
            if result.numel():
                result[at] = found


def fake_logprobs(arguments):
    """Fake :attr:`LogProbRows.all` of an op, from its arguments by name."""
    return LogProbRows(arguments.input, LogProbMetrics.of_op(arguments)).all


# Arguments that may be None -> the argument whose dtype their empty gradient has then.
_STANDS_FOR = {"bias": "weight", "lora_a": "lora_b", "down": "lora_b"}


def fake_gradients(arguments):
    """Fake gradients of an op with an lm_head, from its arguments by name: one for each ``need_grad_*``."""
    names = [n.removeprefix("need_grad_") for n in arguments._fields if n.startswith("need_grad_")]
    tensors = [getattr(arguments, name) for name in names]
    needed = zip(names, tensors, arguments.needs_grad, strict=True)
    return tuple(
        getattr(arguments, _STANDS_FOR[name]).new_empty(0)
        if t is None
        else t.new_empty(t.shape if need else 0)
        for name, t, need in needed
    )


def output_like(tokens, reduction, metrics, results):
    """The results of a forward op as the public functions return them: the loss, or a
    :class:`CrossEntropyOutput`.

    Per-row results get the shape of ``tokens``, a :class:`.loss_rows.Tokens`.
    """
    loss, z_loss, accuracy, *per_row = results[:6]
    if reduction == "none":
        loss = tokens.restore(loss)
        z_loss = tokens.restore(z_loss) if metrics.z_loss else None
    if not any(metrics):
        return loss
    requested = (metrics.argmax, metrics.logprobs, metrics.entropy)
    return CrossEntropyOutput(
        loss,
        z_loss if metrics.z_loss else None,
        accuracy if metrics.token_accuracy else None,
        *(tokens.restore(x) if flag else None for x, flag in zip(per_row, requested, strict=True)),
    )
