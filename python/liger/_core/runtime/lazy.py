# SPDX-License-Identifier: BSD-3-Clause
"""Public names of a package that are imported at first use."""

import importlib
from collections.abc import Callable, Sequence
from typing import Any


def lazy(
    package: str, public: Sequence[str], modules: dict[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """``__getattr__`` and ``__dir__`` of a package.

    Args:
        package: the name of the package.
        public: the names of ``import *``. ``dir`` lists these and the lazy ones, and nothing else.
        modules: by lazy name, the module that has it, or that it is.
    """

    def get(name: str) -> Any:
        module = modules.get(name)
        if module is None:
            raise AttributeError(f"module '{package}' has no attribute '{name}'")
        imported = importlib.import_module(module)
        return imported if module == f"{package}.{name}" else getattr(imported, name)

    return get, lambda: sorted({*public, *modules})
