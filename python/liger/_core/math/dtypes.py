# SPDX-License-Identifier: BSD-3-Clause
"""Dtypes of intermediate results."""

import torch


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of arithmetic, sums and statistics: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32
