"""Results of the cross entropy ops: their fakes, and the output of the public functions."""

from typing import NamedTuple

import torch

from .dtensor import unflatten_tokens
from .dtypes import accumulate_dtype


class CrossEntropyOutput(NamedTuple):
    """The loss and the metrics that were asked for; the others are None."""

    loss: torch.Tensor
    z_loss: torch.Tensor | None
    token_accuracy: torch.Tensor | None
    predicted_tokens: torch.Tensor | None
    logprobs: torch.Tensor | None
    entropy: torch.Tensor | None


def fake_results(like, rows, reduction, metrics):
    """(loss, z_loss, token_accuracy, predicted_tokens, logprobs, entropy) of either op, without values."""
    wide = accumulate_dtype(like.dtype)

    def empty(shape, dtype=wide):
        return like.new_empty(shape, dtype=dtype)

    def per_row(wanted, dtype=wide):
        return empty((rows,) if wanted else (0,), dtype)

    reduced = (rows,) if reduction == "none" else ()
    return (
        empty(reduced),
        empty(reduced if metrics.z_loss else (0,)),
        empty(() if metrics.token_accuracy else (0,)),
        per_row(metrics.predicted_tokens, torch.int64),
        per_row(metrics.logprobs),
        per_row(metrics.entropy),
    )


def output_like(target, reduction, metrics, results):
    """The results of a forward op as the public functions return them: the loss alone, or all that was asked for.

    Per-row ones have the shape of the target.
    """
    loss, z_loss, accuracy, *per_row = results[:6]
    if reduction == "none":
        loss = unflatten_tokens(loss, target)
        z_loss = unflatten_tokens(z_loss, target) if metrics.z_loss else None
    if not any(metrics):
        return loss
    wanted = (metrics.predicted_tokens, metrics.logprobs, metrics.entropy)
    return CrossEntropyOutput(
        loss,
        z_loss if metrics.z_loss else None,
        accuracy if metrics.token_accuracy else None,
        *(unflatten_tokens(x, target) if want else None for x, want in zip(per_row, wanted, strict=True)),
    )
