"""Integration with TRL: ``liger.trl.patch(trainer)`` computes a trainer's loss with liger. See docs/trl.md."""

import logging

try:
    from trl.trainer.utils import FusedCausalLMOutput as _  # noqa: F401
except ImportError as error:
    raise ImportError(f"liger.trl needs trl 1.16 or later with what it depends on: {error}") from error

from ._patch import patch

__all__ = ["patch"]

logging.getLogger(__name__).addHandler(logging.NullHandler())
