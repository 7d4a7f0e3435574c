# SPDX-License-Identifier: BSD-3-Clause
"""Divergences between the outputs of two linear layers."""
