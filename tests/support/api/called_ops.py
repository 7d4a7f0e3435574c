# SPDX-License-Identifier: BSD-3-Clause
"""The ops that run in a block."""

from torch.utils._python_dispatch import TorchDispatchMode


class CalledOps(TorchDispatchMode):
    """``names`` has the name of each op, as often as it ran, without overload and namespace; ``full_names``
    are those with a namespace."""

    def __init__(self):
        super().__init__()
        self.names, self.full_names = [], []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.overloadpacket.__name__)
        self.full_names.append(func.name().partition(".")[0])
        return func(*args, **(kwargs or {}))
