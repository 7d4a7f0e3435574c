# SPDX-License-Identifier: BSD-3-Clause
"""Classes with a static ``apply``, for the names of liger_kernel's autograd functions.

They are no autograd functions: the ops of liger are differentiable themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def function_class(name: str, apply: Callable[..., Any]) -> Any:
    """A class ``name`` whose ``apply`` is the given function; its instances have no use."""
    return type(name, (), {"apply": staticmethod(apply), "__doc__": apply.__doc__})
