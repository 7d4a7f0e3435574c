# SPDX-License-Identifier: BSD-3-Clause
"""Patching of Hugging Face models by one call, and restoring (docs/guides/patching.md)."""

from .._core.runtime.extras import missing

try:
    import transformers as _  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "transformers":
        raise
    # The name of the function that is called most: liger.patch imports this package.
    raise ModuleNotFoundError(missing("liger.patch", "transformers"), name="transformers") from error

from .checkpointing.checkpoint import checkpoint
from .checkpointing.gradient_release import release_gradients
from .mlp.experts import register as _register_experts
from .patching.future import patch_future, unpatch_future
from .patching.patch import patch, unpatch
from .patching.report import PatchReport, patch_report
from .step_graphs import graph_step

__all__ = [
    "PatchReport",
    "checkpoint",
    "graph_step",
    "patch",
    "patch_future",
    "patch_report",
    "release_gradients",
    "unpatch",
    "unpatch_future",
]

_register_experts()


def __dir__() -> list[str]:
    return __all__
