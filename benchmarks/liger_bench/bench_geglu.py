"""GeGLU in the approximation by tanh, which liger-kernel has too: the rows of a gated product."""

from functools import partial

import torch.nn.functional as F

import liger

from .gated import Family, family_rows

GEGLU = Family(
    "geglu",
    partial(F.gelu, approximate="tanh"),
    partial(liger.geglu, approximate="tanh"),
    partial(liger.geglu_packed, approximate="tanh"),
    "LigerGELUMulFunction",
)


def rows(options):
    return family_rows(options, GEGLU)
