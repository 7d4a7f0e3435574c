# SPDX-License-Identifier: BSD-3-Clause
"""``liger.trl.patch(trainer)`` computes the loss of a TRL trainer (docs/guides/trl.md)."""

import logging

from .._core.runtime.extras import install, missing

try:
    import trl  # noqa: F401
    from trl.trainer.utils import FusedCausalLMOutput as _  # noqa: F401
except ImportError as error:
    if isinstance(error, ModuleNotFoundError) and error.name == "trl":
        raise ModuleNotFoundError(missing("liger.trl", "trl"), name="trl") from error
    raise ImportError(
        f"liger.trl needs trl 1.16 or later with what it depends on ({install('trl')}): {error}"
    ) from error

from ._patch import patch

__all__ = ["patch"]

logging.getLogger(__name__).addHandler(logging.NullHandler())
