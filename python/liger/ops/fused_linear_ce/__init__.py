# SPDX-License-Identifier: BSD-3-Clause
"""Cross entropy of a linear layer's output, its LoRA form, and its weight gradient in a float32 sum."""
