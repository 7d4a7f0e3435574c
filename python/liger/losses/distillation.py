# SPDX-License-Identifier: BSD-3-Clause
"""Distillation losses between a teacher and a student, plus cross entropy with labels from the same
logits."""

from typing import Literal, get_args

from torch import Tensor
from typing_extensions import Unpack

from .._core.op.arguments import DIVISOR, FLAG, FRACTION, POSITIVE, TEXT, arguments
from .._core.op.tensors import check_floating, check_indices, check_shape, wrong_shape
from ..ops.divergence.op import jsd_divergence
from ._distillation import DistillationLoss, DistillationMetrics, DistillationOptions
from .base import check_choice


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
                a class; a tensor of the teacher or a denominator that requires grad.
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
        shape, of = teacher_logprobs.shape, "the shape of teacher_logprobs"
        check_shape(rows.op, "teacher_indices", teacher_indices, shape, of)
        return self._distill_rows(rows, weight, logprobs, None, indices, bias, None, denominator)
