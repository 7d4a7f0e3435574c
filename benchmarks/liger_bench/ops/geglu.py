# SPDX-License-Identifier: BSD-3-Clause
"""GeGLU with the tanh approximation, as in liger-kernel: the rows of a gated product."""

from functools import partial

import torch.nn.functional as F

import liger

from ..reports.goals import COPY, Goal
from .gated import Family, family_rows

GOALS = (
    Goal("geglu forward 16384x14336", COPY, 1.00),
    Goal("geglu backward 16384x14336", COPY, 1.00),
    Goal("geglu_packed forward 16384x14336", COPY, 1.00),
    Goal("geglu_packed backward 16384x14336", COPY, 1.00),
)

GEGLU = Family(
    "geglu",
    partial(F.gelu, approximate="tanh"),
    partial(liger.geglu, approximate="tanh"),
    partial(liger.geglu_packed, approximate="tanh"),
    "LigerGELUMulFunction",
)


def rows(options):
    return family_rows(options, GEGLU)
