# SPDX-License-Identifier: BSD-3-Clause
"""The error about plain tensors mixed with DTensors."""


class MixedTensors(RuntimeError):
    """Tensors of a call that are not all DTensors on one mesh."""
