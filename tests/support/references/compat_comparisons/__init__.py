# SPDX-License-Identifier: BSD-3-Clause
"""Comparisons of every callable of liger_kernel with plain torch, by module of liger.compat and name."""

from . import cross_entropy, divergence, rows, sequences  # noqa: F401  (they add their cases)
from .case import CASES, differentiable, gradients

__all__ = ["CASES", "differentiable", "gradients"]
