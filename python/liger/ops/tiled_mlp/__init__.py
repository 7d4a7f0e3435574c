# SPDX-License-Identifier: BSD-3-Clause
"""Functions and gated MLPs that are computed one shard of tokens at a time."""
