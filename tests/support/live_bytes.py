# SPDX-License-Identifier: BSD-3-Clause
"""Memory of tensors on any device, counted op by op."""

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """The most bytes alive at one time in tensors that ops made inside the block, the given ones not
    counted."""

    def __init__(self, *given):
        super().__init__()
        self.peak = 0
        # Python's weak references to storages are lost when a storage gets another Python object.
        self._bytes = {StorageWeakRef(tensor.untyped_storage()): 0 for tensor in given}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self._bytes.setdefault(StorageWeakRef(storage), storage.nbytes())
        self.peak = max(self.peak, self.live)
        return out

    @property
    def live(self):
        self._bytes = {
            reference: count for reference, count in self._bytes.items() if not reference.expired()
        }
        return sum(self._bytes.values())
