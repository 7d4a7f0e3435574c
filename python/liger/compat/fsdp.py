# SPDX-License-Identifier: BSD-3-Clause
"""Calls of a function inside the forward of an FSDP module, where its parameters are gathered."""

import contextlib
from collections.abc import Callable
from typing import Any

from torch.distributed.fsdp import FullyShardedDataParallel

from .._core.modules.overriding import overriding


class _FSDPForwardRedirection:
    """``redirection(wrapper, method, *args)`` is ``method(*args)``, run inside the forward of the wrapper."""

    def __call__(
        self, wrapper_module: FullyShardedDataParallel, method: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Calls the wrapper; for this call the forward of its module is ``method``.

        Raises:
            TypeError: ``wrapper_module`` is not a FullyShardedDataParallel.
        """
        if not isinstance(wrapper_module, FullyShardedDataParallel):
            raise TypeError(
                f"_FSDPForwardRedirection was given a {type(wrapper_module).__name__}, expected a "
                "FullyShardedDataParallel"
            )
        with contextlib.ExitStack() as stack:

            def redirected(*args: Any, **kwargs: Any) -> Any:
                # The method may call the forward of the module itself.
                stack.close()
                return method(*args, **kwargs)

            stack.enter_context(overriding(wrapper_module._fsdp_wrapped_module, forward=redirected))
            return wrapper_module(*args, **kwargs)
