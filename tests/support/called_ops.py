"""The ops that run in a block."""

from torch.utils._python_dispatch import TorchDispatchMode


class CalledOps(TorchDispatchMode):
    """``names`` has the name of each op, as often as it ran, without overload and namespace."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))
