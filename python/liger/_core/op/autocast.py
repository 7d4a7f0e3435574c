# SPDX-License-Identifier: BSD-3-Clause
"""Autocast for ops that consist of other ops: operands are cast as torch.nn.functional.linear casts them."""

import torch


def autocast_operands(*tensors):
    """The operands in the dtype of autocast, if it is enabled for the device of the first one. None passes
    through."""
    device = tensors[0].device.type
    # is_autocast_enabled raises for meta. torch.amp.is_autocast_available would tell, but causes graph breaks
    # in torch 2.11 and older.
    if device == "meta" or not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)

    def cast(t):
        eligible = t is not None and t.is_floating_point() and t.dtype != torch.float64
        return t.to(dtype) if eligible else t

    return tuple(cast(t) for t in tensors)
