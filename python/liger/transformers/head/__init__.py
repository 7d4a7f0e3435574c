# SPDX-License-Identifier: BSD-3-Clause
"""The lm_head that computes the loss: plain, with LoRA adapters, sharded."""
