"""Distillation of a teacher into a student, with the cross entropy of the labels from the same logits."""

from typing import NamedTuple

import torch
from torch import nn

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
    check_device,
    check_floating,
    check_given_classes,
    check_indices,
    check_layer,
    check_like,
    check_shape,
    wrong_dtype,
    wrong_shape,
)
from .._core.autocast import autocast_operands
from .._core.memory_budget import check_budget_variable
from ..ops.divergence import jsd_divergence
from ..ops.fused_linear_divergence import fused_linear_distillation
from ._batch import as_scalar
from .base import choice


class _Rows(NamedTuple):
    """The tokens of a batch: hidden states (N, H), and targets (N,), ``ignore_index`` where none counts, or None."""

    op: str
    hidden: torch.Tensor
    target: torch.Tensor | None


class DistillationLoss(nn.Module):
    """``weight_soft_loss`` times the distance of two heads' outputs, plus ``weight_hard_loss`` times cross entropy.

    Means over the tokens that count. The student's logits are made once for both parts, and like the teacher's only a
    chunk of tokens at a time; gradients are made in the forward.

    Args:
        weight_hard_loss, weight_soft_loss: factors of the two; a part whose factor is 0 is not computed.
        ignore_index: the label of tokens that count for neither part.
        temperature: what logits are divided by in the distance; cross entropy is that of temperature 1. The distance is
            not multiplied by the square of the temperature.
        return_soft_hard_loss: ``forward`` returns (the loss, the distance, cross entropy), the last two without their
            factors and without gradients.
        accum_dtype: in which dtype the gradient of the weight is summed over chunks; None means float32.
        memory_budget: bytes of logits at a time, of both models; None for ``LIGER_MEMORY_BUDGET``, else 512 MiB.

    Raises:
        TypeError: an option of another type.
        ValueError: an option out of range, two factors of 0.
    """

    @arguments(
        error=ValueError, weight_hard_loss=NOT_NEGATIVE, weight_soft_loss=NOT_NEGATIVE, return_soft_hard_loss=FLAG,
        **HEAD,
    )  # fmt: skip
    def __init__(
        self, *, weight_hard_loss=0.5, weight_soft_loss=0.5, ignore_index=-100, temperature=1.0,
        return_soft_hard_loss=False, accum_dtype=None, memory_budget=None,
    ):  # fmt: skip
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

    def distance(self):
        """(name of the divergence, its beta, a factor) as ``liger::fused_linear_divergence_forward`` knows them."""
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
        if labels is None:
            if self.weight_hard_loss:
                raise ValueError(
                    f"{op}: no true_labels, expected them for the cross entropy, as weight_hard_loss is "
                    f"{self.weight_hard_loss}"
                )
            if mask is not None:
                # Any class but the one that says that a token does not count.
                labels = mask.new_full(mask.shape, int(self.ignore_index == 0), dtype=torch.int64)
        if mask is not None:
            labels = torch.where(mask != 0, labels, self.ignore_index)
        return _Rows(op, hidden.flatten(0, -2), None if labels is None else labels.flatten())

    def _of_tokens(self, rows, hidden, name, teacher):
        """(N, ...) of something of the teacher per token."""
        if teacher.dim() == 0 or teacher.shape[:-1] != hidden.shape[:-1]:
            raise RuntimeError(
                f"{rows.op}: {name} has shape {tuple(teacher.shape)}, expected that of student_input, "
                f"{tuple(hidden.shape)}, but for the last dimension"
            )
        check_device(rows.op, name, teacher, "student_input", hidden)
        return teacher.flatten(0, -2)

    def _run(self, rows, weight, teacher, teacher_weight, indices, bias, teacher_bias, num_items_in_batch):
        # What is there of a teacher, logits or log-probabilities, is no operand of a product.
        hidden, weight, bias, *heads = autocast_operands(
            rows.hidden,
            weight,
            bias,
            None if teacher_weight is None else teacher,
            teacher_weight,
            teacher_bias,
        )
        teacher = teacher if heads[0] is None else heads[0]
        check_layer(rows.op, _STUDENT, hidden, weight, bias, rows.target)
        if rows.target is not None and self.weight_hard_loss:
            check_given_classes(rows.op, _STUDENT.target, rows.target, weight.shape[0], self.ignore_index)
        if indices is not None:
            # What fills up a row means nothing.
            known = torch.where(teacher > -torch.inf, indices, 0)
            check_given_classes(rows.op, "teacher_indices", known, weight.shape[0])
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
        share = divisor.to(torch.promote_types(hidden.dtype, torch.float32)).reciprocal()
        divergence, beta, factor = self.distance()
        check_budget_variable(self.memory_budget)
        loss, *parts = fused_linear_distillation(
            rows.op, hidden, weight, teacher, heads[1], indices, rows.target, bias, heads[2],
            share, divergence, beta, self.temperature, self.weight_soft_loss * factor,
            self.weight_hard_loss, self.ignore_index, False, self.accum_dtype, self.memory_budget,
        )  # fmt: skip
        if not self.return_soft_hard_loss:
            return loss
        return loss, *(
            part.sum() / (weight or 1.0)
            for part, weight in zip(parts, (self.weight_soft_loss, self.weight_hard_loss), strict=True)
        )


_STUDENT = LayerNames("student_input", "student_weight", "true_labels", "student_bias")
_TEACHER = LayerNames("teacher_input", "teacher_weight", bias="teacher_bias")


class _OfTwoHeads(DistillationLoss):
    @arguments(num_items_in_batch=DIVISOR)
    def forward(
        self, student_input, student_weight, teacher_input, teacher_weight=None, true_labels=None, student_bias=None,
        teacher_bias=None, *, mask=None, num_items_in_batch=None,
    ):  # fmt: skip
        """The loss of a batch.

        Args:
            student_input: (..., H) hidden states: (B, L, H), or packed, (T, H).
            student_weight: (V, H), of the projection.
            teacher_input: (..., Ht) hidden states of the teacher, of any size; or its logits, (..., V), of any floating
                dtype, without ``teacher_weight``.
            teacher_weight: (V, Ht) or None.
            true_labels: (...), the token that each hidden state is to predict; None where ``weight_hard_loss`` is 0.
            student_bias, teacher_bias: (V,) or None.
            mask: (...), 0 for tokens that do not count.
            num_items_in_batch: takes the place of the number of tokens that count, which the sums are divided by: a
                number, or a tensor of one element.

        Returns:
            The loss, float32; with ``return_soft_hard_loss`` a tuple. 0 where no token counts.

        Raises:
            ValueError: no labels for the cross entropy.
            RuntimeError: shapes that do not fit, other vocabularies, a tensor of the teacher that requires grad.
        """
        rows = self._rows(student_input, true_labels, mask)
        teacher = self._of_tokens(rows, student_input, "teacher_input", teacher_input)
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


class FusedLinearJSDLoss(_OfTwoHeads):
    """Generalised Jensen-Shannon divergence (:func:`liger.jsd`), and cross entropy.

    Args:
        beta: weight of the teacher in the mixture; 0 is the forward, 1 the reverse KL.
        options: those of :class:`DistillationLoss`.

    Raises:
        ValueError: a beta that is not between 0 and 1; as :class:`DistillationLoss`.

    Source: Agarwal et al., "GKD", arXiv 2306.13649.
    """

    @arguments(error=ValueError, beta=FRACTION)
    def __init__(self, *, beta=0.5, **options):
        super().__init__(**options)
        self.beta = float(beta)

    def distance(self):
        return jsd_divergence(self.beta), self.beta, 1.0


class FusedLinearKLDivLoss(_OfTwoHeads):
    """``KL(teacher || student)``, or the reverse (:func:`liger.kl_div`), and cross entropy.

    Args:
        reverse: ``KL(student || teacher)``, which seeks modes.
        options: those of :class:`DistillationLoss`.

    Source: Hinton, Vinyals and Dean, arXiv 1503.02531; the reverse as in Gu et al., "MiniLLM", arXiv 2306.08543.
    """

    @arguments(reverse=FLAG)
    def __init__(self, *, reverse=False, **options):
        super().__init__(**options)
        self.reverse = reverse

    def distance(self):
        return "reverse_kl" if self.reverse else "forward_kl", 0.5, 1.0


class FusedLinearCosineSimilarityLoss(_OfTwoHeads):
    """``beta * (1 - cosine)`` of the two logit vectors of each token, and cross entropy. No temperature changes it.

    Args:
        beta: factor of the distance.
        options: those of :class:`DistillationLoss`.

    Raises:
        ValueError: a beta that is not positive; as :class:`DistillationLoss`.
    """

    @arguments(error=ValueError, beta=POSITIVE)
    def __init__(self, *, beta=0.5, **options):
        super().__init__(**options)
        self.beta = float(beta)

    def distance(self):
        return "cosine", 0.5, self.beta


_RESTS = {"tail": "topk_tail", "renormalize": "topk"}


class FusedLinearTopKLoss(DistillationLoss):
    """``KL(teacher || student)`` of a teacher that is known by its largest log-probabilities, and cross entropy.

    A server of the teacher (vLLM, for example) sends them, so no head of it is computed.

    Args:
        rest: what becomes of the other classes, of which the teacher says no more than their sum. ``"tail"``: they are
            one class, for both models. ``"renormalize"``: for the teacher they have probability 0, and its others are
            divided by their sum; the student's distribution remains that over all classes.
        options: those of :class:`DistillationLoss`. The temperature divides the logits of the student alone: the
            teacher's log-probabilities are to be those at that temperature.

    Raises:
        ValueError: another ``rest``; as :class:`DistillationLoss`.
    """

    @arguments(rest=TEXT)
    def __init__(self, *, rest="tail", **options):
        super().__init__(**options)
        self.rest = choice(self, "rest", rest, tuple(_RESTS))

    def distance(self):
        return _RESTS[self.rest], 0.5, 1.0

    @arguments(num_items_in_batch=DIVISOR)
    def forward(
        self, student_input, student_weight, teacher_logprobs, teacher_indices, true_labels=None, student_bias=None, *,
        mask=None, num_items_in_batch=None,
    ):  # fmt: skip
        """The loss of a batch.

        Args:
            teacher_logprobs: (..., k), any floating dtype. Entries of -inf fill up rows that have fewer; a row of
                nothing else has no distance.
            teacher_indices: (..., k), int64 or int32, the class of each; those of one row differ, but for -inf.
            student_input, student_weight, true_labels, student_bias, mask, num_items_in_batch: as in
                :meth:`FusedLinearJSDLoss.forward`.

        Returns, raises: as there.
        """
        rows = self._rows(student_input, true_labels, mask)
        logprobs, indices = (
            self._of_tokens(rows, student_input, name, tensor)
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
