# SPDX-License-Identifier: BSD-3-Clause
"""The base class of the distillation losses, its options and its metrics."""

from collections.abc import Sequence
from typing import NamedTuple, TypedDict

import torch
from torch import Tensor, nn

from .._core.op.arguments import HEAD, NOT_NEGATIVE, arguments
from .._core.op.autocast import autocast_operands
from .._core.op.loss_rows import refuse_gradients
from .._core.op.named_results import serialisable
from .._core.op.tensors import (
    LayerNames,
    check_accum_dtype,
    check_device,
    check_floating,
    check_given_classes,
    check_ignore_index,
    check_layer,
    check_shape,
    wrong_dtype,
    wrong_shape,
)
from .._core.runtime.memory_budget import check_budget_variable
from ..ops.fused_linear_ce.op import fused_linear_ce
from ..ops.fused_linear_divergence.op import fused_linear_distillation
from ..ops.fused_linear_divergence.rows import Terms
from ._batch import as_scalar
from .base import NAMES_OF_HEAD
from .results import TOKEN_METRICS, TokenMetric, TokenMetrics


@serialisable
class DistillationMetrics(NamedTuple):
    """Metrics of distillation, without gradients, in float32 (float64 for float64 inputs).

    Attributes:
        soft_loss: scalar, the distance without its factor ``weight_soft_loss``; None if that is 0.
        hard_loss: scalar, the cross entropy without its factor ``weight_hard_loss``; None if that is 0.
        logprobs, entropy, argmax: the :class:`TokenMetrics` of the student at temperature 1 that the option
            ``metrics`` asks for, else None.

    Example::

        >>> loss_function = liger.losses.FusedLinearKLDivLoss()
        >>> loss, metrics = loss_function(input, weight, target, teacher_logits=teacher_logits)
        >>> isinstance(metrics, liger.losses.DistillationMetrics), metrics.soft_loss.shape
        (True, torch.Size([]))
    """

    soft_loss: Tensor | None
    hard_loss: Tensor | None
    logprobs: Tensor | None = None
    entropy: Tensor | None = None
    argmax: Tensor | None = None


class DistillationOptions(TypedDict, total=False):
    """Types of the options of every :class:`DistillationLoss`; the defaults are in its constructor."""

    weight_hard_loss: float
    weight_soft_loss: float
    ignore_index: int
    metrics: Sequence[TokenMetric]
    accum_dtype: torch.dtype | None
    memory_budget: int | None
    temperature: float


class _Rows(NamedTuple):
    """The tokens of a batch: hidden states (N, H), and targets (N,), ``ignore_index`` at ignored tokens, or
    None.

    token_shape: the shape of the tokens as given.
    """

    op: str
    input: Tensor
    target: Tensor | None
    token_shape: torch.Size


class DistillationLoss(nn.Module):
    """``weight_soft_loss`` times a distance between the outputs of two lm_heads, plus ``weight_hard_loss``
    times cross entropy; both are means over valid tokens.

    One GEMM computes the student's logits of a chunk of tokens for both terms. The logits of all tokens are
    never materialised, neither the student's nor the teacher's. Gradients are computed in the forward.

    Args:
        weight_hard_loss, weight_soft_loss: factors of cross entropy and of the distance; a term with factor 0
            is not computed.
        ignore_index: the target of ignored tokens.
        metrics: names among ``"logprobs"``, ``"entropy"`` and ``"argmax"``: the metrics of the student's
            tokens that ``forward`` returns. They cost one more GEMM of the student's head, whose logits a
            backend may round.
        accum_dtype: dtype in which the gradient of the weight is summed over chunks; None means float32.
            Change it only if a float32 buffer of the size of the weight does not fit.
        memory_budget: bytes for the logits of a chunk, of both models; None means ``LIGER_MEMORY_BUDGET``, by
            default 512 MiB. Lower it if the loss runs out of memory.
        temperature: divisor of the logits in the distance; cross entropy is computed at temperature 1. The
            distance is not multiplied by the square of the temperature.

    Raises:
        TypeError: an option has a wrong type.
        ValueError: an option is out of range, an unknown metric, or both factors are 0.

    Example::

        >>> issubclass(liger.losses.FusedLinearJSDLoss, liger.losses.DistillationLoss)
        True
        >>> loss_function = liger.losses.FusedLinearJSDLoss(weight_soft_loss=0.8, temperature=2.0)
        >>> loss, metrics = loss_function(
        ...     input, weight, target, teacher_input=teacher_input, teacher_weight=teacher_weight
        ... )
    """

    @arguments(weight_hard_loss=NOT_NEGATIVE, weight_soft_loss=NOT_NEGATIVE, metrics=TOKEN_METRICS, **HEAD)
    def __init__(
        self,
        *,
        weight_hard_loss: float = 0.5,
        weight_soft_loss: float = 0.5,
        ignore_index: int = -100,
        metrics: Sequence[TokenMetric] = (),
        accum_dtype: torch.dtype | None = None,
        memory_budget: int | None = None,
        temperature: float = 1.0,
    ) -> None:
        super().__init__()
        if not weight_hard_loss + weight_soft_loss > 0.0:
            raise ValueError(
                f"{type(self).__name__}: weight_hard_loss and weight_soft_loss are 0, expected factors that are "
                "not both 0"
            )
        self.weight_hard_loss, self.weight_soft_loss = float(weight_hard_loss), float(weight_soft_loss)
        self.ignore_index, self.metrics = ignore_index, tuple(metrics)
        self.accum_dtype, self.memory_budget = accum_dtype, memory_budget
        self.temperature = float(temperature)

    def distance(self) -> tuple[str, float, float]:
        """(divergence, beta, factor): the first two as ``liger::fused_linear_divergence_forward`` takes
        them."""
        raise NotImplementedError(f"{type(self).__name__} defines no distance")

    def _rows(self, input, target, mask):
        op, token_shape = type(self).__name__, input.shape[:-1]
        if input.dim() < 2:
            expected = "(..., hidden) with at least one dimension of tokens"
            raise wrong_shape(op, "input", input, expected)
        for name, tensor in (("target", target), ("mask", mask)):
            if tensor is not None:
                check_shape(op, name, tensor, token_shape, "the shape of input without its last dimension")
                check_device(op, name, tensor, "input", input)
                if tensor.is_complex():
                    raise wrong_dtype(op, name, tensor, "a real one")
        if target is not None:
            check_ignore_index(op, "target", target, self.ignore_index)
        if target is None:
            for wanted, what in (
                (self.weight_hard_loss, f"the cross entropy, as weight_hard_loss is {self.weight_hard_loss}"),
                ("logprobs" in self.metrics, "the metric 'logprobs'"),
            ):
                if wanted:
                    raise ValueError(f"{op}: no target, expected one for {what}")
            if mask is not None:
                # Any class except ignore_index.
                target = mask.new_full(mask.shape, int(self.ignore_index == 0), dtype=torch.int64)
        if mask is not None:
            target = torch.where(mask != 0, target, self.ignore_index)
        return _Rows(op, input.flatten(0, -2), None if target is None else target.flatten(), token_shape)

    def _flatten_teacher(self, rows, input, name, teacher):
        """(N, ...) from (..., ...): a tensor of the teacher with the token dimensions of the student."""
        if teacher.dim() == 0 or teacher.shape[:-1] != rows.token_shape:
            expected = f"the shape of input, {tuple(input.shape)}, except for the last dimension"
            raise wrong_shape(rows.op, name, teacher, expected)
        check_device(rows.op, name, teacher, "input", input)
        refuse_gradients(rows.op, **{name: teacher})
        return teacher.flatten(0, -2)

    def _token_metrics(self, rows, input, weight, bias):
        if not self.metrics:
            return TokenMetrics()
        target, any_class = rows.target, int(self.ignore_index == 0)
        if target is None:
            target = input.new_full(input.shape[:1], any_class, dtype=torch.int64)
        elif "logprobs" not in self.metrics:
            # Targets that only say which tokens count need not be classes.
            target = torch.where(target == self.ignore_index, target, any_class)
        # The metrics of this function are without gradient under every tracer, some of which drop detach and
        # no_grad.
        layer = [t if t is None else t.detach() for t in (input, weight, target, bias)]
        options = {"ignore_index": self.ignore_index, "memory_budget": self.memory_budget}
        metrics = ("logprobs", "entropy", "argmax")
        found = fused_linear_ce(*layer, reduction="sum", metrics=metrics, **options)
        tokens = {"logprobs": found.logprobs, "entropy": found.entropy, "argmax": found.argmax}
        return TokenMetrics(**{name: tokens[name].view(rows.token_shape) for name in self.metrics})

    def _distill_rows(self, rows, weight, teacher, teacher_weight, indices, bias, teacher_bias, denominator):
        # Logits or log-probabilities of a teacher are not an operand of a GEMM, so autocast does not cast
        # them.
        heads = None if teacher_weight is None else teacher, teacher_weight, teacher_bias
        input, weight, bias, *heads = autocast_operands(rows.input, weight, bias, *heads)
        teacher = teacher if heads[0] is None else heads[0]
        check_accum_dtype(rows.op, NAMES_OF_HEAD.input, input, self.accum_dtype)
        check_layer(rows.op, NAMES_OF_HEAD, input, weight, bias, rows.target)
        # The op checks classes too, but does not know the name of the loss.
        if rows.target is not None and (self.weight_hard_loss or "logprobs" in self.metrics):
            check_given_classes(rows.op, "target", rows.target, weight.shape[0], self.ignore_index)
        if indices is not None:
            # Padding of a row has no class, and an ignored row has none that counts.
            known = teacher > -torch.inf
            if rows.target is not None:
                known = known & (rows.target != self.ignore_index).unsqueeze(-1)
            present = torch.where(known, indices, 0)
            check_given_classes(rows.op, "teacher_indices", present, weight.shape[0])
        elif teacher_weight is None:
            check_floating(rows.op, "teacher_logits", teacher)
        else:
            check_layer(rows.op, TEACHER, teacher, *heads[1:])
        if denominator is not None:
            divisor = as_scalar("denominator", denominator, rows)
        elif rows.target is None:
            divisor = as_scalar("denominator", max(input.shape[0], 1), rows)
        else:
            divisor = (rows.target != self.ignore_index).sum().clamp_min(1)
        row_weight = divisor.to(torch.promote_types(input.dtype, torch.float32)).reciprocal()
        divergence, beta, factor = self.distance()
        check_budget_variable(self.memory_budget)
        tokens = self._token_metrics(rows, input, weight, bias)
        layer = input, weight, rows.target, bias
        soft, hard = self.weight_soft_loss * factor, self.weight_hard_loss
        terms = Terms(divergence, beta, self.temperature, soft, hard, self.ignore_index)
        limits = self.accum_dtype, self.memory_budget
        teacher = teacher, heads[1], indices, heads[2]
        loss, *terms = fused_linear_distillation(rows.op, layer, teacher, row_weight, terms, False, *limits)
        factors = self.weight_soft_loss, self.weight_hard_loss
        soft, hard = (
            term.sum() / factor if factor else None for term, factor in zip(terms, factors, strict=True)
        )
        return loss, DistillationMetrics(soft, hard, *tokens)


TEACHER = LayerNames("teacher_input", "teacher_weight", bias="teacher_bias")
