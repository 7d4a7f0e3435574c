"""Autocast for ops composed of others: operands are cast as those of torch.nn.functional.linear."""

import torch


def autocast_operands(*tensors):
    """The operands in the dtype of autocast, where it is on for the device of the first; None stays None."""
    device = tensors[0].device.type
    # Of the devices that liger serves, meta has none and raises when asked. torch.amp.is_autocast_available would know,
    # but breaks the graphs of torch 2.11 and older.
    if device == "meta" or not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)

    def cast(t):
        eligible = t is not None and t.is_floating_point() and t.dtype != torch.float64
        return t.to(dtype) if eligible else t

    return tuple(cast(t) for t in tensors)
