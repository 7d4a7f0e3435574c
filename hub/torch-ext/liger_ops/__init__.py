# SPDX-License-Identifier: BSD-3-Clause
"""Layers of liger for the package ``kernels``: see README.md of this folder's repository."""

from . import layers

__all__ = ["layers"]
