# SPDX-License-Identifier: BSD-3-Clause
"""Divergences between two distributions, from logits."""
