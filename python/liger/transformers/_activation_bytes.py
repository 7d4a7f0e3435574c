"""The bytes that one decoder layer saves for its backward."""

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from . import _recompute


class Probe:
    """Calls a layer without a checkpoint, counts what it saves, and stores that in host memory until the backward.

    So the step needs no more device memory than one in which the layer is recomputed: its activations exist in the
    forward alone, where the activations of the other layers are not yet recomputed. On the CPU they are not copied.

    Attributes:
        bytes: of all storages that the layer saved, without its arguments, parameters and buffers, and without what
            its backward recomputes (``liger.patch(recompute=True)``). Each storage counts once. The sum over all calls.
    """

    is_probe = True

    def __init__(self, layer):
        self.layer, self.bytes = layer, 0

    def __call__(self, function, *args, **kwargs):
        given = getattr(function, "keywords", {})
        outside = {_address(leaf) for t in tree_leaves((args, kwargs, given)) for leaf in plain_tensors(t)}
        # References to the storages: without them the allocator may reuse an address for another saved tensor.
        storages: dict[int, torch.UntypedStorage] = {}

        def pack(x):
            # ZeRO-3 gathers the parameters inside the call.
            weights = {
                _address(leaf)
                for t in (*self.layer.parameters(), *self.layer.buffers())
                for leaf in plain_tensors(t)
            }
            recomputed = _recompute.is_recomputed(x)
            for leaf in () if recomputed else plain_tensors(x):
                if leaf.numel() and _address(leaf) not in outside | weights:
                    storages[_address(leaf)] = leaf.untyped_storage()
            stays = type(x) is not torch.Tensor or x.device.type == "cpu" or _address(x) in weights
            return (None, x) if stays else (x.device, x.detach().to("cpu"))

        def unpack(packed):
            device, x = packed
            return x if device is None else x.to(device)

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack), _recompute.counting(pack):
            output = function(*args, **kwargs)
        self.bytes += sum(storage.nbytes() for storage in storages.values())
        return output


def plain_tensors(x):
    """The tensors that a tensor consists of: itself, or those inside a DTensor or another wrapper."""
    if not isinstance(x, torch.Tensor):
        return
    if is_traceable_wrapper_subclass(x):
        for name in x.__tensor_flatten__()[0]:
            yield from plain_tensors(getattr(x, name))
    else:
        yield x


def _address(tensor):
    return tensor.untyped_storage().data_ptr()
