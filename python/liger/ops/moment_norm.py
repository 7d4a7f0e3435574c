# SPDX-License-Identifier: BSD-3-Clause
"""Normalisation by mean and variance: torch formulas of layer_norm and group_norm."""

import torch

from .._core.math.dtypes import accumulate_dtype


def rows_normalised(rows, eps):
    """(normalised rows (..., H), mean (...), rstd (...)) in the accumulation dtype, for rows (..., H)."""
    wide = rows.to(accumulate_dtype(rows.dtype))
    mean = wide.mean(-1, keepdim=True)
    centred = wide - mean
    rstd = torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    return centred * rstd, mean.squeeze(-1).contiguous(), rstd.squeeze(-1).contiguous()


def rows_grad(weighted, xhat, rstd):
    """The gradient of the rows from the gradient ``weighted`` of the normalised rows ``xhat``; rstd is (...,
    1)."""
    mean = weighted.mean(-1, keepdim=True)
    return rstd * (weighted - mean - xhat * (weighted * xhat).mean(-1, keepdim=True))


def parameter_grad(parameter, need, x, values, dims):
    """``values`` summed over ``dims`` in the dtype of the parameter; an empty tensor if the gradient is not
    needed."""
    if parameter is None or not need:
        return (x if parameter is None else parameter).new_empty(0)
    return (values.sum(dims) if dims else values).to(parameter.dtype, copy=True)
