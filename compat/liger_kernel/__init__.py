# SPDX-License-Identifier: BSD-3-Clause
"""The names of liger-kernel on the ops of liger: see liger.compat."""

import sys

from liger import compat

compat.provide(sys.modules[__name__])
