"""Cross entropy over given logits, over a projection that never keeps its logits, and inside the head itself."""

import torch
from torch import nn

from .._core.arguments import (
    ANYTHING,
    BYTES,
    CE_OPTIONS,
    COUNT,
    DIVISOR,
    DTYPE,
    FLAG,
    NAMES,
    TENSOR,
    arguments,
    check,
)
from .._core.cross_entropy_results import CrossEntropyOutput
from ..ops.cross_entropy import cross_entropy
from ..ops.fused_linear_ce import fused_linear_ce

METRICS = CrossEntropyOutput._fields[1:]


def _check_class_weight(op, name, weight):
    check(op, name, weight, TENSOR, optional=True)
    if weight is not None and weight.dim() != 1:
        raise ValueError(f"{op}: {name} has shape {tuple(weight.shape)}, expected (classes,)")


class _CrossEntropyOptions(nn.Module):
    """The options that both losses share, under the names of :class:`torch.nn.CrossEntropyLoss` where it has them."""

    @arguments(error=ValueError, optional=("weight", "softcap"), metrics=NAMES, **CE_OPTIONS)
    def __init__(self, weight, ignore_index, reduction, label_smoothing, lse_square_scale, softcap, metrics):
        super().__init__()
        name = type(self).__name__
        _check_class_weight(name, "weight", weight)
        if reduction not in ("none", "mean", "sum"):
            raise ValueError(f"{name}: reduction is '{reduction}', expected 'mean', 'sum' or 'none'")
        unknown = [metric for metric in metrics if metric not in METRICS]
        if unknown:
            raise ValueError(f"{name}: metrics has '{unknown[0]}', expected some of {', '.join(METRICS)}")
        self.register_buffer("weight", weight)
        self.ignore_index, self.reduction = ignore_index, reduction
        self.label_smoothing, self.lse_square_scale, self.softcap = label_smoothing, lse_square_scale, softcap
        self.metrics = tuple(metrics)

    def _options(self):
        return {
            "ce_weight": self.weight,
            "ignore_index": self.ignore_index,
            "label_smoothing": self.label_smoothing,
            "lse_square_scale": self.lse_square_scale,
            "softcap": self.softcap,
            "reduction": self.reduction,
            **{f"return_{name}": True for name in self.metrics},
        }

    def extra_repr(self):
        return (
            f"reduction={self.reduction!r}, ignore_index={self.ignore_index}, label_smoothing={self.label_smoothing}, "
            f"lse_square_scale={self.lse_square_scale}, softcap={self.softcap}"
        )


class CrossEntropyLoss(_CrossEntropyOptions):
    """Cross entropy of logits; the constructor of :class:`torch.nn.CrossEntropyLoss`, and more.

    Args:
        weight: (V,) class weights, kept as a buffer.
        ignore_index: the target of rows that do not count.
        reduction: ``"mean"``, ``"sum"`` or ``"none"``.
        label_smoothing: between 0 and 1.
        lse_square_scale: factor of the z-loss.
        softcap: logits become ``softcap * tanh(logits / softcap)`` first.
        inplace: the gradient takes the memory of the logits, as in :func:`liger.cross_entropy`; for logits that are
            private to the loss.
        metrics: names among ``z_loss``, ``token_accuracy``, ``predicted_tokens``, ``logprobs`` and ``entropy``,
            computed in the same pass.

    Shape:
        logits: (..., V); target: (...) of class indices; token_weight: (...); denominator: one element, which replaces
        the divisor of the mean. docs/cross_entropy.md defines each.

    Returns:
        The loss in float32, or with metrics a ``CrossEntropyOutput``.

    Raises:
        ValueError: an unknown reduction or metric.
        RuntimeError: what :func:`liger.cross_entropy` refuses.
    """

    def __init__(
        self,
        weight=None,
        *,
        ignore_index=-100,
        reduction="mean",
        label_smoothing=0.0,
        lse_square_scale=0.0,
        softcap=None,
        inplace=False,
        metrics=(),
    ):
        super().__init__(weight, ignore_index, reduction, label_smoothing, lse_square_scale, softcap, metrics)
        check(type(self).__name__, "inplace", inplace, FLAG)
        self.inplace = inplace

    def forward(self, logits, target, *, token_weight=None, denominator=None):
        return cross_entropy(
            logits,
            target,
            token_weight=token_weight,
            denominator=denominator,
            inplace=self.inplace,
            **self._options(),
        )


class FusedLinearCrossEntropyLoss(_CrossEntropyOptions):
    """Cross entropy of ``input @ weight.T + bias`` that never keeps the logits of more than a chunk of rows.

    Args:
        weight, ignore_index, reduction, label_smoothing, lse_square_scale, softcap, metrics: as in
            :class:`CrossEntropyLoss`; this weight is that of the classes, not of the projection.
        accum_dtype: in which dtype the gradient of the projection weight is summed over chunks; None means float32.
        memory_budget: bytes for the logits of a chunk; None means ``LIGER_MEMORY_BUDGET``.

    Shape:
        input: (..., H); weight: (V, H); target: (...); bias: (V,); token_weight: (...); denominator: one element.

    Returns:
        The loss in float32, or with metrics a ``CrossEntropyOutput``.

    Raises:
        ValueError: an unknown reduction or metric.
        RuntimeError: what :func:`liger.fused_linear_ce` refuses.

    Source: docs/cross_entropy.md; the chunked form is that of Hsu et al., "Liger Kernel", arXiv 2410.10989.
    """

    def __init__(
        self,
        weight=None,
        *,
        ignore_index=-100,
        reduction="mean",
        label_smoothing=0.0,
        lse_square_scale=0.0,
        softcap=None,
        metrics=(),
        accum_dtype=None,
        memory_budget=None,
    ):
        super().__init__(weight, ignore_index, reduction, label_smoothing, lse_square_scale, softcap, metrics)
        check(type(self).__name__, "accum_dtype", accum_dtype, DTYPE, optional=True)
        check(type(self).__name__, "memory_budget", memory_budget, BYTES, optional=True, error=ValueError)
        self.accum_dtype, self.memory_budget = accum_dtype, memory_budget

    def _options(self):
        return {
            **super()._options(),
            "accum_dtype": self.accum_dtype,
            "memory_budget": self.memory_budget,
        }

    def forward(self, input, weight, target, bias=None, *, token_weight=None, denominator=None):
        return fused_linear_ce(
            input,
            weight,
            target,
            bias,
            token_weight=token_weight,
            denominator=denominator,
            **self._options(),
        )


class LMHeadLoss(nn.Linear):
    """A language model head that returns logits, or, given targets, the loss without ever keeping the logits.

    The loss is computed inside ``forward``, so hooks that gather a sharded weight (FSDP2, ZeRO-3) see the head as
    any other linear layer, and its weight can be tied to an embedding.

    Args:
        hidden_size, vocab_size: of the projection.
        bias: whether it has a bias.
        device, dtype: of the parameters.
        loss_options: those of :class:`FusedLinearCrossEntropyLoss`; class weights are called ``ce_weight`` here.

    Shape:
        hidden: (..., hidden_size); target: (...); token_weight: (...); denominator: one element.

    Returns:
        Without target the logits, (..., vocab_size), with the softcap applied; with target the loss, or with
        metrics a ``CrossEntropyOutput``.
    """

    @arguments(
        error=ValueError, hidden_size=COUNT, vocab_size=COUNT, bias=FLAG, device=ANYTHING, dtype=DTYPE
    )  # fmt: skip
    def __init__(
        self, hidden_size, vocab_size, bias=False, device=None, dtype=None, *, ce_weight=None, **loss_options
    ):
        super().__init__(hidden_size, vocab_size, bias, device=device, dtype=dtype)
        _check_class_weight(type(self).__name__, "ce_weight", ce_weight)
        self.loss = FusedLinearCrossEntropyLoss(ce_weight, **loss_options)

    @arguments(denominator=DIVISOR)
    def forward(self, hidden, target=None, *, token_weight=None, denominator=None):
        if target is not None:
            return self.loss(
                hidden, self.weight, target, self.bias, token_weight=token_weight, denominator=denominator
            )
        logits = super().forward(hidden)
        softcap = self.loss.softcap
        return logits if softcap is None else softcap * torch.tanh(logits / softcap)
