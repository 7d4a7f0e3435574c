# SPDX-License-Identifier: BSD-3-Clause
"""Makes the package name ``liger_kernel`` importable, on the ops of liger: ``import liger.compat``
(docs/guides/compat.md).

Programs that import liger_kernel then run unchanged. ``python -m liger.compat train.py ...`` runs a script
that does not import this module. An installed liger-kernel is not replaced: the import raises, unless the
environment variable ``LIGER_COMPAT_OVERRIDE`` is 1.
"""

from .finder import VERSION, install, provide, uninstall

__all__ = ["VERSION", "install", "provide", "uninstall"]

install()
