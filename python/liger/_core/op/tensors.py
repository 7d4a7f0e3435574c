# SPDX-License-Identifier: BSD-3-Clause
"""Checks of shapes, dtypes and devices, for public arguments that have another name than in the op
(docs/reference/errors.md)."""

from typing import NamedTuple

import torch

from ..math.computed_rows import ignored_rows
from .arguments import described, dtype_name
from .autograd import is_plain_eager_call


def wrong_shape(op, name, tensor, expected):
    return RuntimeError(f"{op}: {name} has shape {tuple(tensor.shape)}, expected {expected}")


def wrong_dtype(op, name, tensor, expected):
    return RuntimeError(f"{op}: {name} has dtype {dtype_name(tensor.dtype)}, expected {expected}")


def check_floating(op, name, tensor):
    if tensor.dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        raise wrong_dtype(op, name, tensor, "float16, bfloat16, float32 or float64")


def check_indices(op, name, tensor):
    if tensor.dtype not in (torch.int64, torch.int32):
        raise wrong_dtype(op, name, tensor, "int64 or int32 class indices")


def check_device(op, name, tensor, other_name, other):
    if tensor.device != other.device:
        raise RuntimeError(
            f"{op}: {name} is on {tensor.device}, expected the device of {other_name}, {other.device}"
        )


def check_like(op, name, tensor, other_name, other):
    """Raises RuntimeError if two tensors differ in dtype or device."""
    if tensor.dtype != other.dtype:
        raise wrong_dtype(op, name, tensor, f"the dtype of {other_name}, {dtype_name(other.dtype)}")
    check_device(op, name, tensor, other_name, other)


def check_shape(op, name, tensor, expected, of):
    if tensor.shape != expected:
        raise wrong_shape(op, name, tensor, f"{tuple(expected)}, {of}")


def check_divisor(op, name, tensor):
    """Raises RuntimeError unless the tensor has one element, of a floating dtype or an integer."""
    if tensor.numel() != 1:
        raise wrong_shape(op, name, tensor, "one element")
    if tensor.dtype not in (torch.int64, torch.int32) and not tensor.is_floating_point():
        raise wrong_dtype(op, name, tensor, "a floating dtype, int64 or int32")


def check_ignore_index(op, name, target, ignore_index):
    """Raises ValueError for an ``ignore_index`` that the dtype of the target cannot hold.

    No target has that value, but torch compares in the dtype of the target, where it is the value of another
    class.
    """
    if -(2**31) <= ignore_index < 2**31 or (target.dtype != torch.int32 and -(2**63) <= ignore_index < 2**63):
        return
    dtype = "int32" if target.dtype == torch.int32 else "int64"
    raise ValueError(
        f"{op}: ignore_index is {described(ignore_index)}, expected a value of {dtype}, the dtype of {name}"
    )


class LayerNames(NamedTuple):
    """The names that a public function gives to the tensors of an lm_head."""

    input: str = "input"
    weight: str = "weight"
    target: str = "target"
    bias: str = "bias"


def check_accum_dtype(op, name, input, accum_dtype):
    """Raises ValueError unless ``accum_dtype`` is None, float32 or the dtype of the input."""
    if accum_dtype not in (None, torch.float32, input.dtype):
        raise ValueError(
            f"{op}: accum_dtype is {dtype_name(accum_dtype)}, expected float32, the dtype of {name}, "
            f"{dtype_name(input.dtype)}, or None"
        )


def check_denominator(op, denominator, reduction):
    """Raises ValueError for a divisor that the reduction does not use."""
    if denominator is not None and reduction == "none":
        raise ValueError(f"{op}: denominator was given with reduction 'none', expected 'mean' or 'sum'")


def check_logits_dtype(op, input_name, input, logits_dtype):
    """Raises unless ``logits_dtype`` is None, or float32 for an input (or None) of no more bits."""
    if logits_dtype is None:
        return
    if logits_dtype != torch.float32:
        raise ValueError(f"{op}: logits_dtype is {dtype_name(logits_dtype)}, expected float32 or None")
    if input is not None and input.dtype == torch.float64:
        expected = "float16, bfloat16 or float32 with logits_dtype float32"
        raise wrong_dtype(op, input_name, input, expected)


def check_layer(op, names, input, weight, bias, target=None, float32_weight=False):
    """Raises RuntimeError for tensors that do not form an lm_head, with the argument names of a public
    function.

    Args:
        op: the public name.
        names: :class:`LayerNames`.
        input: (..., H).
        weight, bias: (V, H), and (V,) or None.
        target: (...), or None.
        float32_weight: weight and bias may be float32 instead of having the dtype of the input.
    """

    def check_operand(name, tensor):
        if tensor.dtype != input.dtype and not (float32_weight and tensor.dtype == torch.float32):
            expected = f"{'float32 or ' if float32_weight else ''}the dtype of {names.input}, {dtype_name(input.dtype)}"
            raise wrong_dtype(op, name, tensor, expected)
        check_device(op, name, tensor, names.input, input)

    check_floating(op, names.input, input)
    if input.dim() == 0:
        raise wrong_shape(op, names.input, input, "at least one dimension")
    hidden = input.shape[-1]
    if weight.dim() != 2 or weight.shape[0] == 0 or weight.shape[1] != hidden:
        expected = f"(vocab, hidden) of at least one row, with the hidden size of {names.input}, {hidden}"
        raise wrong_shape(op, names.weight, weight, expected)
    check_operand(names.weight, weight)
    if bias is not None:
        check_shape(op, names.bias, bias, weight.shape[:1], f"one value per row of {names.weight}")
        check_operand(names.bias, bias)
    if target is not None:
        check_indices(op, names.target, target)
        check_shape(op, names.target, target, input.shape[:-1], f"one class index per row of {names.input}")
        check_device(op, names.target, target, names.input, input)


def check_classes(op, name, classes, vocab, ignore_index=None):
    """Raises RuntimeError for the first class out of range. CPU tensors only: on a GPU the check would
    synchronise."""
    if classes.device.type != "cpu":
        return
    bad = (classes < 0) | (classes >= vocab)
    if ignore_index is not None:
        bad &= ~ignored_rows(classes, ignore_index)
    if bad.any():
        position = tuple(bad.nonzero()[0].tolist())
        where = f"row {position[0]}" if len(position) == 1 else f"index {position}"
        or_ignored = "" if ignore_index is None else f" or ignore_index {ignore_index}"
        raise RuntimeError(
            f"{op}: {name} at {where} is {int(classes[position])}, expected 0 <= {name} < {vocab}{or_ignored}"
        )


def check_given_classes(*arguments):
    """:func:`check_classes` for plain eager calls: tracers have no data to check, and transforms must not see
    the check. The op repeats the check with its own argument names."""
    if is_plain_eager_call(arguments[2:3]):
        check_classes(*arguments)
