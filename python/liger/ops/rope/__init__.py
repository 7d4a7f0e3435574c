# SPDX-License-Identifier: BSD-3-Clause
"""Rotary position embeddings, alone and after RMS norms of queries and keys."""
