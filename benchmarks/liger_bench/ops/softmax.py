# SPDX-License-Identifier: BSD-3-Clause
"""Softmax over short, middle and long rows."""

import torch.nn.functional as F

import liger

from .rowwise import Rowwise

SOFTMAX = Rowwise("softmax", liger.softmax, lambda x: F.softmax(x, -1), "LigerSoftmaxFunction")


def rows(options):
    return SOFTMAX.rows(options, [(65536, 4096), (8192, 32000), (2048, 128256)])
