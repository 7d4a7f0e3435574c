"""Layers of liger for the package ``kernels``: see README.md of this folder's repository."""

from . import layers

__all__ = ["layers"]
