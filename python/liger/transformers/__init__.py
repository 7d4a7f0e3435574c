"""Patching of Hugging Face models: one call replaces modules by liger, another restores them (docs/patching.md)."""

from __future__ import annotations

from ._checkpoint import checkpoint
from ._experts import register as _register_experts
from ._future import patch_future, unpatch_future
from ._patching import patch, unpatch
from ._report import PatchReport, patch_report

__all__ = [
    "PatchReport",
    "checkpoint",
    "patch",
    "patch_future",
    "patch_report",
    "unpatch",
    "unpatch_future",
]

_register_experts()


def __dir__() -> list[str]:
    return __all__
