# SPDX-License-Identifier: BSD-3-Clause
"""Cross entropy of logits, of a linear layer without materialised logits, and inside the lm_head itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypedDict

import torch
import torch.distributed as dist
from torch import nn
from typing_extensions import Unpack

from .._core.head.results import CrossEntropyOutput
from .._core.op.arguments import CE_OPTIONS, DIVISOR, FLAG, MODULE, SHARDS, TENSOR, arguments, check
from .._core.op.tensors import wrong_shape
from .._core.op.types import CrossEntropyMetric, Device, Reduction, Scalar
from ..ops.cross_entropy.op import cross_entropy
from ..ops.fused_linear_ce.op import fused_linear_ce


class LossOptions(TypedDict, total=False):
    """The options of :class:`FusedLinearCrossEntropyLoss` that :class:`LMHeadLoss` takes."""

    ignore_index: int
    reduction: Reduction
    label_smoothing: float
    lse_square_scale: float
    metrics: Sequence[CrossEntropyMetric]
    accum_dtype: torch.dtype | None
    memory_budget: int | None
    softcap: float | None
    accumulate_grad_weight: bool


def _check_class_weight(op, name, weight):
    check(op, name, weight, TENSOR, optional=True)
    if weight is not None and weight.dim() != 1:
        raise wrong_shape(op, name, weight, "(classes,)")


class _CrossEntropyOptions(nn.Module):
    """Options that both losses share, with the names of :class:`torch.nn.CrossEntropyLoss` where it has
    them."""

    weight: torch.Tensor | None
    # Of the attributes that are options of the function of the same name.
    _NAMES: tuple[str, ...] = (
        *("ignore_index", "label_smoothing", "lse_square_scale", "reduction", "metrics", "softcap"),
        *SHARDS,
    )

    def __init__(
        self,
        weight: torch.Tensor | None,
        ignore_index: int,
        reduction: Reduction,
        label_smoothing: float,
        lse_square_scale: float,
        metrics: Sequence[CrossEntropyMetric],
        group: dist.ProcessGroup | None,
        vocab_start: int | None,
        vocab_size: int | None,
        softcap: float | None,
    ) -> None:
        super().__init__()
        _check_class_weight(type(self).__name__, "weight", weight)
        self.register_buffer("weight", weight)
        self.ignore_index, self.reduction = ignore_index, reduction
        self.label_smoothing, self.lse_square_scale, self.softcap = label_smoothing, lse_square_scale, softcap
        self.metrics: tuple[Any, ...] = tuple(metrics)
        self.group, self.vocab_start, self.vocab_size = group, vocab_start, vocab_size

    def _options(self) -> dict[str, Any]:
        # None is the default. Without a group its keywords are absent: no wrapper looks at them then.
        given = {name: value for name in self._NAMES if (value := getattr(self, name)) is not None}
        return {"ce_weight": self.weight, **given}

    def extra_repr(self) -> str:
        return (
            f"reduction={self.reduction!r}, ignore_index={self.ignore_index}, label_smoothing={self.label_smoothing}, "
            f"lse_square_scale={self.lse_square_scale}, softcap={self.softcap}"
        )


class CrossEntropyLoss(_CrossEntropyOptions):
    """Cross entropy of logits, with the constructor of :class:`torch.nn.CrossEntropyLoss` and more options.

    Args:
        weight: (V,) class weights, any floating dtype, registered as a buffer.
        ignore_index: the target of ignored rows, which have no loss and no gradient.
        reduction: ``"mean"``, ``"sum"`` or ``"none"``, as in :func:`liger.cross_entropy`.
        label_smoothing: between 0 and 1.
        lse_square_scale: factor of the z-loss.
        metrics: names among ``z_loss``, ``token_accuracy``, ``argmax``, ``logprobs`` and ``entropy``,
            computed in the same pass.
        group, vocab_start, vocab_size: for logits that are sharded along the classes, as in
            :func:`liger.cross_entropy`.
        softcap: logits become ``softcap * tanh(logits / softcap)`` first.
        inplace: the gradient overwrites the logits, as in :func:`liger.cross_entropy`; for logits that only
            the loss uses.

    Shape:
        logits: (..., V); target: (...), class indices; token_weight: (...); denominator: one element, which
        replaces the divisor of the mean. Dtypes as in :func:`liger.cross_entropy`;
        docs/guides/cross_entropy.md defines each.

    Returns:
        The loss in float32 (float64 for float64 logits), () or the shape of target; with metrics a
        ``CrossEntropyOutput``.

    Raises:
        TypeError: an option of another type.
        ValueError: an unknown reduction or metric, an option out of range.
        RuntimeError: a weight of another shape than (V,); in the forward, as :func:`liger.cross_entropy`.

    Example::

        >>> criterion = liger.nn.CrossEntropyLoss(label_smoothing=0.1)
        >>> loss = criterion(torch.randn(10, 1000), torch.randint(1000, (10,)))

    Source: as :func:`liger.cross_entropy`.
    """

    _NAMES = (*_CrossEntropyOptions._NAMES, "inplace")

    @arguments(inplace=FLAG, **CE_OPTIONS)
    def __init__(
        self,
        weight: torch.Tensor | None = None,
        *,
        ignore_index: int = -100,
        reduction: Reduction = "mean",
        label_smoothing: float = 0.0,
        lse_square_scale: float = 0.0,
        metrics: Sequence[CrossEntropyMetric] = (),
        group: dist.ProcessGroup | None = None,
        vocab_start: int | None = None,
        vocab_size: int | None = None,
        softcap: float | None = None,
        inplace: bool = False,
    ) -> None:
        shards = group, vocab_start, vocab_size
        super().__init__(
            weight, ignore_index, reduction, label_smoothing, lse_square_scale, metrics, *shards, softcap
        )
        self.inplace = inplace

    def forward(
        self,
        logits: torch.Tensor,
        target: torch.Tensor,
        *,
        token_weight: torch.Tensor | None = None,
        denominator: Scalar | None = None,
    ) -> torch.Tensor | CrossEntropyOutput:
        return cross_entropy(
            logits, target, token_weight=token_weight, denominator=denominator, **self._options()
        )


class FusedLinearCrossEntropyLoss(_CrossEntropyOptions):
    """Cross entropy of ``input @ weight.T + bias``, in chunks of rows with logits that fit a memory budget.

    Args:
        weight, ignore_index, reduction, label_smoothing, lse_square_scale, metrics, softcap: as in
            :class:`CrossEntropyLoss`. ``weight`` are class weights, not the weight of the lm_head.
        group, vocab_start, vocab_size: for an lm_head that is sharded along the classes, as in
            :func:`liger.fused_linear_ce`.
        accum_dtype: the dtype in which the gradient of the lm_head weight is summed over chunks; None:
            float32. Change it only if a float32 buffer of the size of the weight does not fit.
        memory_budget: bytes for the logits of a chunk; None: ``LIGER_MEMORY_BUDGET``, or 512 MiB if that is
            unset. Lower it if the loss runs out of memory. Raise it if there are many small chunks
            (``liger plan`` prints them).
        accumulate_grad_weight: the backward adds the gradient of the lm_head weight to its float32
            ``main_grad``, or to its ``grad``, without a temporary of its size, as in
            :func:`liger.fused_linear_ce`.

    Shape:
        input: (..., H); weight: (V, H); target: (...); bias: (V,); token_weight: (...); denominator: one
        element. Dtypes as in :func:`liger.fused_linear_ce`.

    Returns:
        The loss in float32 (float64 for float64 inputs), () or the shape of target; with metrics a
        ``CrossEntropyOutput``.

    Raises:
        TypeError: an option of another type.
        ValueError: an unknown reduction or metric, an option out of range.
        RuntimeError: a weight of another shape than (V,); in the forward, as :func:`liger.fused_linear_ce`.

    Example::

        >>> criterion = liger.nn.FusedLinearCrossEntropyLoss(softcap=30.0)
        >>> loss = criterion(torch.randn(10, 64), torch.randn(1000, 64), torch.randint(1000, (10,)))

    Source: docs/guides/cross_entropy.md; the chunks are from Hsu et al., "Liger Kernel", arXiv 2410.10989.
    """

    _NAMES = (*_CrossEntropyOptions._NAMES, "accum_dtype", "memory_budget", "accumulate_grad_weight")

    @arguments(accumulate_grad_weight=FLAG, **CE_OPTIONS)
    def __init__(
        self,
        weight: torch.Tensor | None = None,
        *,
        ignore_index: int = -100,
        reduction: Reduction = "mean",
        label_smoothing: float = 0.0,
        lse_square_scale: float = 0.0,
        metrics: Sequence[CrossEntropyMetric] = (),
        group: dist.ProcessGroup | None = None,
        vocab_start: int | None = None,
        vocab_size: int | None = None,
        accum_dtype: torch.dtype | None = None,
        memory_budget: int | None = None,
        softcap: float | None = None,
        accumulate_grad_weight: bool = False,
    ) -> None:
        shards = group, vocab_start, vocab_size
        super().__init__(
            weight, ignore_index, reduction, label_smoothing, lse_square_scale, metrics, *shards, softcap
        )
        self.accum_dtype, self.memory_budget = accum_dtype, memory_budget
        self.accumulate_grad_weight = accumulate_grad_weight

    def forward(
        self,
        input: torch.Tensor,
        weight: torch.Tensor,
        target: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        token_weight: torch.Tensor | None = None,
        denominator: Scalar | None = None,
    ) -> torch.Tensor | CrossEntropyOutput:
        return fused_linear_ce(
            input, weight, target, bias, token_weight=token_weight, denominator=denominator, **self._options()
        )


class LMHeadLoss(nn.Linear):
    """An lm_head that returns logits or, given targets, the loss without materialising all logits.

    ``forward`` computes the loss, so hooks that gather a sharded weight (FSDP2, ZeRO-3) treat the head as any
    other linear layer, and its weight can be tied to an embedding.

    Args:
        hidden_size, vocab_size: input and output features of the linear layer.
        bias: whether it has a bias.
        device, dtype: of the parameters.
        ce_weight: (V,) class weights of the loss.
        loss_options: other options of :class:`FusedLinearCrossEntropyLoss`, but no group: a weight that is a
            DTensor says itself over which processes its classes are sharded.

    Shape:
        input: (..., hidden_size), the dtype of the parameters; target: (...); token_weight: (...);
        denominator: one element.

    Returns:
        Without target the logits, (..., vocab_size), with the softcap applied; with target the loss, or with
        metrics a ``CrossEntropyOutput``.

    Raises:
        TypeError: an option of another type.
        ValueError: a size that is not positive, an option out of range.
        RuntimeError: in the forward, as :func:`liger.fused_linear_ce`.

    Example::

        >>> head = liger.nn.LMHeadLoss(64, 1000, label_smoothing=0.1)
        >>> loss = head(torch.randn(10, 64), torch.randint(1000, (10,)))

    Source: as :class:`FusedLinearCrossEntropyLoss`.
    """

    @arguments(**MODULE)
    def __init__(
        self,
        hidden_size: int,
        vocab_size: int,
        bias: bool = False,
        device: Device = None,
        dtype: torch.dtype | None = None,
        *,
        ce_weight: torch.Tensor | None = None,
        **loss_options: Unpack[LossOptions],
    ) -> None:
        super().__init__(hidden_size, vocab_size, bias, device=device, dtype=dtype)
        _check_class_weight(type(self).__name__, "ce_weight", ce_weight)
        self.loss = FusedLinearCrossEntropyLoss(ce_weight, **loss_options)

    @arguments(denominator=DIVISOR)
    def forward(  # type: ignore[override]  # nn.Linear.forward has one argument, and returns logits only
        self,
        input: torch.Tensor,
        target: torch.Tensor | None = None,
        *,
        token_weight: torch.Tensor | None = None,
        denominator: Scalar | None = None,
    ) -> torch.Tensor | CrossEntropyOutput:
        if target is not None:
            return self.loss(
                input, self.weight, target, self.bias, token_weight=token_weight, denominator=denominator
            )
        logits = super().forward(input)
        softcap = self.loss.softcap
        return logits if softcap is None else softcap * torch.tanh(logits / softcap)
