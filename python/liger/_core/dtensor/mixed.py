"""The error about plain tensors beside DTensors."""


class MixedTensors(RuntimeError):
    """Tensors of a call that are not all DTensors on one mesh."""
