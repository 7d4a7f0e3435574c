"""DTensors as the ops see them: whether a value is one, and their tokens as rows.

``torch.distributed.tensor`` takes half a second to import, which ``import liger`` does not spend. No value can be a
DTensor before that module is imported, so everything here waits for it.
"""

import importlib.abc
import importlib.util
import sys

_MODULE = "torch.distributed.tensor"
# The second argument of isinstance: empty until the module is imported.
_types = ()


def is_dtensor(value):
    """Whether a value is a DTensor."""
    return isinstance(value, _types)


def align_tokens(op, x, target, token_weight):
    """The arguments of a loss, so that :func:`flatten_tokens` gives each rank the same rows of all of them.

    Raises:
        RuntimeError: x is a DTensor, and target or token_weight is not.
    """
    if not is_dtensor(x):
        return x, target, token_weight
    from .dtensor_rows import align

    return align(op, x, target, token_weight)


def flatten_tokens(tensor, dims):
    """``tensor.flatten(0, dims - 1)``, of a DTensor without moving a token between ranks."""
    if not is_dtensor(tensor):
        return tensor.flatten(0, dims - 1)
    from .dtensor_rows import flatten

    return flatten(tensor, dims)


def unflatten_tokens(rows, like):
    """The rows of a flattened tensor, one value each, in the shape that the tensor ``like`` had."""
    if not is_dtensor(rows):
        return rows.reshape(like.shape)
    from .dtensor_rows import unflatten

    return unflatten(rows, like)


class _AfterImport(importlib.abc.MetaPathFinder):
    """Calls a function at the end of the first import of the module of DTensor."""

    def __init__(self, function):
        self.function = function

    def find_spec(self, name, path, target=None):
        if name != _MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def execute_and_call(module):
            execute(module)
            self.function()

        spec.loader.exec_module = execute_and_call
        return spec


def when_dtensor_is_imported(register):
    """Calls ``register()`` once the module of DTensor is imported: now, or at the end of its import."""

    def enable():
        global _types
        register()
        _types = (sys.modules[_MODULE].DTensor,)

    if _MODULE in sys.modules:
        enable()
    else:
        sys.meta_path.insert(0, _AfterImport(enable))
