# SPDX-License-Identifier: BSD-3-Clause
"""Fake (meta) implementations: the shapes, strides and dtypes of results, for compilers and meta tensors."""

import functools

import torch


def register_fake(name):
    """Decorator: registers the fake of an op, such as ``"liger::softmax"``, and checks devices.

    The dispatcher calls the fake if any tensor is a meta tensor. Without the check of devices, such a call
    with other tensors on a CPU or GPU would return uninitialised memory.
    """
    namespace, _, op = name.partition("::")
    arguments = getattr(getattr(torch.ops, namespace), op).default._schema.arguments
    names = [argument.name for argument in arguments]
    public = public_name(op)

    def decorate(fake):
        @functools.wraps(fake)
        def checked(*args, **kwargs):
            check_one_device(public, {**dict(zip(names, args, strict=False)), **kwargs})
            return fake(*args, **kwargs)

        torch.library.register_fake(name, checked)
        return fake

    return decorate


def public_name(op):
    """The public function that a raw op, named without its namespace, belongs to in messages."""
    return op.removesuffix("_").removesuffix("_forward")


def check_one_device(op, arguments):
    """Raises RuntimeError if the tensors among these arguments (a dict by name) are on different devices."""
    first = None
    for name, value in arguments.items():
        for tensor in value if isinstance(value, (list, tuple)) else (value,):
            if not isinstance(tensor, torch.Tensor):
                continue
            if first is None:
                first, device = name, tensor.device
            elif tensor.device != device:
                raise RuntimeError(
                    f"{op}: {name} is on {tensor.device}, expected the device of {first}, {device}"
                )
