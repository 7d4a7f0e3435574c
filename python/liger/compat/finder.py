# SPDX-License-Identifier: BSD-3-Clause
"""The import system's side: a finder for the modules and for the metadata of ``liger_kernel``.

The modules have no source. Each resolves its names at first use, by the table in compat/names.py.
"""

import importlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import importlib.util
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from .._core.runtime.environment import environment_flag
from .._core.runtime.extras import missing
from .names import MODULES, is_starred, loaded, needed_packages

ROOT = "liger_kernel"
# The release of liger-kernel that the names, argument orders and return values agree with.
VERSION = "0.8.5"
# A file beside the __init__.py of the distribution in compat/, which no liger-kernel has.
_MARKER = "LIGER_OPS"
_OVERRIDE = "LIGER_COMPAT_OVERRIDE"


class _Loader(importlib.abc.Loader):
    def create_module(self, spec: importlib.machinery.ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        provide(module)


class _Metadata(importlib.metadata.Distribution):
    """The metadata of a distribution liger-kernel, which transformers and TRL read before they import it."""

    def read_text(self, filename: Any) -> str | None:
        if filename == "METADATA":
            return f"Metadata-Version: 2.1\nName: liger-kernel\nVersion: {VERSION}\n"
        return f"{ROOT}\n" if filename == "top_level.txt" else None

    def locate_file(self, path: Any) -> Any:
        return Path(__file__).parent / path


class _Finder(importlib.metadata.DistributionFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in MODULES:
            module, _, name = fullname.rpartition(".")
            if module in MODULES:
                # The error has the name of the module, as the error of "from module import name" has. With
                # the name of what is missing, that statement would replace this message by Python's.
                raise ModuleNotFoundError(
                    f"{_missing(module, name)}: docs/guides/compat.md lists the names that are missing, with the "
                    "reasons",
                    name=module,
                )
            return None
        # Every module is a package, so that "from module import name" looks for a missing name here.
        return importlib.util.spec_from_file_location(
            fullname, __file__, loader=_Loader(), submodule_search_locations=[]
        )

    def find_distributions(self, context: Any = None) -> Iterable[importlib.metadata.Distribution]:
        name = getattr(context, "name", None)
        ours = name is None or name.lower().replace("_", "-") == "liger-kernel"
        if ours and next(iter(_installed_distributions()), None) is None:
            yield _Metadata()


_finder = _Finder()


def _missing(module: str, name: str) -> str:
    return f"liger.compat: {module} has no '{name}'"


def _is_importable(package: str) -> bool:
    if package in sys.modules:
        return sys.modules[package] is not None
    return importlib.util.find_spec(package) is not None


def provide(module: ModuleType) -> None:
    """Gives a module of liger_kernel its names; each is imported from liger at first use.

    Names that need a package which is not installed (TRL, for example) are neither in ``__all__`` nor in
    ``dir``; using one raises an ImportError that says so.

    Args:
        module: a module whose name is in the table; its ``__getattr__``, ``__dir__`` and ``__all__`` are set.
    """
    name, sources = module.__name__, MODULES[module.__name__]
    namespace = module.__dict__

    def getattribute(attribute: str) -> Any:
        if attribute not in sources:
            raise AttributeError(
                f"{_missing(name, attribute)}, only {', '.join(sorted(sources))} (docs/guides/compat.md)"
            )
        source = sources[attribute]
        for package in needed_packages(source, attribute):
            if not _is_importable(package):
                raise ImportError(missing(f"liger.compat: {name}.{attribute}", package))
        namespace[attribute] = loaded(source, attribute)
        return namespace[attribute]

    namespace["__getattr__"] = getattribute
    available = [
        attribute
        for attribute, source in sources.items()
        if all(map(_is_importable, needed_packages(source, attribute)))
    ]
    namespace["__dir__"] = lambda: sorted({*namespace, *available})
    namespace["__all__"] = [attribute for attribute in available if is_starred(name, attribute)]
    if name == ROOT:
        namespace["__version__"] = VERSION


def _installed_distributions():
    """The distributions named liger-kernel that other finders know."""
    for finder in sys.meta_path:
        find = getattr(finder, "find_distributions", None)
        if find is not None and finder is not _finder:
            yield from find(importlib.metadata.DistributionFinder.Context(name="liger-kernel"))


def _other_package() -> str | None:
    """The location of an importable liger_kernel that is not of liger, or None."""
    loaded = sys.modules.get(ROOT)
    spec = loaded.__spec__ if loaded is not None else importlib.util.find_spec(ROOT)
    # A folder without __init__.py, such as a checkout, is no package that anyone installed.
    if spec is None or spec.origin is None or isinstance(spec.loader, _Loader):
        return None
    folder = Path(spec.origin).parent
    return None if (folder / _MARKER).exists() else str(folder)


def install() -> None:
    """Makes ``liger_kernel`` importable. ``import liger.compat`` calls it; after :func:`uninstall` call it
    again.

    Raises:
        ImportError: another liger_kernel is installed and ``LIGER_COMPAT_OVERRIDE`` is not 1, or it was
            imported already.
        ValueError: ``LIGER_COMPAT_OVERRIDE`` is neither 0 nor 1.
    """
    if _finder in sys.meta_path:
        return
    may_replace = environment_flag(_OVERRIDE)
    other = _other_package()
    if other is not None and ROOT in sys.modules:
        raise ImportError(
            f"liger.compat: the liger_kernel of {other} is imported already; import liger.compat before it"
        )
    if other is not None and not may_replace:
        raise ImportError(
            f"liger.compat: a liger_kernel is installed in {other}, which liger.compat does not replace unasked. "
            f"Uninstall it, or set the environment variable {_OVERRIDE}=1"
        )
    sys.meta_path.insert(0, _finder)
    _forget_availability()


def uninstall() -> None:
    """Undoes :func:`install`: later imports of ``liger_kernel`` find what is installed. No effect if not
    installed."""
    if _finder in sys.meta_path:
        sys.meta_path.remove(_finder)
        for name in [name for name in sys.modules if name in MODULES]:
            del sys.modules[name]
        _forget_availability()


def _forget_availability() -> None:
    importlib.invalidate_caches()
    # transformers caches whether liger_kernel is available.
    utilities = sys.modules.get("transformers.utils.import_utils")
    for name in ("is_liger_kernel_available", "_is_package_available"):
        clear = getattr(getattr(utilities, name, None), "cache_clear", None)
        if clear is not None:
            clear()
