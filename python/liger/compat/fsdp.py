# SPDX-License-Identifier: BSD-3-Clause
"""Calls of a function inside the forward of an FSDP module, where its parameters are gathered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.distributed.fsdp import FullyShardedDataParallel


class _FSDPForwardRedirection:
    """``redirection(wrapper, method, *args)`` is ``method(*args)``, run inside the forward of the wrapper."""

    def __call__(
        self, wrapper_module: FullyShardedDataParallel, method: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Calls the wrapper with the arguments of ``method``; for this call its module's forward is
        ``method``.

        Raises:
            TypeError: ``wrapper_module`` is not a FullyShardedDataParallel.
        """
        if not isinstance(wrapper_module, FullyShardedDataParallel):
            raise TypeError(
                f"_FSDPForwardRedirection was given a {type(wrapper_module).__name__}, expected a "
                "FullyShardedDataParallel"
            )
        inner: Any = wrapper_module._fsdp_wrapped_module
        before = inner.__dict__.get("forward")

        def restore():
            if before is None:
                inner.__dict__.pop("forward", None)
            else:
                inner.forward = before

        def redirected(*args: Any, **kwargs: Any) -> Any:
            # The method may call the forward of the module itself.
            restore()
            return method(*args, **kwargs)

        inner.forward = redirected
        try:
            return wrapper_module(*args, **kwargs)
        finally:
            restore()
