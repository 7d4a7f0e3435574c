# SPDX-License-Identifier: BSD-3-Clause
"""Environment variables that are read when liger is imported, or 0 or 1."""

import os

# Variables that have no effect after the import of liger, with their values then.
_AT_IMPORT = {name: os.environ.get(name) for name in ("LIGER_BACKEND", "LIGER_AUTOGRAD", "TRITON_INTERPRET")}


def changed_since_import() -> list[str]:
    """A sentence for each variable of this process that has changed since the import of liger read it."""
    changed = []
    for name, before in _AT_IMPORT.items():
        now = os.environ.get(name)
        if (now or "") != (before or ""):
            was = f"'{before}'" if before else "not set"
            changed.append(
                f"{name} is {repr(now) if now else 'not set'}, and was {was} when liger was imported, which alone reads"
                " it: set it before the import"
                + (", or call liger.set_backend" if name == "LIGER_BACKEND" else "")
            )
    return changed


def environment_flag(name: str, default: str = "0") -> bool:
    """True if an environment variable is 1. Unset and empty mean ``default``.

    Raises:
        ValueError: any other value than 0 or 1.
    """
    text = os.environ.get(name) or default
    if text not in ("0", "1"):
        raise ValueError(f"{name}: expected 0 or 1, got '{text}'")
    return text == "1"


def triton_interpreted() -> bool:
    """True if TRITON_INTERPRET is 1: Triton kernels then run on CPU tensors. Raises ValueError as
    environment_flag."""
    return environment_flag("TRITON_INTERPRET")


def targets_checked() -> bool:
    """True if LIGER_CHECK_TARGETS is 1: targets on a GPU are then checked, with a synchronisation. Raises
    ValueError as environment_flag."""
    return environment_flag("LIGER_CHECK_TARGETS")


def wgmma_engine_allowed() -> bool:
    """True if LIGER_WGMMA is 1, its default: else the generic engine runs everywhere. Raises ValueError as
    environment_flag."""
    return environment_flag("LIGER_WGMMA", "1")


def python_nodes() -> bool:
    """True if LIGER_AUTOGRAD is python: autograd nodes are then Python objects, also where the build has them
    in C++.

    Raises:
        ValueError: any other value than auto or python.
    """
    text = os.environ.get("LIGER_AUTOGRAD") or "auto"
    if text not in ("auto", "python"):
        raise ValueError(f"LIGER_AUTOGRAD: expected auto or python, got '{text}'")
    return text == "python"
