# SPDX-License-Identifier: BSD-3-Clause
"""Memory of tensors on any device, counted op by op."""

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """The most bytes alive at one time in tensors that ops made inside the block, the given ones not
    counted."""

    def __init__(self, *given):
        super().__init__()
        self.live = self.peak = 0
        self._known = weakref.WeakKeyDictionary({tensor.untyped_storage(): True for tensor in given})

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage() not in self._known:
                storage = tensor.untyped_storage()
                self._known[storage] = True
                self.live += storage.nbytes()
                weakref.finalize(storage, self._free, storage.nbytes())
        self.peak = max(self.peak, self.live)
        return out

    def _free(self, count):
        self.live -= count
