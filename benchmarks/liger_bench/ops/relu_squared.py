# SPDX-License-Identifier: BSD-3-Clause
"""Squared ReLU."""

import torch.nn.functional as F

import liger

from .rowwise import Rowwise

RELU_SQUARED = Rowwise(
    "relu_squared", liger.relu_squared, lambda x: F.relu(x).square(), "LigerReLUSquaredFunction"
)


def rows(options):
    return RELU_SQUARED.rows(options, [(16384, 14336)])
