# SPDX-License-Identifier: BSD-3-Clause
"""Distillation losses between a teacher and a student, plus cross entropy with labels from the same
logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, TypedDict, get_args

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from .._core.op.arguments import (
    DIVISOR,
    FLAG,
    FRACTION,
    HEAD,
    NOT_NEGATIVE,
    POSITIVE,
    TEXT,
    LayerNames,
    arguments,
    check_accum_dtype,
    check_device,
    check_floating,
    check_given_classes,
    check_ignore_index,
    check_indices,
    check_layer,
    check_shape,
    wrong_dtype,
    wrong_shape,
)
from .._core.op.autocast import autocast_operands
from .._core.op.loss_rows import refuse_gradients
from .._core.op.named_results import serialisable
from .._core.runtime.memory_budget import check_budget_variable
from ..ops.divergence.op import jsd_divergence
from ..ops.fused_linear_ce.op import fused_linear_ce
from ..ops.fused_linear_divergence.op import fused_linear_distillation
from ..ops.fused_linear_divergence.rows import Terms
from ._batch import as_scalar
from .base import NAMES_OF_HEAD, check_choice
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
            raise RuntimeError(
                f"{rows.op}: {name} has shape {tuple(teacher.shape)}, expected the shape of "
                f"input, {tuple(input.shape)}, except for the last dimension"
            )
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
        input, weight, bias, *heads = autocast_operands(
            rows.input,
            weight,
            bias,
            None if teacher_weight is None else teacher,
            teacher_weight,
            teacher_bias,
        )
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
            check_layer(rows.op, _TEACHER, teacher, *heads[1:])
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


_TEACHER = LayerNames("teacher_input", "teacher_weight", bias="teacher_bias")


class _TwoHeadLoss(DistillationLoss):
    @arguments(denominator=DIVISOR)
    def forward(
        self,
        input: Tensor,
        weight: Tensor,
        target: Tensor | None = None,
        bias: Tensor | None = None,
        *,
        mask: Tensor | None = None,
        teacher_input: Tensor | None = None,
        teacher_weight: Tensor | None = None,
        teacher_bias: Tensor | None = None,
        teacher_logits: Tensor | None = None,
        denominator: float | Tensor | None = None,
    ) -> tuple[Tensor, DistillationMetrics]:
        """The loss of a batch, and its metrics.

        Args:
            input: (..., H) hidden states of the student, (B, L, H) or packed, (T, H); float16, bfloat16,
                float32 or float64.
            weight: (V, H), the dtype of input, as bias.
            target: (...), int64 or int32: the class that each hidden state predicts; None if
                ``weight_hard_loss`` is 0.
            bias: (V,) or None.
            mask: (...), 0 at tokens to ignore.
            teacher_input: (..., Ht) hidden states of the teacher, of any hidden size and floating dtype.
            teacher_weight: (V, Ht), the dtype of teacher_input, as teacher_bias.
            teacher_bias: (V,) or None.
            teacher_logits: (..., V) in any floating dtype, the logits of the teacher or its log-probabilities
                (for the cosine the logits), instead of ``teacher_input`` and ``teacher_weight``.
            denominator: the divisor of both sums, a number or a tensor with one element; None means the
                number of valid tokens.

        Returns:
            (loss, :class:`DistillationMetrics`); the loss is a scalar in float32 (float64 for float64
            inputs), 0 if all tokens are ignored.

        Raises:
            TypeError: an argument has a wrong type.
            ValueError: no target for the cross entropy; no teacher, or one that is given twice or in part.
            RuntimeError: mismatched shapes, dtypes, devices or vocabularies; on the CPU, a target that is not
                a class; a tensor of the teacher that requires grad.
        """
        rows = self._rows(input, target, mask)
        parts = {
            "teacher_input": teacher_input,
            "teacher_weight": teacher_weight,
            "teacher_bias": teacher_bias,
        }
        given = [name for name, tensor in parts.items() if tensor is not None]
        if teacher_logits is not None:
            if given:
                raise ValueError(f"{rows.op}: {given[0]} and teacher_logits were given, expected one teacher")
            teacher = self._flatten_teacher(rows, input, "teacher_logits", teacher_logits)
            name, classes = "teacher_logits", teacher.shape[-1]
        elif teacher_input is not None and teacher_weight is not None:
            teacher = self._flatten_teacher(rows, input, "teacher_input", teacher_input)
            if teacher_weight.dim() != 2:
                raise wrong_shape(rows.op, "teacher_weight", teacher_weight, "(vocab, hidden)")
            name, classes = "teacher_weight", teacher_weight.shape[0]
        else:
            raise ValueError(
                f"{rows.op}: {' and '.join(given) or 'no teacher'} was given, expected teacher_input and "
                "teacher_weight, or teacher_logits"
            )
        if weight.dim() == 2 and classes != weight.shape[0]:
            raise RuntimeError(
                f"{rows.op}: {name} has {classes} classes, expected {weight.shape[0]}, as weight has: both models "
                "must have the same vocabulary (classes that only pad one can be cut off)"
            )
        return self._distill_rows(
            rows, weight, teacher, teacher_weight, None, bias, teacher_bias, denominator
        )


class FusedLinearJSDLoss(_TwoHeadLoss):
    """Generalised Jensen-Shannon divergence (:func:`liger.jsd`), plus cross entropy.

    Args:
        beta: weight of the teacher in the mixture; 0 is the forward KL, 1 the reverse KL.
        options: see :class:`DistillationLoss`.

    Raises:
        TypeError, ValueError: as :class:`DistillationLoss`; ValueError also for a beta outside [0, 1].

    Source: Agarwal et al., "GKD", arXiv 2306.13649.

    Example::

        >>> loss_function = liger.losses.FusedLinearJSDLoss(beta=0.5)
        >>> loss, metrics = loss_function(
        ...     input, weight, target, teacher_input=teacher_input, teacher_weight=teacher_weight
        ... )
    """

    @arguments(beta=FRACTION)
    def __init__(self, *, beta: float = 0.5, **options: Unpack[DistillationOptions]) -> None:
        super().__init__(**options)
        self.beta = float(beta)

    def distance(self) -> tuple[str, float, float]:
        return jsd_divergence(self.beta), self.beta, 1.0


class FusedLinearKLDivLoss(_TwoHeadLoss):
    """``KL(teacher || student)``, or the reverse (:func:`liger.kl_div`), plus cross entropy.

    Args:
        reverse: ``KL(student || teacher)``, which is mode-seeking.
        options: see :class:`DistillationLoss`.

    Raises:
        TypeError, ValueError: as :class:`DistillationLoss`.

    Source: Hinton, Vinyals and Dean, arXiv 1503.02531; the reverse as in Gu et al., "MiniLLM", arXiv
    2306.08543.

    Example::

        >>> loss_function = liger.losses.FusedLinearKLDivLoss(weight_hard_loss=0.0)
        >>> loss, metrics = loss_function(input, weight, mask=mask, teacher_logits=teacher_logits)
    """

    @arguments(reverse=FLAG)
    def __init__(self, *, reverse: bool = False, **options: Unpack[DistillationOptions]) -> None:
        super().__init__(**options)
        self.reverse = reverse

    def distance(self) -> tuple[str, float, float]:
        return "reverse_kl" if self.reverse else "forward_kl", 0.5, 1.0


class FusedLinearCosineSimilarityLoss(_TwoHeadLoss):
    """``beta * (1 - cos(s, t))`` for the logit vectors s and t of each token, plus cross entropy.

    Args:
        beta: factor of the distance.
        options: see :class:`DistillationLoss`. The temperature has no effect on the cosine.

    Raises:
        TypeError, ValueError: as :class:`DistillationLoss`; ValueError also for a beta that is not positive.

    Formula: ``cos(s, t) = s . t / (|s| |t|)``, over the classes. Its gradient has a factor of ``1 / |s|``: in
    float16, where gradients of logits are scaled, it overflows to infinity or NaN if ``|s|`` is below 2^-7.

    Example::

        >>> loss_function = liger.losses.FusedLinearCosineSimilarityLoss(beta=0.5)
        >>> loss, metrics = loss_function(
        ...     input, weight, target, teacher_input=teacher_input, teacher_weight=teacher_weight
        ... )
    """

    @arguments(beta=POSITIVE)
    def __init__(self, *, beta: float = 0.5, **options: Unpack[DistillationOptions]) -> None:
        super().__init__(**options)
        self.beta = float(beta)

    def distance(self) -> tuple[str, float, float]:
        return "cosine", 0.5, self.beta


Rest = Literal["tail", "renormalize"]
_DIVERGENCES: dict[Rest, str] = {"tail": "topk_tail", "renormalize": "topk"}


class FusedLinearTopKLoss(DistillationLoss):
    """``KL(teacher || student)`` from the teacher's top-k log-probabilities, plus cross entropy.

    An inference server (vLLM, for example) provides them, so the teacher's lm_head is not computed here.

    Args:
        rest: the treatment of the classes outside the top k. ``"tail"``: they form one class, for both
            models. ``"renormalize"``: the teacher's probabilities are divided by their sum, and all other
            classes have probability 0 under the teacher; the student's distribution is over all classes.
        options: see :class:`DistillationLoss`. The temperature divides the student's logits only: the
            teacher's log-probabilities must be those at the same temperature.

    Raises:
        TypeError, ValueError: as :class:`DistillationLoss`; ValueError also for an unknown ``rest``.

    Formula: with q the student and p the teacher, ``sum over the k classes of p * (log p - log q)``, plus
    ``p_rest * (log p_rest - log q_rest)`` for ``"tail"``; p_rest and q_rest are 1 minus the sums over the k
    classes.

    Example::

        >>> loss_function = liger.losses.FusedLinearTopKLoss(rest="tail")
        >>> loss, metrics = loss_function(
        ...     input, weight, target, teacher_logprobs=logprobs, teacher_indices=indices
        ... )
    """

    @arguments(rest=TEXT)
    def __init__(self, *, rest: Rest = "tail", **options: Unpack[DistillationOptions]) -> None:
        super().__init__(**options)
        self.rest = check_choice(self, "rest", rest, get_args(Rest))

    def distance(self) -> tuple[str, float, float]:
        return _DIVERGENCES[self.rest], 0.5, 1.0

    @arguments(denominator=DIVISOR)
    def forward(
        self,
        input: Tensor,
        weight: Tensor,
        target: Tensor | None = None,
        bias: Tensor | None = None,
        *,
        teacher_logprobs: Tensor,
        teacher_indices: Tensor,
        mask: Tensor | None = None,
        denominator: float | Tensor | None = None,
    ) -> tuple[Tensor, DistillationMetrics]:
        """The loss of a batch, and its metrics.

        Args:
            input, weight, target, bias, mask, denominator: as in :meth:`FusedLinearJSDLoss.forward`.
            teacher_logprobs: (..., k), any floating dtype, in nats. Rows with fewer classes are padded with
                -inf; a row of -inf only has distance 0.
            teacher_indices: (..., k), int64 or int32, the class of each; distinct within a row, except for
                padding.

        Returns:
            As :meth:`FusedLinearJSDLoss.forward`.

        Raises:
            TypeError, ValueError, RuntimeError: as :meth:`FusedLinearJSDLoss.forward`; RuntimeError also for
                an index that is not a class, on the CPU.
        """
        rows = self._rows(input, target, mask)
        logprobs, indices = (
            self._flatten_teacher(rows, input, name, tensor)
            for name, tensor in (("teacher_logprobs", teacher_logprobs), ("teacher_indices", teacher_indices))
        )
        check_floating(rows.op, "teacher_logprobs", teacher_logprobs)
        check_indices(rows.op, "teacher_indices", teacher_indices)
        if teacher_logprobs.shape[-1] == 0:
            raise wrong_shape(rows.op, "teacher_logprobs", teacher_logprobs, "(..., k) of at least one class")
        check_shape(
            rows.op,
            "teacher_indices",
            teacher_indices,
            teacher_logprobs.shape,
            "the shape of teacher_logprobs",
        )
        return self._distill_rows(rows, weight, logprobs, None, indices, bias, None, denominator)
