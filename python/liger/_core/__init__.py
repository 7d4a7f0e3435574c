# SPDX-License-Identifier: BSD-3-Clause
"""The layer below the ops: compiled libraries, autograd, argument checks, row arithmetic, DTensors.

Its modules import no op. An op that they need is called by its name in ``torch.ops.liger``.
tests/packaging/test_layout.py states the layers of the package.
"""
