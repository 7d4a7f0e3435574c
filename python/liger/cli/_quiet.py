# SPDX-License-Identifier: BSD-3-Clause
"""Commands that patch many models do not report each of them."""

import contextlib
import logging


@contextlib.contextmanager
def quiet_patching():
    """Errors alone from the logger of :func:`liger.patch`, until the end of the block."""
    logger = logging.getLogger("liger.transformers")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)
