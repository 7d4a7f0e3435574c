# SPDX-License-Identifier: BSD-3-Clause
"""Tensors for samples of arguments."""

import torch


def floats(device, *shape, scale=1.0):
    return torch.randn(shape, device=device) * scale


def transposed(tensor):
    """The same values, laid out with the first two dimensions exchanged."""
    return tensor.transpose(0, 1).contiguous().transpose(0, 1)
