"""The ops over tensors that are spread over processes: every op of ``torch.ops.liger`` takes DTensors
(docs/distributed.md), and losses over a vocabulary in parts (docs/vocab_parallel.md).

The rules are registered when ``torch.distributed.tensor`` is imported, before which there can be no DTensor: importing
it takes half a second, which ``import liger`` alone does not spend.
"""

import importlib
import importlib.abc
import importlib.util
import sys

__all__ = ["is_dtensor", "vocab_parallel_cross_entropy", "vocab_parallel_fused_linear_ce"]

_DTENSOR_MODULE = "torch.distributed.tensor"
# What isinstance takes for "a DTensor": nothing is one before their module is imported.
_dtensor_types = ()


def __getattr__(name):
    # Looked up when first used: it imports the distributed part of torch.
    if name.startswith("vocab_parallel_"):
        return getattr(importlib.import_module("liger.distributed.vocab_parallel"), name)
    raise AttributeError(f"module 'liger.distributed' has no attribute '{name}'")


def is_dtensor(value):
    """Whether a value is a DTensor."""
    return isinstance(value, _dtensor_types)


def align_tokens(op, x, target, token_weight):
    """The arguments of a loss, so that :func:`flatten_tokens` gives each rank the same rows of all of them.

    Raises:
        RuntimeError: x is a DTensor, and target or token_weight is not.
    """
    if not is_dtensor(x):
        return x, target, token_weight
    from ._tokens import align

    return align(op, x, target, token_weight)


def flatten_tokens(tensor, dims):
    """``tensor.flatten(0, dims - 1)``, of a DTensor without moving a token between ranks."""
    if not is_dtensor(tensor):
        return tensor.flatten(0, dims - 1)
    from ._tokens import flatten

    return flatten(tensor, dims)


def unflatten_tokens(rows, like):
    """The rows of a flattened tensor, one value each, in the shape that the tensor ``like`` had."""
    if not is_dtensor(rows):
        return rows.reshape(like.shape)
    from ._tokens import unflatten

    return unflatten(rows, like)


def _register_rules():
    global _dtensor_types
    from . import _rules

    _rules.register()
    _dtensor_types = (_rules.DTensor,)


class _AfterImport(importlib.abc.MetaPathFinder):
    """Registers the rules at the end of the first import of the module of DTensor."""

    def find_spec(self, name, path, target=None):
        if name != _DTENSOR_MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def execute_and_register(module):
            execute(module)
            _register_rules()

        spec.loader.exec_module = execute_and_register
        return spec


def _initialise():
    if _DTENSOR_MODULE in sys.modules:
        _register_rules()
    else:
        sys.meta_path.insert(0, _AfterImport())
