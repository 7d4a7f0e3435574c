# SPDX-License-Identifier: BSD-3-Clause
"""Strides of results, as ``torch.empty_like`` of the input has them."""

import torch


def laid_out_like(x, tensor):
    """``tensor`` with the dtype and the strides of ``torch.empty_like(x)``: itself if it has both, else a
    copy."""
    out_strides = torch.empty_like(x, device="meta").stride()
    if tensor.dtype == x.dtype and tensor.stride() == out_strides:
        return tensor
    return torch.empty_like(x).copy_(tensor)
