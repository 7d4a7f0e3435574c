# SPDX-License-Identifier: BSD-3-Clause
"""Cross entropy of logits, and statistics of some of their classes."""
