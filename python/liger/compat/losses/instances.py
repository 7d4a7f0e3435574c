# SPDX-License-Identifier: BSD-3-Clause
"""One instance of a loss of liger.losses per set of options."""

import functools
from typing import Any


@functools.lru_cache(maxsize=256)
def _instance(loss_class, options):
    return loss_class(**dict(options))


def loss_of(loss_class: Any, *, compiled: Any = None, chunk_size: Any = None, **options: Any) -> Any:
    """The loss. ``compiled`` and ``chunk_size`` have no effect: the memory budget sizes the chunks."""
    return _instance(loss_class, tuple(options.items()))
