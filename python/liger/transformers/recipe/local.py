# SPDX-License-Identifier: BSD-3-Clause
"""Values of a thread, which the code of a model reads within a call of ours."""

import contextlib
import threading
from typing import Any


class Local(threading.local):
    """A value of each thread; None outside of :meth:`holding`."""

    value: Any

    def __init__(self):
        # In every thread. A class attribute is a constant to torch.compile.
        self.value = None

    @contextlib.contextmanager
    def holding(self, value):
        """Sets the value within the block, and restores the one before."""
        before, self.value = self.value, value
        try:
            yield
        finally:
            self.value = before
