"""GeGLU with the tanh approximation, as in liger-kernel: the rows of a gated product."""

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
