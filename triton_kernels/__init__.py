# SPDX-License-Identifier: BSD-3-Clause
"""Triton twins of the compiled ops: one module per op, with launchers that take the arguments of the op's
schema.

The modules import Triton, so they are imported only if the Triton backend serves an op (see
``liger._core.op.backend``).
"""
