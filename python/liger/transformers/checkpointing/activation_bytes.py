# SPDX-License-Identifier: BSD-3-Clause
"""The bytes that one decoder layer saves for its backward."""

import torch
from torch.utils._pytree import tree_leaves

from ..recipe import recomputed
from .attention_calls import observed
from .device_memory import plain_tensors
from .kept_attention import Counter


class Probe:
    """Calls a layer without a checkpoint, counts what it saves, and keeps that on the host till the backward.

    So the step needs no more device memory than one in which the layer is recomputed: its activations exist
    in the forward alone, where no other layer is recomputed. On the CPU they are not copied.

    Args:
        layer: the module.
        stays: whether it keeps what it saves on the device: without a plan, the layer would do so, too.

    Attributes:
        bytes: of all storages that the layer saved, without its arguments, parameters and buffers, and
            without what its backward recomputes (``liger.patch(recompute=True)``). Each storage counts once.
            The sum over all calls.
        attention: counts what its attention calls would keep alone.
        tokens: of all calls.
    """

    is_planned = True

    def __init__(self, layer, stays=False):
        self.layer, self.stays, self.bytes, self.tokens = layer, stays, 0, 0
        self.attention = Counter()

    def __call__(self, function, *args, **kwargs):
        given = getattr(function, "keywords", {})
        outside = {_address(leaf) for t in tree_leaves((args, kwargs, given)) for leaf in plain_tensors(t)}
        # References, without which the allocator may reuse an address for another saved tensor.
        storages: dict[int, torch.UntypedStorage] = {}

        def pack(x):
            # ZeRO-3 gathers the parameters inside the call.
            weights = {
                _address(leaf)
                for t in (*self.layer.parameters(), *self.layer.buffers())
                for leaf in plain_tensors(t)
            }
            for leaf in () if recomputed.is_recomputed(x) else plain_tensors(x):
                if leaf.numel() and _address(leaf) not in outside | weights:
                    storages[_address(leaf)] = leaf.untyped_storage()
            stays = (
                self.stays
                or type(x) is not torch.Tensor
                or x.layout is not torch.strided
                or x.device.type == "cpu"
                or _address(x) in weights
            )
            # A node that saves its own output would keep itself alive.
            return (x if x.is_leaf else x.detach()) if stays else HostCopy(x)

        def unpack(packed):
            return packed.restored() if isinstance(packed, HostCopy) else packed

        hidden = next(t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor))
        self.tokens += hidden.numel() // max(hidden.shape[-1], 1)
        hooks = torch.autograd.graph.saved_tensors_hooks(pack, unpack)
        attention = self.attention
        with hooks, recomputed.counting(pack), observed(attention), attention.kernels(self.layer):
            output = function(*args, **kwargs)
        self.bytes += sum(storage.nbytes() for storage in storages.values())
        return output


class HostCopy:
    """A tensor in host memory that comes back with its strides.

    A backward may rely on the strides that its forward has made: the backward of memory-efficient attention
    needs the strides of a sliced mask. Expanded dimensions are stored once.
    """

    def __init__(self, x):
        self.shape, self.device = x.shape, x.device
        x = x.detach()
        for dim, stride in enumerate(x.stride()):
            if stride == 0 and x.shape[dim] > 1:
                x = x.narrow(dim, 0, 1)
        self.stride, self.data = x.stride(), x.to("cpu")

    def restored(self):
        x = torch.empty_strided(self.data.shape, self.stride, dtype=self.data.dtype, device=self.device)
        return x.copy_(self.data).expand(self.shape)


def _address(tensor):
    return tensor.untyped_storage().data_ptr()
