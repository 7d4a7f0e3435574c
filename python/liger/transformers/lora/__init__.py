# SPDX-License-Identifier: BSD-3-Clause
"""PEFT's LoRA linear layers: their products in one autograd node."""
