"""The memory budget of the environment, checked where public functions begin.

What an op throws arrives in Python as a RuntimeError. A variable that cannot be read is a ValueError for the user, as
other unreadable settings are.
"""

import os

import torch
from torch.compiler import is_compiling


def check_budget_variable(memory_budget):
    """Raises ValueError if the budget comes from LIGER_MEMORY_BUDGET and that is not a positive number of bytes.

    Compiled code leaves it to the op, which raises RuntimeError: the variable is read when the code runs.
    """
    if memory_budget is None and os.environ.get("LIGER_MEMORY_BUDGET") and not is_compiling():
        default_memory_budget()


def default_memory_budget():
    """Bytes, from LIGER_MEMORY_BUDGET or 512 MiB; raises ValueError where the variable cannot be read."""
    try:
        return torch.ops.liger.default_memory_budget()
    except RuntimeError as error:
        raise ValueError(str(error).splitlines()[0]) from None
