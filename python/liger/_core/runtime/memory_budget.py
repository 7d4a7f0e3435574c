# SPDX-License-Identifier: BSD-3-Clause
"""The environment variable LIGER_MEMORY_BUDGET, checked at the start of public functions.

An op can only raise RuntimeError, but an invalid environment variable is a ValueError, as for other settings.
"""

import os

import torch
from torch.compiler import is_compiling


def check_budget_variable(memory_budget):
    """Raises ValueError if the call uses LIGER_MEMORY_BUDGET and that is not a positive number of bytes.

    Not in compiled code, which reads the variable when it runs: there the op raises RuntimeError.
    """
    if memory_budget is None and os.environ.get("LIGER_MEMORY_BUDGET") and not is_compiling():
        default_memory_budget()


def default_memory_budget():
    """Bytes: LIGER_MEMORY_BUDGET, or 512 MiB. Raises ValueError if the variable is not a positive number of
    bytes."""
    try:
        return torch.ops.liger.default_memory_budget()
    except RuntimeError as error:
        raise ValueError(str(error).splitlines()[0]) from None
