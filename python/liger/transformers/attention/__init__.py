# SPDX-License-Identifier: BSD-3-Clause
"""Rotary embeddings in attention, alone or with the norms of queries and keys."""
