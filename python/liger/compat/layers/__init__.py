# SPDX-License-Identifier: BSD-3-Clause
"""liger_kernel's norms, activations, MLPs, rotary embeddings and experts."""
