# SPDX-License-Identifier: BSD-3-Clause
"""Base class of distillation losses that other projects define by a function of logits."""

import functools
from typing import Any

import torch
from torch import nn

from ..._core.op.autograd import graph_of_its_own
from ...ops.cross_entropy.op import cross_entropy
from ..parameters import takes

_CHUNK = (
    "student_input_chunk, student_weight, teacher_input_chunk, teacher_weight, target_chunk, student_bias=None, "
    "teacher_bias=None"
)
_PARTS = ("input_chunk", "weight", "bias")
_TENSORS = [f"{owner}_{part}" for owner in ("student", "teacher") for part in _PARTS]


class LigerFusedLinearDistillationBase(torch.autograd.Function):
    """A distillation loss: logits of a chunk of rows at a time, gradients computed in the forward.

    A subclass defines :meth:`distillation_loss_fn` in plain PyTorch, and a ``forward`` that calls the one of
    this class with ``cls`` and ``ctx``.
    """

    @staticmethod
    def distillation_loss_fn(student_logits, teacher_logits, target=None, ignore_index=None, **options):
        """The sum of the loss over rows, from logits (rows, classes) already divided by the temperature."""
        raise NotImplementedError(
            "distillation_loss_fn: a subclass of LigerFusedLinearDistillationBase defines it"
        )

    @staticmethod
    @takes(f"{_CHUNK}, ignore_index=-100, compute_ce_loss=True")
    def chunk_forward(target_chunk, ignore_index, compute_ce_loss, **tensors):
        """(logits of the student, logits of the teacher, sum of the cross entropy) of some rows."""
        student = nn.functional.linear(*(tensors[f"student_{part}"] for part in _PARTS))
        with torch.no_grad():
            teacher = nn.functional.linear(*(tensors[f"teacher_{part}"] for part in _PARTS))
        hard: Any = student.new_zeros((), dtype=torch.float32)
        if compute_ce_loss:
            hard = cross_entropy(student, target_chunk, ignore_index=ignore_index, reduction="sum")
        return student, teacher, hard

    @staticmethod
    @takes(
        f"{_CHUNK}, distillation_loss_fn=None, full_target=None, ignore_index=-100, weight_hard_loss=0.5, "
        "weight_soft_loss=0.5, compute_ce_loss=True, temperature=1, **loss_kwargs"
    )
    def _compute_loss(
        target_chunk, distillation_loss_fn, full_target, ignore_index, compute_ce_loss, **given
    ):
        """(loss, (distance, cross entropy, logits of the student, logits of the teacher)) of some rows.

        All terms are divided by the number of valid rows of ``full_target``.
        """
        factors = given.pop("weight_hard_loss"), given.pop("weight_soft_loss")
        temperature, tensors = given.pop("temperature"), {name: given.pop(name) for name in _TENSORS}
        student, teacher, hard = LigerFusedLinearDistillationBase.chunk_forward(
            target_chunk=target_chunk, ignore_index=ignore_index, compute_ce_loss=compute_ce_loss, **tensors
        )
        student, teacher = student / temperature, teacher / temperature
        soft = distillation_loss_fn(student, teacher, target=target_chunk, ignore_index=ignore_index, **given)
        rows = (full_target != ignore_index).sum().clamp_min(1)
        hard, soft = hard / rows, soft / rows
        return factors[0] * hard + factors[1] * soft, (soft, hard, student, teacher)

    @staticmethod
    @takes(
        "cls, ctx, student_input, student_weight, teacher_input, teacher_weight, target, student_bias=None, "
        "teacher_bias=None, chunk_size=1024, ignore_index=-100, weight_hard_loss=0.5, weight_soft_loss=0.5, beta=0.5, "
        "compute_ce_loss=True, temperature=1.0, compiled=True, return_soft_hard_loss=False, **loss_kwargs"
    )
    def forward(cls, ctx, student_input, student_weight, teacher_input, target, student_bias, **options):
        """The loss, or with ``return_soft_hard_loss`` (loss, distance, cross entropy).

        Args:
            student_input, teacher_input: (rows, H) and (rows, Ht).
            target: (rows,).
            chunk_size: rows of a chunk.
            beta, loss_kwargs: options of ``distillation_loss_fn``.
            compiled: without effect.
        """
        chunk_size, all_three = options.pop("chunk_size"), options.pop("return_soft_hard_loss")
        del options["compiled"]
        options |= {"distillation_loss_fn": cls.distillation_loss_fn, "full_target": target}
        compute = functools.partial(LigerFusedLinearDistillationBase._compute_loss, **options)
        weight = student_weight.detach().requires_grad_()
        bias = None if student_bias is None else student_bias.detach().requires_grad_()
        # Float32 sums, rounded once at the end.
        sums = [None if t is None else torch.zeros_like(t, dtype=torch.float32) for t in (weight, bias)]
        grad_input, totals = torch.empty_like(student_input), [0.0, 0.0, 0.0]
        for start in range(0, student_input.shape[0], chunk_size):
            rows = slice(start, start + chunk_size)
            inputs = student_input[rows].detach().requires_grad_()
            with torch.enable_grad(), graph_of_its_own():
                loss, (soft, hard, *_) = compute(
                    inputs, weight, teacher_input[rows], target_chunk=target[rows], student_bias=bias
                )
            wanted = [inputs, weight] if bias is None else [inputs, weight, bias]
            grad_input[rows], *others = torch.autograd.grad(loss, wanted)
            for total, grad in zip(sums, others, strict=False):
                total.add_(grad)
            totals = [t + value.detach() for t, value in zip(totals, (loss, soft, hard), strict=True)]
        grads = [None if s is None else s.to(student_weight.dtype) for s in sums]
        ctx.save_for_backward(grad_input, *grads)
        results = [t if isinstance(t, torch.Tensor) else student_input.new_zeros(()) for t in totals]
        return tuple(results) if all_three else results[0]

    @staticmethod
    def backward(ctx, grad_output, *args):
        """Gradients of the two inputs and weights (student first), of target and of student_bias."""
        grads = [None if g is None else g * grad_output.to(g.dtype) for g in ctx.saved_tensors]
        return grads[0], grads[1], None, None, None, grads[2]
