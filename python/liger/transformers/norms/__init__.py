# SPDX-License-Identifier: BSD-3-Clause
"""Norms, gated norms, and norms fused with the residual addition before them."""
