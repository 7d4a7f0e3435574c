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


def fake_logprobs(arguments):
    """Fake (logprobs, entropy, argmax, log_sum_sq_probs, mean_logits) of the ops of log-probabilities."""
    input, wanted = arguments.input, LogProbMetrics.of_op(arguments)
    rows, wide = input.shape[0], accumulate_dtype(input.dtype)

    def of_rows(flag, dtype=wide):
        return input.new_empty((rows,) if flag else (0,), dtype=dtype)

    others = of_rows(wanted.log_sum_sq_probs), of_rows(wanted.mean_logits)
    return of_rows(True), of_rows(wanted.entropy), of_rows(wanted.argmax, torch.int64), *others


def fake_gradients(arguments):
    """Fake gradients of input, weight and bias of an op with an lm_head, from its arguments by name."""
    input, weight, bias = arguments.input, arguments.weight, arguments.bias
    needed = zip((input, weight, bias), (input, weight, weight), arguments.needs_grad, strict=True)
    return tuple(
        like.new_empty(0) if t is None else t.new_empty(t.shape if need else 0) for t, like, need in needed
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
