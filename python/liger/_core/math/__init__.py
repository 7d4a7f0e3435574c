# SPDX-License-Identifier: BSD-3-Clause
"""Arithmetic of the torch kernels: dtypes, GEMMs, blocks of rows."""
