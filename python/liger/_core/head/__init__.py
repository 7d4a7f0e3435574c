# SPDX-License-Identifier: BSD-3-Clause
"""The lm_head in chunks of rows: logits, the row rule of cross entropy, gradients, what is kept."""
