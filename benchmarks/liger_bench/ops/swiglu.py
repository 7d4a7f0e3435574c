# SPDX-License-Identifier: BSD-3-Clause
"""SwiGLU: the rows of a gated product."""

import torch.nn.functional as F

import liger

from ..reports.goals import COPY, Goal
from .gated import Family, family_rows

GOALS = (
    Goal("swiglu forward 16384x14336", COPY, 1.00),
    Goal("swiglu backward 16384x14336", COPY, 1.00),
    Goal("swiglu_packed forward 16384x14336", COPY, 1.00),
    Goal("swiglu_packed backward 16384x14336", COPY, 1.00),
)

SWIGLU = Family(
    "swiglu",
    F.silu,
    liger.swiglu,
    liger.swiglu_packed,
    "LigerSiLUMulFunction",
    "LigerFusedGateUpSiLUMulFunction",
    liger_kernel_cute=True,
)


def rows(options):
    return family_rows(options, SWIGLU)
