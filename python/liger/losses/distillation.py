"""Distillation losses between a teacher and a student, plus cross entropy with labels from the same logits."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn

from .._core.arguments import (
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
    check_like,
    check_shape,
    wrong_dtype,
    wrong_shape,
)
from .._core.autocast import autocast_operands
from .._core.loss_rows import refuse_gradients
from .._core.memory_budget import check_budget_variable
from ..ops.divergence import jsd_divergence
from ..ops.fused_linear_divergence import fused_linear_distillation
from ._batch import as_scalar
from .base import check_choice


class _Rows(NamedTuple):
    """The tokens of a batch: hidden states (N, H), and targets (N,), ``ignore_index`` at ignored tokens, or None."""

    op: str
    hidden: Tensor
    target: Tensor | None


class DistillationLoss(nn.Module):
    """``weight_soft_loss`` times a distance between the outputs of two lm_heads, plus ``weight_hard_loss`` times cross
    entropy; both are means over valid tokens.

    One GEMM computes the student's logits of a chunk of tokens for both terms. The logits of all tokens are never
    materialised, neither the student's nor the teacher's. Gradients are computed in the forward.

    Args:
        weight_hard_loss, weight_soft_loss: factors of cross entropy and of the distance; a term with factor 0 is not
            computed.
        ignore_index: the label of ignored tokens.
        temperature: divisor of the logits in the distance; cross entropy is computed at temperature 1. The distance is
            not multiplied by the square of the temperature.
        return_soft_hard_loss: ``forward`` returns (loss, distance, cross entropy), the last two without their factors
            and without gradients.
        accum_dtype: dtype in which the gradient of the weight is summed over chunks; None means float32.
        memory_budget: bytes for the logits of a chunk, of both models; None means ``LIGER_MEMORY_BUDGET``, by default
            512 MiB.

    Raises:
        TypeError: an option has a wrong type.
        ValueError: an option is out of range, or both factors are 0.
    """

    @arguments(
        weight_hard_loss=NOT_NEGATIVE, weight_soft_loss=NOT_NEGATIVE, return_soft_hard_loss=FLAG,
        **HEAD,
    )  # fmt: skip
    def __init__(
        self, *, weight_hard_loss: float = 0.5, weight_soft_loss: float = 0.5, ignore_index: int = -100,
        temperature: float = 1.0, return_soft_hard_loss: bool = False, accum_dtype: torch.dtype | None = None,
        memory_budget: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        if not weight_hard_loss + weight_soft_loss > 0.0:
            raise ValueError(
                f"{type(self).__name__}: weight_hard_loss and weight_soft_loss are 0, expected factors that are "
                "not both 0"
            )
        self.weight_hard_loss, self.weight_soft_loss = float(weight_hard_loss), float(weight_soft_loss)
        self.ignore_index, self.temperature = ignore_index, float(temperature)
        self.return_soft_hard_loss = return_soft_hard_loss
        self.accum_dtype, self.memory_budget = accum_dtype, memory_budget

    def distance(self) -> tuple[str, float, float]:
        """(divergence, beta, factor): the first two as ``liger::fused_linear_divergence_forward`` takes them."""
        raise NotImplementedError(f"{type(self).__name__} defines no distance")

    def _rows(self, hidden, labels, mask):
        op = type(self).__name__
        if hidden.dim() < 2:
            expected = "(..., hidden) with at least one dimension of tokens"
            raise wrong_shape(op, "student_input", hidden, expected)
        for name, tensor in (("true_labels", labels), ("mask", mask)):
            if tensor is not None:
                check_shape(
                    op, name, tensor, hidden.shape[:-1], "that of student_input without its last dimension"
                )
                check_device(op, name, tensor, "student_input", hidden)
                if tensor.is_complex():
                    raise wrong_dtype(op, name, tensor, "a real one")
        if labels is not None:
            check_ignore_index(op, "true_labels", labels, self.ignore_index)
        if labels is None:
            if self.weight_hard_loss:
                raise ValueError(
                    f"{op}: no true_labels, expected them for the cross entropy, as weight_hard_loss is "
                    f"{self.weight_hard_loss}"
                )
            if mask is not None:
                # Any class except ignore_index.
                labels = mask.new_full(mask.shape, int(self.ignore_index == 0), dtype=torch.int64)
        if mask is not None:
            labels = torch.where(mask != 0, labels, self.ignore_index)
        return _Rows(op, hidden.flatten(0, -2), None if labels is None else labels.flatten())

    def _flatten_teacher(self, rows, hidden, name, teacher):
        """(N, ...) from (..., ...): a tensor of the teacher with the token dimensions of the student."""
        if teacher.dim() == 0 or teacher.shape[:-1] != hidden.shape[:-1]:
            raise RuntimeError(
                f"{rows.op}: {name} has shape {tuple(teacher.shape)}, expected that of student_input, "
                f"{tuple(hidden.shape)}, but for the last dimension"
            )
        check_device(rows.op, name, teacher, "student_input", hidden)
        refuse_gradients(rows.op, **{name: teacher})
        return teacher.flatten(0, -2)

    def _run(self, rows, weight, teacher, teacher_weight, indices, bias, teacher_bias, num_items_in_batch):
        # Logits or log-probabilities of a teacher are not an operand of a GEMM, so autocast does not cast them.
        hidden, weight, bias, *heads = autocast_operands(
            rows.hidden,
            weight,
            bias,
            None if teacher_weight is None else teacher,
            teacher_weight,
            teacher_bias,
        )
        teacher = teacher if heads[0] is None else heads[0]
        check_accum_dtype(rows.op, _STUDENT.input, hidden, self.accum_dtype)
        check_layer(rows.op, _STUDENT, hidden, weight, bias, rows.target)
        # The op checks classes too, but does not know the names of these arguments.
        if rows.target is not None and self.weight_hard_loss:
            check_given_classes(rows.op, _STUDENT.target, rows.target, weight.shape[0], self.ignore_index)
        if indices is not None:
            # Padding of a row has no class, and an ignored row has none that counts.
            known = teacher > -torch.inf
            if rows.target is not None:
                known = known & (rows.target != self.ignore_index).unsqueeze(-1)
            present = torch.where(known, indices, 0)
            check_given_classes(rows.op, "teacher_indices", present, weight.shape[0])
        elif teacher_weight is None:
            check_floating(rows.op, _TEACHER.input, teacher)
        else:
            check_layer(rows.op, _TEACHER, teacher, *heads[1:])
            check_like(rows.op, _TEACHER.input, teacher, _STUDENT.input, hidden)
        if num_items_in_batch is not None:
            divisor = as_scalar("num_items_in_batch", num_items_in_batch, rows)
        elif rows.target is None:
            divisor = as_scalar("num_items_in_batch", max(hidden.shape[0], 1), rows)
        else:
            divisor = (rows.target != self.ignore_index).sum().clamp_min(1)
        row_weight = divisor.to(torch.promote_types(hidden.dtype, torch.float32)).reciprocal()
        divergence, beta, factor = self.distance()
        check_budget_variable(self.memory_budget)
        loss, *terms = fused_linear_distillation(
            rows.op, hidden, weight, teacher, heads[1], indices, rows.target, bias, heads[2], row_weight, divergence,
            beta, self.temperature, self.weight_soft_loss * factor, self.weight_hard_loss, self.ignore_index, False,
            self.accum_dtype, self.memory_budget,
        )  # fmt: skip
        if not self.return_soft_hard_loss:
            return loss
        return loss, *(
            term.sum() / (weight or 1.0)
            for term, weight in zip(terms, (self.weight_soft_loss, self.weight_hard_loss), strict=True)
        )


_STUDENT = LayerNames("student_input", "student_weight", "true_labels", "student_bias")
_TEACHER = LayerNames("teacher_input", "teacher_weight", bias="teacher_bias")


class _TwoHeadLoss(DistillationLoss):
    @arguments(num_items_in_batch=DIVISOR)
    def forward(
        self, student_input: Tensor, student_weight: Tensor, teacher_input: Tensor,
        teacher_weight: Tensor | None = None, true_labels: Tensor | None = None, student_bias: Tensor | None = None,
        teacher_bias: Tensor | None = None, *, mask: Tensor | None = None,
        num_items_in_batch: float | Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """The loss of a batch.

        Args:
            student_input: (..., H) hidden states, (B, L, H) or packed, (T, H); float16, bfloat16, float32 or float64.
            student_weight: (V, H), the dtype of student_input, as student_bias, teacher_bias and teacher_weight.
            teacher_input: (..., Ht) hidden states of the teacher in that dtype, of any hidden size; or, without
                ``teacher_weight``, its logits (..., V) in any floating dtype.
            teacher_weight: (V, Ht) or None.
            true_labels: (...), int64 or int32: the class that each hidden state predicts; None if ``weight_hard_loss``
                is 0.
            student_bias, teacher_bias: (V,) or None.
            mask: (...), 0 at tokens to ignore.
            num_items_in_batch: the divisor of both sums, a number or a tensor with one element; None means the number
                of valid tokens.

        Returns:
            The loss, a scalar in float32 (float64 for float64 inputs); with ``return_soft_hard_loss`` (loss, distance,
            cross entropy). 0 if all tokens are ignored.

        Raises:
            TypeError: an argument has a wrong type.
            ValueError: no labels for the cross entropy.
            RuntimeError: mismatched shapes, dtypes, devices or vocabularies; on the CPU, a label that is not a class; a
                tensor of the teacher that requires grad.
        """
        rows = self._rows(student_input, true_labels, mask)
        teacher = self._flatten_teacher(rows, student_input, "teacher_input", teacher_input)
        if teacher_weight is not None and teacher_weight.dim() != 2:
            raise wrong_shape(rows.op, "teacher_weight", teacher_weight, "(vocab, hidden)")
        classes = teacher_input.shape[-1] if teacher_weight is None else teacher_weight.shape[0]
        if student_weight.dim() == 2 and classes != student_weight.shape[0]:
            what = "teacher_input, without teacher_weight," if teacher_weight is None else "teacher_weight"
            raise RuntimeError(
                f"{rows.op}: {what} has {classes} classes, expected {student_weight.shape[0]}, those of "
                "student_weight: both models must have the same vocabulary (classes that only pad one can be cut off)"
            )
        return self._run(
            rows,
            student_weight,
            teacher,
            teacher_weight,
            None,
            student_bias,
            teacher_bias,
            num_items_in_batch,
        )


class FusedLinearJSDLoss(_TwoHeadLoss):
    """Generalised Jensen-Shannon divergence (:func:`liger.jsd`), plus cross entropy.

    Args:
        beta: weight of the teacher in the mixture; 0 is the forward KL, 1 the reverse KL.
        options: those of :class:`DistillationLoss`.

    Raises:
        TypeError, ValueError: as :class:`DistillationLoss`; ValueError also for a beta outside [0, 1].

    Source: Agarwal et al., "GKD", arXiv 2306.13649.
    """

    @arguments(beta=FRACTION)
    def __init__(self, *, beta: float = 0.5, **options: Any) -> None:
        super().__init__(**options)
        self.beta = float(beta)

    def distance(self) -> tuple[str, float, float]:
        return jsd_divergence(self.beta), self.beta, 1.0


class FusedLinearKLDivLoss(_TwoHeadLoss):
    """``KL(teacher || student)``, or the reverse (:func:`liger.kl_div`), plus cross entropy.

    Args:
        reverse: ``KL(student || teacher)``, which is mode-seeking.
        options: those of :class:`DistillationLoss`.

    Raises:
        TypeError, ValueError: as :class:`DistillationLoss`.

    Source: Hinton, Vinyals and Dean, arXiv 1503.02531; the reverse as in Gu et al., "MiniLLM", arXiv 2306.08543.
    """

    @arguments(reverse=FLAG)
    def __init__(self, *, reverse: bool = False, **options: Any) -> None:
        super().__init__(**options)
        self.reverse = reverse

    def distance(self) -> tuple[str, float, float]:
        return "reverse_kl" if self.reverse else "forward_kl", 0.5, 1.0


class FusedLinearCosineSimilarityLoss(_TwoHeadLoss):
    """``beta * (1 - cos(s, t))`` for the logit vectors s and t of each token, plus cross entropy.

    Args:
        beta: factor of the distance.
        options: those of :class:`DistillationLoss`. The temperature has no effect on the cosine.

    Raises:
        TypeError, ValueError: as :class:`DistillationLoss`; ValueError also for a beta that is not positive.

    Formula: ``cos(s, t) = s . t / (|s| |t|)``, over the classes. Its gradient has a factor of ``1 / |s|``: in float16,
    whose gradients of logits are scaled, it overflows to infinity or NaN where ``|s|`` is below 2^-7.
    """

    @arguments(beta=POSITIVE)
    def __init__(self, *, beta: float = 0.5, **options: Any) -> None:
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
        rest: the treatment of the classes outside the top k. ``"tail"``: they form one class, for both models.
            ``"renormalize"``: the teacher's probabilities are divided by their sum, and all other classes have
            probability 0 under the teacher; the student's distribution is over all classes.
        options: those of :class:`DistillationLoss`. The temperature divides the student's logits only: the teacher's
            log-probabilities must be those at the same temperature.

    Raises:
        TypeError, ValueError: as :class:`DistillationLoss`; ValueError also for an unknown ``rest``.

    Formula: with q the student and p the teacher, ``sum over the k classes of p * (log p - log q)``, plus
    ``p_rest * (log p_rest - log q_rest)`` for ``"tail"``; p_rest and q_rest are 1 minus the sums over the k classes.
    """

    @arguments(rest=TEXT)
    def __init__(self, *, rest: Rest = "tail", **options: Any) -> None:
        super().__init__(**options)
        self.rest = check_choice(self, "rest", rest, get_args(Rest))

    def distance(self) -> tuple[str, float, float]:
        return _DIVERGENCES[self.rest], 0.5, 1.0

    @arguments(num_items_in_batch=DIVISOR)
    def forward(
        self, student_input: Tensor, student_weight: Tensor, teacher_logprobs: Tensor, teacher_indices: Tensor,
        true_labels: Tensor | None = None, student_bias: Tensor | None = None, *, mask: Tensor | None = None,
        num_items_in_batch: float | Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """The loss of a batch.

        Args:
            teacher_logprobs: (..., k), any floating dtype, in nats. Rows with fewer classes are padded with -inf; a row
                of -inf only has distance 0.
            teacher_indices: (..., k), int64 or int32, the class of each; distinct within a row, except for padding.
            student_input, student_weight, true_labels, student_bias, mask, num_items_in_batch: as in
                :meth:`FusedLinearJSDLoss.forward`.

        Returns:
            As :meth:`FusedLinearJSDLoss.forward`.

        Raises:
            TypeError, ValueError, RuntimeError: as :meth:`FusedLinearJSDLoss.forward`; RuntimeError also for an index
                that is not a class, on the CPU.
        """
        rows = self._rows(student_input, true_labels, mask)
        logprobs, indices = (
            self._flatten_teacher(rows, student_input, name, tensor)
            for name, tensor in (("teacher_logprobs", teacher_logprobs), ("teacher_indices", teacher_indices))
        )
        check_floating(rows.op, "teacher_logprobs", teacher_logprobs)
        check_indices(rows.op, "teacher_indices", teacher_indices)
        if teacher_logprobs.shape[-1] == 0:
            raise wrong_shape(rows.op, "teacher_logprobs", teacher_logprobs, "(..., k) of at least one class")
        check_shape(
            rows.op, "teacher_indices", teacher_indices, teacher_logprobs.shape, "that of teacher_logprobs"
        )
        return self._run(
            rows, student_weight, logprobs, None, indices, student_bias, None, num_items_in_batch
        )
