"""SwiGLU: the rows of a gated product."""

import torch.nn.functional as F

import liger

from .gated import Family, family_rows

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
