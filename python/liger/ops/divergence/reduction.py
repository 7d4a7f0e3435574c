# SPDX-License-Identifier: BSD-3-Clause
"""The rows of a divergence and the factor of the loss of each row, shared with the divergences of linear
layers."""

import torch

from ..._core.dtensor.inputs import align_tokens
from ..._core.math.dtypes import accumulate_dtype
from ..._core.op.fakes import check_one_device
from ..._core.op.loss_rows import Tokens, memory_order, refuse_gradients
from ..._core.op.tensors import check_device, check_divisor, check_floating, check_ignore_index, wrong_shape


def flatten_pair(op, names, x, teacher, target, token_weight):
    """(x, teacher, target, token_weight, tokens): the first two as (rows, features), the next two as (rows,)
    or None, and the :class:`Tokens` of a loss per row."""
    if x.dim() < 1:
        raise wrong_shape(op, names[0], x, "at least one dimension")
    if teacher.dim() < 1 or teacher.shape[:-1] != x.shape[:-1]:
        expected = f"the shape of {names[0]}, {tuple(x.shape)}, except for the last dimension"
        raise wrong_shape(op, names[1], teacher, expected)
    for name, other in (("target", target), ("token_weight", token_weight)):
        if other is not None and other.shape != x.shape[:-1]:
            expected = f"the shape of {names[0]} without its last dimension, {tuple(x.shape[:-1])}"
            raise wrong_shape(op, name, other, expected)
        if other is not None:
            # Checked here, because the message of a torch op would not name the arguments.
            check_device(op, name, other, names[0], x)
    _, teacher, _ = align_tokens(op, x, teacher, None, names)
    x, target, token_weight = align_tokens(op, x, target, token_weight, (names[0], "target"))
    # A last dimension of size 0 has nothing to select; the op accepts it or names it.
    tokens = Tokens(x.select(-1, 0) if x.shape[-1] else x.sum(-1), None)
    if x.dim() == 1:
        x, teacher = x.unsqueeze(0), teacher.unsqueeze(0)
        target, token_weight = (None if t is None else t.unsqueeze(0) for t in (target, token_weight))
    elif x.dim() > 2:
        order = memory_order(x)
        # Two tensors of vocabulary size: a teacher in another order would be copied instead of the student.
        if order is not None and memory_order(teacher) == order:
            tokens = tokens._replace(order=order)
        x, teacher, target, token_weight = (
            None if t is None else tokens.flatten(t) for t in (x, teacher, target, token_weight)
        )
    return x, teacher, target, token_weight, tokens


def row_weights(op, rows, batch, target, token_weight, denominator, ignore_index, reduction):
    """The factor of each row's loss before the sum: (rows,), () if all are equal, or None for 1.

    A tensor on the device of the rows, computed without synchronisation.
    """
    if target is not None:
        check_ignore_index(op, "target", target, ignore_index)
    check_one_device(
        op, {"the rows": rows, "target": target, "token_weight": token_weight, "denominator": denominator}
    )
    if token_weight is not None:
        check_floating(op, "token_weight", token_weight)
        check_device(op, "token_weight", token_weight, "the rows", rows)
    refuse_gradients(op, token_weight=token_weight, denominator=denominator)
    if token_weight is not None and target is not None:
        # The weight of an ignored row may be nan.
        token_weight = token_weight.masked_fill(target == ignore_index, 0)
    wide = accumulate_dtype(rows.dtype)
    if denominator is not None:
        if reduction == "none":
            raise ValueError(
                f"{op}: denominator was given with reduction 'none', expected 'mean', 'batchmean' or 'sum'"
            )
        check_divisor(op, "denominator", denominator)
        check_device(op, "denominator", denominator, "the rows", rows)
        scale = denominator.reshape(()).to(wide).reciprocal()
    elif reduction == "mean" and target is not None:
        scale = (target != ignore_index).sum(dtype=wide).reciprocal()
    elif reduction in ("mean", "batchmean"):
        count = rows.shape[0] if reduction == "mean" else batch
        scale = rows.new_full((), count, dtype=wide).reciprocal()
    else:
        return None if token_weight is None else token_weight.to(wide)
    return scale if token_weight is None else token_weight.to(wide) * scale


def nan_if_empty(loss, rows, batch, reduction, denominator):
    """The loss, or nan for a mean over zero rows, as in all other losses."""
    empty = {"mean": rows.shape[0] == 0, "batchmean": batch == 0}.get(reduction, False)
    return loss + torch.nan if empty and denominator is None else loss
